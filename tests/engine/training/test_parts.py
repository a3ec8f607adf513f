"""Parts of training against plain forms of the same."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from outrider.engine.training.accept_length import AgreementCounts, own_texts
from outrider.engine.training.batches import Mixture, RowSource, hold_out_windows, windows
from outrider.engine.training.chain_attention import (
    Keys,
    chain_attention,
    dense_chain_attention,
)
from outrider.engine.training.dense import DenseTarget
from outrider.engine.training.draft_vocab import draft_vocab
from outrider.engine.training.losses import Wanted, drafted_loss
from outrider.engine.training.on_policy import continuations, own_rows
from outrider.engine.training.optimizer import orthogonal, rate_factor
from outrider.engine.training.token_files import DataError, read_split, which_split
from outrider.engine_core.train_spec import TrainSpec

CPU = torch.device("cpu")


@pytest.mark.parametrize("drafted", [0, 1, 3])
def test_chain_attention_and_its_gradients(drafted: int) -> None:
    generator = torch.Generator().manual_seed(drafted)
    heads = [4, *[2] * (2 * drafted + 2)]
    leaves = [torch.randn(2, n, 33, 16, generator=generator).requires_grad_() for n in heads]
    keys = [Keys(*leaves[i : i + 2]) for i in range(1, len(leaves), 2)]
    wanted = torch.randn(2, 4, 33, 16, generator=generator)
    found = []
    for function in (chain_attention, dense_chain_attention):
        answer = function(leaves[0], keys[0], keys[1:])
        found.append([answer, *torch.autograd.grad(answer, leaves, wanted)])
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lk", [False, True])
@pytest.mark.parametrize("hard", [0.0, 0.4])
def test_the_loss_has_the_gradient_of_what_it_says(hard: float, lk: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(3, 5, 6, generator=generator).requires_grad_()
    head = torch.randn(11, 6, generator=generator).requires_grad_()
    target = torch.randn(3, 5, 11, generator=generator)
    weight = torch.rand(3, 5, generator=generator)
    top = target.argmax(-1)
    loss, agree = drafted_loss(inputs, head, Wanted(target, top), weight, hard, lk)
    mine = torch.autograd.grad(loss, (inputs, head))
    logits = inputs @ head.t()
    p, q = target.softmax(-1), logits.softmax(-1)
    goal = (1 - hard) * p + hard * torch.nn.functional.one_hot(top, 11)
    rows = -(goal * q.log()).sum(-1)
    if lk:
        overlap = torch.minimum(p, q).sum(-1)
        share = (-3 * overlap).exp().detach()
        rows = share * rows + (1 - share) * (1 - overlap)
    plain = (rows * weight).sum()
    torch.testing.assert_close(loss, plain)
    assert torch.equal(agree, logits.argmax(-1) == top)
    for one, other in zip(mine, torch.autograd.grad(plain, (inputs, head)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_a_draft_vocabulary_is_the_most_frequent_tokens() -> None:
    counts = np.array([0, 5, 5, 9, 1, 7])
    vocab = draft_vocab(counts, 4, (0,), CPU)
    assert vocab.ids is not None
    assert vocab.ids.tolist() == [0, 1, 3, 5]
    maps = vocab.maps()
    assert (maps["d2t"] + torch.arange(4)).tolist() == [0, 1, 3, 5]
    assert maps["t2d"].tolist() == [True, True, False, True, False, True]
    places = vocab.places(torch.arange(6))
    assert places[vocab.ids].tolist() == [0, 1, 2, 3]
    assert (places[[2, 4]] >= 4).all()
    assert draft_vocab(counts, None, (), CPU).maps() == {}
    with pytest.raises(ValueError, match="at most 6"):
        draft_vocab(counts, 7, (), CPU)


def test_documents_are_split_by_their_hash(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(500)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    texts = [f"{i} {i + 1}" for i in range(1, 400)]
    lines = "".join(f'{{"text": "{text}"}}\n' for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    split = read_split((str(tmp_path),), tokenizer, 0, 500, (8, 9), (7,))
    first = {text: hashlib.sha1(text.encode()).digest()[0] for text in texts}
    kept = [text for text in texts if first[text] in (8, 9)]
    out = [text for text in texts if first[text] == 7]
    assert kept
    assert out
    decoded = [int(text.split()[0]) for text in kept]
    assert split.selection.reshape(-1, 3).tolist() == [[i, i + 1, 0] for i in decoded]
    assert len(split.train) == 3 * (len(texts) - len(kept) - len(out))
    assert which_split(out[0], (8,), (7,)) == "excluded"
    (tmp_path / "b.jsonl").write_text('{"other": 1}\n')
    with pytest.raises(DataError, match=r'neither "text" nor "prompt"'):
        read_split((str(tmp_path / "b.jsonl"),), tokenizer, 0, 500, (), ())
    np.save(tmp_path / "c.npy", np.array([1, 900]))
    with pytest.raises(DataError, match="outside the vocabulary"):
        read_split((str(tmp_path / "c.npy"),), None, 0, 500, (), ())


def test_links_in_a_folder_are_followed(tmp_path: Path) -> None:
    real, data = tmp_path / "real", tmp_path / "data"
    (real / "inner").mkdir(parents=True)
    data.mkdir()
    for name, value in (("real/a.npy", 1), ("real/inner/b.npy", 2), ("c.npy", 3)):
        np.save(tmp_path / name, np.array([value]))
    (data / "link").symlink_to(real)
    (data / "other").symlink_to(real)
    (data / "log.jsonl").write_text('{"step": 1}\n')
    (data / "file.npy").symlink_to(tmp_path / "c.npy")
    (data / "gone.npy").symlink_to(tmp_path / "nowhere")
    (real / "inner" / "up").symlink_to(data)
    (real / "inner" / "self").symlink_to(".")
    assert read_split((str(data),), None, 0, 9, (), ()).train.tolist() == [3, 1, 2]


def test_what_a_step_takes_follows_from_its_number() -> None:
    rows = windows(np.arange(103, dtype=np.int32), 5)
    train, held = hold_out_windows(rows, every=7)
    assert len(rows) == 20
    assert len(train) + len(held) == 20
    own = held % 2 == 0
    mixture = Mixture([(RowSource(train, None, 1, CPU), 3), (RowSource(held, own, 2, CPU), 1)])
    again = Mixture([(RowSource(train, None, 1, CPU), 3), (RowSource(held, own, 2, CPU), 1)])
    steps = [mixture.take(step) for step in range(12)]
    assert torch.equal(again.take(11).ids, steps[11].ids)
    assert not steps[0].own[:3].any()
    assert torch.equal(steps[0].own[3], steps[0].ids[3] % 2 == 0)
    seen = torch.cat([step.ids[:3] for step in steps])[: len(train)]
    assert len({tuple(row.tolist()) for row in seen}) == len(train)
    # Two ranks share what one would take in two steps.
    assert torch.equal(mixture.take(1, 1, 2).ids, mixture.take(3).ids)


def test_accept_lengths_are_walked_as_serving_walks() -> None:
    agree = torch.tensor([[[1, 1], [0, 1], [1, 0], [1, 1], [0, 0], [1, 1]]]).bool()
    counts = AgreementCounts(2)
    counts.add(agree, torch.arange(8)[None] >= 2, -1)
    # From row 1: nothing; row 2: one; row 4: nothing; row 5: two, of which the text has one.
    found = counts.result()
    assert found.walked == (1 + 2 + 1 + 1) / 4
    assert found.per_step == (3 / 5, 2 / 3)
    assert found.projected == 1 + (3 + 2) / 5


def test_every_own_text_of_a_row_is_walked() -> None:
    agree = torch.ones(1, 7, 2).bool()
    marks = torch.tensor([0, 1, 1, 1, 0, 0, 1, 1, 0]).bool()
    assert own_texts(marks) == [(1, 4), (6, 8)]
    counts = AgreementCounts(2)
    counts.add(agree, marks[None], -1)
    # Rows 0 and 1, one round of two; row 5, whose text has one token more.
    found = counts.result()
    assert found.walked == (2 + 1) / 2
    assert found.projected == 3.0
    # Rows 0, 1 and 5: behind row 2's first step the text is the target's no more.
    assert counts._reached.tolist() == [3, 3, 3]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_walks_are_those_of_a_plain_model(data: st.DataObject) -> None:
    steps, length = data.draw(st.integers(1, 4)), data.draw(st.integers(6, 24))
    origin = data.draw(st.sampled_from([-1, 0]))
    bits = st.lists(st.booleans(), min_size=length, max_size=length)
    own = torch.tensor(data.draw(bits))
    rows = length - steps
    agree = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=rows * steps, max_size=rows * steps))
    ).view(rows, steps)
    counts = AgreementCounts(steps)
    counts.add(agree[None], own[None], origin)
    rounds = emitted = 0
    for begin, end in own_texts(own):
        newest = begin
        if newest + origin < 0:
            newest = 1
        while newest < end - 1 and newest + origin < rows:
            kept = 0
            while kept < steps and agree[newest + origin, kept]:
                kept += 1
            gained = min(kept + 1, end - 1 - newest)
            rounds, emitted, newest = rounds + 1, emitted + gained, newest + gained
    assert counts.result().walked == (emitted / rounds if rounds else None)


def own_spec(**fields: object) -> TrainSpec:
    made = TrainSpec(
        algorithm="EAGLE3", model="m", data=("d",), output="o", steps=1, sequence_length=96,
        on_policy_rows=8, on_policy_tokens=16,
    )  # fmt: skip
    return msgspec.structs.replace(made, **fields)


def test_room_behind_a_continuation_is_used() -> None:
    assert continuations(own_spec(), 80) == [80]
    assert continuations(own_spec(), 32) == [32, 80]
    assert continuations(own_spec(), 33) == [33]  # a prompt of 33 and 16 more do not fit behind
    assert continuations(own_spec(), 8) == [8, 56]  # prompts behind have 32 tokens at least
    assert continuations(own_spec(sequence_length=180), 40) == [40, 96, 152]


def test_rows_have_prompts_in_turns_and_the_engines_text(tmp_path: Path) -> None:
    made = own_spec(
        on_policy_prompts=(8, 70), on_policy_rows=5, on_policy_source="engine", output=str(tmp_path)
    )
    asked: list[int] = []

    def generate(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        asked.extend(len(prompt) for prompt in prompts)
        return [[7000 + prompt[-1]] * count for prompt in prompts]

    stream = np.arange(1, 1000, dtype=np.int32)
    ids, own = own_rows(made, "rows", stream, 5, cast(DenseTarget, None), generate, print)
    assert asked == [8] * 3 + [56] * 3 + [70] * 2
    assert own.sum(1).tolist() == [32, 16, 32, 16, 32]
    assert (ids[own] > 7000).all()
    assert (ids[~own] < 1000).all()
    assert (ids[0, 8:24] == 7000 + ids[0, 7]).all()
    assert (ids[0, 56:72] == 7000 + ids[0, 55]).all()
    again = own_rows(made, "rows", stream, 5, cast(DenseTarget, None), None, print)
    assert np.array_equal(again.ids, ids)
    assert np.array_equal(again.own, own)
    (tmp_path / "rows.json").write_text("{}")
    with pytest.raises(DataError, match="remove both"):
        own_rows(made, "rows", stream, 5, cast(DenseTarget, None), generate, print)


def test_muon_moves_singular_values_near_one() -> None:
    for shape in ((20, 50), (50, 20)):
        made = orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        values = torch.linalg.svdvals(made)
        assert values.min() > 0.5
        assert values.max() < 1.3


def test_the_rate_rises_holds_and_falls() -> None:
    assert rate_factor(0.0, 0.1, 0.5, "linear") == 0.02
    assert rate_factor(0.3, 0.1, 0.5, "linear") == 1.0
    assert rate_factor(0.75, 0.1, 0.5, "linear") == pytest.approx(0.5)
    assert rate_factor(0.75, 0.1, 0.5, "cosine") == pytest.approx(0.5)
    assert rate_factor(1.0, 0.1, 0.5, "linear") == 0.0
