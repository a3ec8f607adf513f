"""A native draft's answers have the same bits however its tokens arrive."""

import random
from collections.abc import Sequence as Items
from pathlib import Path

import pytest
import torch

from outrider.engine.kv_pool import KVPool
from outrider.engine.models.cpu_draft import NativeDraft
from outrider.engine.models.draft_loader import load_draft, read_weights
from outrider.engine.models.draft_net import ChainRows, ChainState
from outrider.engine.models.loader import load_model
from outrider.engine_core.draft_config_json import load_draft_config
from outrider.engine_core.model_config import load_model_config
from outrider.kernels.native_cpu import instruction_sets

from .draft_checkpoints import DRAFTS
from .steps import Pages, Query, Sequence, make_batch
from .tiny import write_checkpoint

CPU = torch.device("cpu")
LENGTH = 60
VOCAB = 50
KINDS = ("eagle-deep", "eagle3.1", "eagle3-speculators")


@pytest.fixture(scope="module", params=KINDS)
def net(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeDraft:
    kind = DRAFTS[request.param]
    folder = write_checkpoint(tmp_path_factory.mktemp("target"), VOCAB, layers=3)
    config = load_model_config(folder)
    target = load_model(folder, config, torch.float32, CPU)
    draft = kind.write(tmp_path_factory.mktemp("draft"), folder)
    loaded = load_draft(
        draft, load_draft_config(draft, config, kind.algorithm), target, torch.float32, CPU
    )
    assert isinstance(loaded, NativeDraft)
    return loaded


class Text:
    """Tokens and the target's features of one sequence, which a pass may take in any pieces."""

    def __init__(self, net: NativeDraft, seed: int) -> None:
        self.net = net
        self.tokens = random.Random(seed).choices(range(VOCAB), k=LENGTH)
        generator = torch.Generator().manual_seed(seed)
        self.features = torch.randn(LENGTH, net.config.feature_size, generator=generator)
        self.sequence = Sequence()

    def part(self, size: int, as_tree: bool) -> tuple[Query, torch.Tensor]:
        begin = self.sequence.length
        parents = list(range(-1, size - 1)) if as_tree else None
        query = Query(self.sequence, self.tokens[begin : begin + size], parents)
        return query, self.features[begin : begin + size]


def answers(net: NativeDraft, pieces: Items[Items[tuple[int, bool]]]) -> list[torch.Tensor]:
    """Recurrent states and logits of two texts that arrive in these pieces, (size, as tree)."""
    kv = KVPool(60, 4, net.config.model, torch.float32, CPU)
    pages = Pages(60, 4, 1)
    texts = [Text(net, seed) for seed in range(len(pieces))]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    for round_number in range(max(len(parts) for parts in pieces)):
        here = [i for i, parts in enumerate(pieces) if round_number < len(parts)]
        given = [texts[i].part(*pieces[i][round_number]) for i in here]
        features = torch.cat([part[1] for part in given])
        batch = make_batch([part[0] for part in given], pages)
        out = net.forward(batch, net.fuse(features), kv)
        both = torch.cat((out.recurrent, net.logits(out.head_input)), dim=1)
        for i, rows in zip(here, torch.split(both, [len(part[1]) for part in given]), strict=True):
            found[i].append(rows)
            texts[i].sequence.length += len(rows)
    return [torch.cat(rows) for rows in found]


def test_bits_do_not_depend_on_the_pieces(net: NativeDraft) -> None:
    alone = [(1, False)] * LENGTH
    wanted = answers(net, [alone])[0]
    together = answers(
        net,
        [
            [(24, False), (6, True), (1, True), (29, False)],
            [(13, False), (40, True), (7, False)],
            alone,
        ],
    )
    assert torch.equal(together[0], wanted)
    rng = random.Random(5)
    for _ in range(6):
        pieces: list[tuple[int, bool]] = []
        while (left := LENGTH - sum(size for size, _ in pieces)) > 0:
            pieces.append((min(left, rng.choice((1, 2, 5, 17))), rng.random() < 0.5))
        assert torch.equal(answers(net, [pieces, alone[:30]])[0], wanted)


def test_tokens_that_are_not_asked_for_change_no_bits(net: NativeDraft) -> None:
    texts = [Text(net, seed) for seed in range(3)]
    asked = [24, 29, 38]
    parts = [text.part(size, False) for text, size in zip(texts, (30, 9, 4), strict=True)]
    features = net.fuse(torch.cat([part[1] for part in parts])).clone()
    found = []
    for wanted in (list(range(43)), asked):
        kv = KVPool(60, 4, net.config.model, torch.float32, CPU)
        kv.data.zero_()
        batch = make_batch([part[0] for part in parts], Pages(60, 4, 1))
        batch.logits_index = torch.tensor(wanted)
        out = net.forward(batch, features, kv)
        rows = torch.tensor(asked)
        found.append((out.recurrent[rows], out.head_input[rows], kv.data))
    for whole, part in zip(*found, strict=True):
        assert torch.equal(whole, part)


def test_a_chain_is_its_passes(net: NativeDraft) -> None:
    length, passes, rows = 21, 4, 3
    kv = [KVPool(60, 4, net.config.model, torch.float32, CPU) for _ in range(2)]
    texts, pages = [Text(net, seed) for seed in range(rows)], Pages(60, 4, 1)
    parts = [text.part(length, False) for text in texts]
    batch = make_batch([part[0] for part in parts], pages)
    features = net.fuse(torch.cat([part[1] for part in parts]))
    for pool in kv:
        pool.data.zero_()
        out = net.forward(batch, features, pool)
    newest = batch.cu_q[1:].long() - 1
    hidden, ids = out.recurrent[newest].clone(), torch.tensor([7, 3, 11])
    # Pages of what comes: every row has some in its table, in the order of its slots.
    table = torch.zeros(rows + 1, 8, dtype=torch.int32)
    for row, text in enumerate(texts):
        query = Query(text.sequence, [0] * passes)
        text.sequence.length = length
        step = make_batch([query], pages)
        table[row + 1, : step.page_table.shape[1]] = step.page_table[0]
    slots = torch.tensor([3, 1, 2], dtype=torch.int32)
    lengths = torch.full((rows + 1,), length, dtype=torch.int32)
    order = slots.long() - 1
    caps, of_row = torch.full((rows,), passes + 1, dtype=torch.int32), passes + 2
    cu = torch.arange(0, rows * of_row + 1, of_row, dtype=torch.int32)
    nodes, (proposed, depths) = caps.new_zeros(2, rows * of_row), caps.new_zeros(2, rows)
    of = ChainRows(slots, caps, lengths, table, cu, nodes[0], nodes[1], proposed, depths)
    first = torch.zeros(rows + 1, 1, dtype=torch.int64)
    state = ChainState(first, torch.cat((hidden[:1], hidden)))
    state.first[slots.long(), 0] = ids
    net.draft(of, state, kv[0], passes + 1)
    assert proposed.tolist() == depths.tolist() == [passes + 1] * rows
    grid = nodes[0].view(rows, of_row)
    assert torch.equal(grid[:, 1], ids.int())
    drafts = grid[:, 2:].T.long()
    for i, wanted in enumerate(drafts):
        for text in texts:
            text.sequence.length = length + i
        step = make_batch([Query(texts[row].sequence, [0]) for row in order], pages)
        step.input_ids = ids
        out = net.forward(step, hidden[order] if i == 0 else out.recurrent, kv[1])
        ids = net.logits(out.head_input).argmax(1)
        ids = ids if net.token_ids is None else net.token_ids[ids]
        assert torch.equal(ids, wanted), i
    assert torch.equal(kv[0].data, kv[1].data)


def test_all_instruction_sets_agree(tmp_path: Path) -> None:
    kind = DRAFTS["eagle3.1"]
    folder = write_checkpoint(tmp_path / "target", VOCAB, layers=3)
    target_config = load_model_config(folder)
    target = load_model(folder, target_config, torch.float32, CPU)
    draft = kind.write(tmp_path / "draft", folder)
    config = load_draft_config(draft, target_config, kind.algorithm)
    whole = [[(LENGTH, False)]]
    nets = [
        NativeDraft(read_weights(draft, config), config, target, isa) for isa in instruction_sets()
    ]
    ours, *others = (answers(net, whole)[0] for net in nets)
    for theirs in others:
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
