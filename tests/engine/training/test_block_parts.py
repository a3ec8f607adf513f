"""Parts of block drafts' training: loss, weights, heads, anchors, attention, temperatures."""

import json
import math
import warnings
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from outrider.engine.training import block_attention
from outrider.engine.training.accept_length import AgreementCounts, whole_drafts
from outrider.engine.training.batches import RowSource
from outrider.engine.training.block_attention import DENSE, disagreement
from outrider.engine.training.block_layout import draw_anchors, every_anchor
from outrider.engine.training.block_loss import Drafted, Objective, block_loss
from outrider.engine.training.block_setup import feature_layers, mask_token
from outrider.engine.training.block_weighting import decay_weights, dpace_weights
from outrider.engine.training.calibration import calibrate, held_out_errors
from outrider.engine.training.chain_loss import ChainLoss
from outrider.engine.training.losses import Wanted, start_weights, surprise
from outrider.engine.training.markov_head import MarkovHead
from outrider.engine_core.draft_config_json import load_draft_config
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.model_path import resolve_model
from outrider.engine_core.refusal import RefusedError
from outrider.engine_core.train_spec import TrainSpec

from ...reference import block_training_ref as ref
from .block_recipes import CPU, LENGTH, VOCAB, make, spec_of, write_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def test_the_gradient_is_that_of_the_loss(folder: Path) -> None:
    """Through the Markov table, too; D-PACE's weights are constants."""
    generator = torch.Generator().manual_seed(0)
    size, width, rank = (6, 3), 5, 2
    head = torch.randn(11, width, generator=generator)
    leaves = [
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in ((*size, width), (*size, rank), (11, rank))
    ]
    target = torch.randn(*size, width, generator=generator)
    labels = torch.randint(0, 11, size, generator=generator)
    weight = torch.rand(size, generator=generator)
    objective = Objective(0.3, 0.8, False, 0.4, 0.5, 0.25, None)
    drafted = Drafted(leaves[0], head, leaves[1], leaves[2])
    mine = block_loss(drafted, target, labels, weight, objective)
    z = leaves[0] @ head.T + leaves[1] @ leaves[2].T
    p, q = (target @ head.T).softmax(-1), z.softmax(-1)
    goal = 0.6 * p + 0.4 * F.one_hot(p.argmax(-1), 11)
    rows = 0.3 * -(goal * q.log()).sum(-1) + 0.8 * (goal - q).abs().sum(-1) / 2
    plain = (rows * weight * mine.alive).sum()
    torch.testing.assert_close(mine.loss, plain)
    for one, other in zip(
        torch.autograd.grad(2 * mine.loss, leaves), torch.autograd.grad(2 * plain, leaves),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    # In chunks it is the same.
    block_loss_chunks = [
        block_loss(
            Drafted(leaves[0][i : i + 2], head, leaves[1][i : i + 2], leaves[2]),
            target[i : i + 2], labels[i : i + 2], weight[i : i + 2], objective,
        ).loss
        for i in (0, 2, 4)
    ]  # fmt: skip
    torch.testing.assert_close(torch.stack(block_loss_chunks).sum(), mine.loss)


def test_weights_of_the_papers_examples() -> None:
    chances, all_valid = torch.tensor([0.9, 0.5, 0.2]), torch.ones(3, dtype=torch.bool)
    full = dpace_weights(chances, all_valid, 0.5)
    torch.testing.assert_close(full, torch.tensor([2.09, 1.14, 0.4275]))
    holed = dpace_weights(chances, torch.tensor([True, False, True]), 0.5)
    torch.testing.assert_close(holed[[0, 2]], torch.tensor([1.52, 0.57]))
    assert ref.dpace([0.9, 0.5, 0.2], [True] * 3, 0.5) == pytest.approx([2.09, 1.14, 0.4275])
    wanted = torch.tensor([1.0, 0.7788, 0.6065, 0.4724])
    torch.testing.assert_close(decay_weights(4, 4.0, CPU), wanted, atol=5e-5, rtol=0)


def test_markov_heads_of_the_papers_examples() -> None:
    gated = {
        "markov_head.gate_proj.weight": torch.tensor([[0.3, 0.1]]),
        "markov_head.gate_proj.bias": torch.tensor([0.2]),
    }
    hidden, embedded = torch.tensor([[2.0]]), torch.tensor([[0.5]])
    latent, _ = MarkovHead("gated", 1).advance(hidden, embedded, None, gated)
    assert float(latent) == pytest.approx(0.350284, abs=1e-6)
    rnn = {
        "markov_head.joint_proj.weight": torch.tensor(
            [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]]
        ),
        "markov_head.joint_proj.bias": torch.zeros(3),
    }
    head = MarkovHead("rnn", 1)
    hidden, embedded = torch.tensor([[[2.0], [1.0]]]), torch.tensor([[[0.5], [-1.0]]])
    latents = head.latents(hidden, embedded, rnn)
    assert latents.flatten().tolist() == pytest.approx([0.975743, 0.298654], abs=1e-6)
    state = head.advance(hidden[:, 0], embedded[:, 0], None, rnn)[1]
    assert float(state) == pytest.approx(0.297202, abs=1e-6)  # type: ignore[arg-type]
    state = head.advance(hidden[:, 1], embedded[:, 1], state, rnn)[1]
    assert float(state) == pytest.approx(0.258974, abs=1e-6)  # type: ignore[arg-type]


def test_anchors_stand_before_own_text() -> None:
    own = torch.zeros(3, 30, dtype=torch.bool)
    own[0, 10:20] = True
    own[1, 3:5] = True
    torch.manual_seed(0)
    even = torch.ones(own.shape)
    blocks = draw_anchors(own, 6, 4, even, 0.6)
    assert (blocks.anchors.diff() > 0).all()
    for anchor, valid in zip(*(part[0].tolist() for part in blocks[:2]), strict=True):
        assert valid
        assert own[0, anchor + 1]
    assert blocks.anchors[1][blocks.valid[1]].tolist() == [2, 3]
    assert blocks.valid[2].all()
    assert blocks.anchors.min() >= 1
    assert blocks.anchors.max() + 4 < 30
    seen = torch.cat([draw_anchors(own, 6, 4, even, 0.6).anchors[2] for _ in range(100)])
    assert set(seen.tolist()) == set(range(1, 26))
    parts = list(every_anchor(own.long(), 7, 4))
    assert [part for part, _ in parts] == [slice(i, min(i + 7, 26)) for i in range(0, 26, 7)]
    assert parts[-1][1].anchors[0].tolist() == [21, 22, 23, 24, 25, 25, 25]


def test_anchors_stand_where_the_target_was_unsure() -> None:
    own = torch.zeros(1, 40, dtype=torch.bool)
    own[0, 10:31] = True
    unlikely = torch.zeros(1, 40)
    unlikely[0, [5, 12, 20]] = torch.tensor([9.0, 0.9, 0.3])
    torch.manual_seed(0)
    drawn = torch.cat([draw_anchors(own, 1, 4, unlikely, 0.5).anchors for _ in range(4000)])
    share = torch.bincount(drawn.flatten(), minlength=40) / len(drawn)
    # 21 anchors, 9 to 29; half of the chances are the same for all, of the others 12 has 3 in 4.
    assert share[12].item() == pytest.approx(0.5 / 21 + 0.5 * 0.75, abs=0.03)
    assert share[20].item() == pytest.approx(0.5 / 21 + 0.5 * 0.25, abs=0.03)
    assert share[9:30].sum() == 1
    # However many are drawn, what they count together goes by the weights.
    whole = torch.zeros(40)
    for _ in range(2000):
        many = draw_anchors(own, 12, 4, unlikely, 0.5)
        whole[many.anchors[0]] += many.weight[0] / (12 * 2000)
    assert whole[12].item() == pytest.approx(share[12].item(), abs=0.05)
    assert whole[20].item() == pytest.approx(share[20].item(), abs=0.03)
    all_of_them = draw_anchors(own, 30, 4, unlikely, 0.5)
    assert all_of_them.valid.sum() == 21
    counted = all_of_them.weight[0][all_of_them.anchors[0] == 12].item() / 21
    assert counted == pytest.approx(0.5 / 21 + 0.5 * 0.75, abs=1e-4)
    surest = draw_anchors(own, 4, 4, unlikely, 1.0)
    assert surest.valid.all()
    assert {12, 20} <= set(surest.anchors[0].tolist())
    none = draw_anchors(own, 4, 4, torch.zeros(1, 40), 1.0)
    assert none.valid.all()
    assert len(set(none.anchors[0].tolist())) == 4


def test_starts_weigh_one_on_average() -> None:
    unlikely = torch.tensor([[0.9, 0.1, 0.5, 0.0], [0.0, 0.0, 0.0, 0.7]])
    fits = torch.tensor([[True, True, True, False], [True, True, False, False]])
    found = start_weights(unlikely, fits, 0.6)
    assert found[0].tolist() == pytest.approx([0.4 + 0.6 * 1.8, 0.4 + 0.6 * 0.2, 1.0, 0.4])
    assert found[1, :2].tolist() == pytest.approx([0.4, 0.4])
    spec = TrainSpec(algorithm="EAGLE", model="m", data=("d",), output="o", prompt_weight=0.25)
    own = torch.tensor([[False, False, True, True, True, True]])
    ids, starts = torch.zeros(1, 6, dtype=torch.int64), torch.tensor([[2.0, 0.5, 1.5]])
    wanted = Wanted(torch.zeros(1, 3, 8), torch.zeros(1, 3, dtype=torch.int64))
    loss = ChainLoss(spec, ids, own, 3, starts)
    assert loss.weights(1, wanted, 8).tolist() == [[0.25 * 2.0, 0.5, 1.5]]


def test_surprise_is_what_the_target_left_to_other_tokens() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, head = (torch.randn(s, generator=generator) for s in ((2, 5, 4), (7, 4)))
    ids = torch.randint(0, 7, (2, 5), generator=generator)
    found = surprise(hidden, head, ids)
    assert found[:, 0].tolist() == [0, 0]
    for row in range(2):
        for at in range(1, 5):
            law = (hidden[row, at - 1] @ head.t()).double().softmax(-1)
            assert found[row, at].item() == pytest.approx(1 - law[ids[row, at]].item(), abs=1e-6)


def test_flex_attention_is_the_whole_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled, which takes a CPU long."""
    monkeypatch.setattr(block_attention, "compiled", lambda function: function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert disagreement(block_attention._flex(), CPU, torch.float32, 16) < 1e-4
    wrong = DENSE._replace(mask=lambda visible, like, keys: DENSE.mask(visible, like, keys) | True)  # type: ignore[operator]
    assert disagreement(wrong, CPU, torch.float32, 16) > 0.1


def test_figures_of_some_rows_are_of_these_alone() -> None:
    agree = torch.tensor([[[1, 1], [0, 0], [1, 0], [1, 1]]]).bool()
    own = torch.ones(1, 6, dtype=torch.bool)
    counts = AgreementCounts(2)
    counts.add(agree, own, 0, torch.tensor([[True, False, True, False]]))
    found = counts.result()
    assert found.projected == 1 + (2 + 1) / 2
    assert found.walked is None
    assert whole_drafts(own, 0, 4, 2).tolist() == [[True] * 4]
    own[0, 4:] = False
    assert whole_drafts(own, 0, 4, 2).tolist() == [[True, True, True, False]]
    assert whole_drafts(own & False, 0, 4, 2).all()


def test_the_mask_token_is_the_tokenizers() -> None:
    config = load_model_config(resolve_model("pycoder"))
    spec = TrainSpec(algorithm="DFLASH", model="pycoder", data=("d",), output="o", steps=1)
    assert mask_token(spec, config) == 3
    assert mask_token(msgspec.structs.replace(spec, mask_token_id=5), config) == 5


def test_layers_and_mask_are_found_as_the_engine_finds_them(tmp_path: Path) -> None:
    """A draft that says neither gets both by the rule that it was trained by."""
    config = load_model_config(resolve_model("pycoder"))
    spec = TrainSpec(algorithm="DFLASH", model="pycoder", data=("d",), output="o", steps=1)
    bare = {
        "architectures": ["DFlashDraftModel"],
        "block_size": 8,
        "hidden_size": config.hidden_size,
        "intermediate_size": 64,
        "num_attention_heads": 4,
    }
    for layers in (1, 2, 3, 5):
        said = bare | {"num_hidden_layers": layers}
        (tmp_path / "config.json").write_text(json.dumps(said))
        draft = load_draft_config(tmp_path, config, "DFLASH", resolve_model("pycoder"))
        asked = msgspec.structs.replace(spec, num_hidden_layers=layers)
        assert draft.feature_layers == feature_layers(asked, config)
        assert draft.block is not None
        assert draft.block.mask_token_id == mask_token(asked, config)


def test_another_mask_token_than_the_tokenizers_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    words = {"<m>": 4, "a": 0}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "a"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text('{"mask_token": {"content": "<m>"}}')
    config = load_model_config(tmp_path)
    assert mask_token(spec_of(tmp_path, "DFLASH", mask_token_id=None), config) == 4
    with pytest.raises(RefusedError, match="mask_token_id: is 7, but 4 is the tokenizer's <m>"):
        mask_token(spec_of(tmp_path, "DFLASH"), config)


def test_temperatures_are_tried_on_other_rows(folder: Path, tmp_path: Path) -> None:
    made = make(folder, "DSPARK")
    said: list[str] = []
    ids = np.random.default_rng(0).integers(1, VOCAB, (12, LENGTH)).astype(np.int32)
    source = RowSource(ids, None, 0, CPU)
    table = calibrate(made.recipe, source, 12, 4, said.append)  # type: ignore[arg-type]
    assert table is not None
    assert table.num_samples == 6 * (LENGTH - 3)
    assert f"{2 * table.num_samples} positions, fewer than" in said[0]
    parts = [source.take(first, 4) for first in (0, 4, 8)]
    found = [made.recipe.propose(part) for part in parts]
    logits = torch.cat([one.confidence for one in found if one.confidence is not None])
    accepted = torch.cat([one.agree for one in found]).int().cumprod(-1)
    rest = slice(1, None, 2)
    errors = held_out_errors(
        logits[rest].flatten(0, 1).double().numpy(),
        accepted[rest].flatten(0, 1).double().numpy(),
        table.temperatures,
    )
    assert table.ece_after == pytest.approx(errors)
    few = calibrate(made.recipe, RowSource(ids[:1], None, 0, CPU), 1, 4, said.append)  # type: ignore[arg-type]
    assert few is None
    assert not math.isnan(sum(errors))
