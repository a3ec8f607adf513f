"""Banned tokens: the kernel masks what the reference does, and both what plain Python says."""

import random
from types import ModuleType

import pytest
import torch

from outrider.kernels import token_bans, token_bans_gpu
from outrider.kernels.logit_edits import MASKED

from ..reference.sampling_ref import ends_with
from .step_model import DEVICE, Row, make_inputs, plain_layout, random_rows, random_slots
from .test_logit_edits_gpu import paths

BOTH = pytest.mark.parametrize(
    ("module", "device"), [(token_bans, "cpu"), (token_bans_gpu, DEVICE)], ids=["torch", "gpu"]
)
DEPTH = 8
SLOTS = 8


class Bans:
    """Random requests in S slots, and the tensors of `mask_banned` that stand for them."""

    def __init__(self, rng: random.Random, vocab: int, bans: int, lists: bool) -> None:
        few = min(vocab, 3)
        self.vocab = vocab
        self.outputs = [
            rng.choices(range(few), k=rng.choice((0, 1, DEPTH, 20))) for _ in range(SLOTS)
        ]
        self.bans: list[list[list[int]]] = [
            [rng.choices(range(few), k=rng.randint(1, DEPTH + 1)) for _ in range(count)]
            for count in rng.choices((0, 1, bans), k=SLOTS)
        ]
        self.allowed = [
            set(rng.sample(range(vocab), rng.randint(1, vocab)))
            if lists and rng.random() < 0.6
            else set(range(vocab))
            for _ in range(SLOTS)
        ]
        self.words = -(-vocab // 32) if lists else 0

    def tensors(self, device: str) -> list[torch.Tensor]:
        disallowed = torch.zeros(SLOTS, self.words, dtype=torch.int64)
        most = max(map(len, self.bans))
        bounds = torch.full((SLOTS, most + 1), -9)
        tokens = torch.full((SLOTS, most * (DEPTH + 1)), -9)
        tails = torch.full((SLOTS, DEPTH), -1)
        for slot in range(SLOTS):
            for token in set(range(self.vocab)) - self.allowed[slot]:
                disallowed[slot, token // 32] |= 1 << token % 32
            at = 0
            for number, ban in enumerate(self.bans[slot]):
                bounds[slot, number], at = at, at + len(ban)
                bounds[slot, number + 1] = at
                tokens[slot, at - len(ban) : at] = torch.tensor(ban)
            newest = self.outputs[slot][-DEPTH:]
            tails[slot, DEPTH - len(newest) :] = torch.tensor(newest)
        counts = torch.tensor([len(bans) for bans in self.bans])
        signed = torch.where(disallowed >= 1 << 31, disallowed - (1 << 32), disallowed)
        fields = (signed, counts, bounds, tokens, tails)
        return [field.int().to(device) for field in fields]

    def masked(self, slot: int, path: list[int]) -> list[int]:
        output = self.outputs[slot] + path
        return [
            token
            for token in range(self.vocab)
            if token not in self.allowed[slot]
            or any(ends_with([*output, token], ban) for ban in self.bans[slot])
        ]


def mask(
    module: ModuleType, device: str, rows: list[Row], logits: torch.Tensor, bans: Bans, width: int
) -> torch.Tensor:
    inputs = make_inputs(rows, device, (0, 0))
    slots = random_slots(random.Random(0), SLOTS, 80, 1)
    layout = plain_layout(rows, slots)
    tokens = [
        torch.tensor(layout[name], dtype=torch.int64, device=device)
        for name in ("input_ids", "tree_bits")
    ]
    out = logits.to(device, copy=True)
    module.mask_banned(
        out, inputs.cu_q, inputs.node_cu, inputs.slots, *tokens, *bans.tensors(device),
        width=width,
    )  # fmt: skip
    return out.cpu()


@BOTH
@pytest.mark.parametrize(
    ("seed", "vocab", "bans", "lists"), [(0, 5, 150, False), (1, 1030, 70, True), (2, 33, 40, True)]
)
def test_every_node_masks_what_plain_python_does(
    module: ModuleType, device: str, seed: int, vocab: int, bans: int, lists: bool
) -> None:
    rng = random.Random(seed)
    reached = {"free": 0, "path": 0, "tail": 0, "list": 0}
    for _ in range(3):
        some = Bans(rng, vocab, bans, lists)
        rows = random_rows(rng, rng.sample(range(SLOTS), 6), 3, 10)
        nodes = sum(row.nodes for row in rows)
        logits = torch.randn(nodes, vocab, generator=torch.Generator().manual_seed(seed))
        if nodes:
            logits[0, 0] = float("nan")
        out = mask(module, device, rows, logits, some, 11)
        at = 0
        for row in rows:
            for path in paths(row):
                expected = logits[at].clone()
                masked = some.masked(row.slot, path)
                expected[masked] = torch.where(expected[masked].isnan(), torch.nan, MASKED)
                torch.testing.assert_close(out[at], expected, rtol=0, atol=0, equal_nan=True)
                reached["free"] += not masked
                found = [ban for ban in some.bans[row.slot] if ban[-1] in masked]
                reached["path"] += bool(found) and len(path) >= 3
                reached["tail"] += bool(found) and len(some.outputs[row.slot]) > len(path)
                reached["list"] += len(some.allowed[row.slot]) < vocab
                at += 1
    assert min(reached["free"], reached["path"], reached["tail"]) > 0, reached
    assert (reached["list"] > 0) == lists


@BOTH
@pytest.mark.parametrize("width", [1, 5, 20])
def test_tails_keep_the_newest_tokens(module: ModuleType, device: str, width: int) -> None:
    rng, count = random.Random(width), 6
    tokens = [[rng.randrange(9) for _ in range(width)] for _ in range(count)]
    lens = [rng.choice((0, 1, width)) for _ in range(count)]
    order = rng.sample(range(count), count)
    counts = [rng.choice((0, 3)) for _ in range(count)]
    before = torch.randint(-1, 9, (count, DEPTH), dtype=torch.int32)
    expected = before.clone()
    for row, slot in enumerate(order):
        if counts[slot]:
            added = torch.tensor(tokens[row][: lens[row]], dtype=torch.int32)
            expected[slot] = torch.cat((before[slot], added))[-DEPTH:]
    got = before.to(device)
    rows = [
        torch.tensor(values, dtype=torch.int32, device=device)
        for values in (tokens, lens, order, counts)
    ]
    module.push_emitted(*rows, got)
    assert torch.equal(got.cpu(), expected)
