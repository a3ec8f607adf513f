"""Edited logits: the kernel gives the reference's bits, and both what plain Python says."""

import random
from types import ModuleType

import pytest
import torch

from outrider.kernels import logit_edits, logit_edits_gpu

from ..reference.sampling_ref import Params, process
from .step_model import (
    DEVICE,
    Row,
    Slots,
    make_inputs,
    plain_layout,
    random_drafts,
    random_rows,
    random_slots,
)

BOTH = pytest.mark.parametrize(
    ("module", "device"), [(logit_edits, "cpu"), (logit_edits_gpu, DEVICE)], ids=["torch", "gpu"]
)
ROOM = 150  # of a slot's list


def random_params(rng: random.Random, vocab: int) -> Params:
    """A mix in which every edit is on about half of the time, and now and then none is."""
    plain = rng.random() < 0.25
    some = 0 if plain else rng.choice((0, 0, 2, min(vocab // 2, 140)))
    return Params(
        repetition=1.0 if plain else rng.choice((1.0, 1.4, 0.75)),
        presence=0.0 if plain else rng.choice((0.0, 0.9, -0.5)),
        frequency=0.0 if plain else rng.choice((0.0, 0.6, -0.3)),
        bias={token: rng.uniform(-9, 9) for token in rng.sample(range(vocab), some)},
        min_new_tokens=0 if plain else rng.choice((0, 3, 60)),
        eos_ids=tuple(rng.sample(range(vocab), rng.choice((1, min(3, vocab))))),
    )


def penalized(params: Params) -> bool:
    return (params.repetition, params.presence, params.frequency) != (1.0, 0.0, 0.0)


class Edits:
    """Random requests in S slots, and the tensors of `edit_logits` that stand for them."""

    def __init__(self, rng: random.Random, slots: Slots, vocab: int) -> None:
        count = len(slots.seq_lens)
        self.vocab = vocab
        self.params = [random_params(rng, vocab) for _ in range(count)]
        self.prompts = [rng.choices(range(vocab), k=rng.randint(1, 9)) for _ in range(count)]
        self.outputs = [rng.choices(range(vocab), k=n) for n in slots.out_counts]

    def history(self, slot: int) -> list[int]:
        row = [2 * self.outputs[slot].count(token) for token in range(self.vocab)]
        for token in self.prompts[slot]:
            row[token] |= 1
        return row

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        count = len(self.params)
        bounds, ids, values = [], torch.full((count, ROOM), -(2**30)), torch.full((count, ROOM), 99)
        listed = values.float()
        for slot, params in enumerate(self.params):
            ends = list(dict.fromkeys(params.eos_ids)) if params.min_new_tokens else []
            both = [token for token in ends if token in params.bias]
            biased = [token for token in params.bias if token not in both] + both
            entries = biased + [token for token in ends if token not in both]
            ids[slot, : len(entries)] = torch.tensor(entries, dtype=torch.int64)
            listed[slot, : len(biased)] = torch.tensor([params.bias[t] for t in biased])
            bounds.append([len(entries) - len(ends), len(biased), len(entries)])
        poison = [[-77] * self.vocab, [float("nan")] * 4]
        penalties = [
            [1 / float(torch.tensor(p.repetition)), p.repetition, p.frequency, p.presence]
            if penalized(p)
            else poison[1]
            for p in self.params
        ]
        history = [
            self.history(slot) if penalized(p) else poison[0] for slot, p in enumerate(self.params)
        ]
        return {
            "penalized": torch.tensor([penalized(p) for p in self.params], device=device),
            "penalties": torch.tensor(penalties, dtype=torch.float32, device=device),
            "history": torch.tensor(history, dtype=torch.int32, device=device),
            "min_new_tokens": torch.tensor(
                [p.min_new_tokens for p in self.params], dtype=torch.int32, device=device
            ),
            "list_bounds": torch.tensor(bounds, dtype=torch.int32, device=device),
            "list_ids": ids.int().to(device),
            "list_values": listed.to(device),
        }

    def expected(self, slot: int, logits: torch.Tensor, path: list[int]) -> torch.Tensor:
        params, output = self.params[slot], self.outputs[slot] + path
        values = torch.tensor(process(logits.tolist(), params, self.prompts[slot], output))
        return values.clamp(min=logit_edits.MASKED)  # the oracle masks with -inf


def edit(
    module: ModuleType,
    device: str,
    rows: list[Row],
    slots: Slots,
    logits: torch.Tensor,
    edits: Edits,
    room: tuple[int, int] = (0, 0),
    width: int | None = None,
) -> torch.Tensor:
    inputs, layout = make_inputs(rows, device, room), plain_layout(rows, slots)

    def int64(name: str) -> torch.Tensor:
        return torch.tensor(layout[name] + [-7] * room[1], dtype=torch.int64, device=device)

    rows_of = [inputs.cu_q, inputs.node_cu, inputs.slots]
    tokens = [int64(name) for name in ("input_ids", "positions", "tree_bits")]
    counts = slots.tensors(device)["out_counts"]
    given = logits.to(device)
    out: torch.Tensor = module.edit_logits(
        given, *rows_of, *tokens, counts, **edits.tensors(device), width=width
    )
    torch.testing.assert_close(given.cpu(), logits, rtol=0, atol=0, equal_nan=True)
    return out.cpu()


def paths(row: Row) -> list[list[int]]:
    """The drafts on the way to each node, its own included."""
    if row.nodes != row.length:
        return [[]] * row.nodes
    found: list[list[int]] = [[]]
    for node, parent in enumerate(row.parent_list()[1:], 1):
        found.append([*found[parent], row.tokens[node - 1]])
    return found


@BOTH
@pytest.mark.parametrize(("seed", "vocab"), [(0, 5), (1, 1024), (2, 1025), (3, 40), (4, 1023)])
def test_every_node_agrees_with_plain_python(
    module: ModuleType, device: str, seed: int, vocab: int
) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    reached = {"plain": 0, "penalized": 0, "path": 0, "bias": 0, "masked": 0, "open": 0}
    for dtype in (torch.float32, torch.bfloat16):
        slots = random_slots(rng, 8, 80, 1)
        edits = Edits(rng, slots, vocab)
        rows = random_rows(rng, rng.sample(range(8), 6), min(vocab, 9), 12)
        room = rng.choice(((0, 0), (2, 3)))
        nodes = sum(row.nodes for row in rows)
        logits = torch.randn(nodes + room[1], vocab, generator=generator).mul(3).to(dtype)
        out = edit(module, device, rows, slots, logits, edits, room, rng.choice((None, 13)))
        assert out.dtype == torch.float32
        assert not out[nodes:].any()
        assert torch.equal(edit(logit_edits, "cpu", rows, slots, logits, edits, room), out)
        at = 0
        for row in rows:
            params = edits.params[row.slot]
            active = penalized(params) or params.bias or params.min_new_tokens
            for path in paths(row):
                raw = logits[at].float()
                if active:
                    expected = edits.expected(row.slot, raw, path)
                    torch.testing.assert_close(out[at], expected, atol=1e-5, rtol=1e-5)
                    short = slots.out_counts[row.slot] + len(path) < params.min_new_tokens
                    reached["masked"] += short
                    reached["open"] += not short and params.min_new_tokens > 0
                    reached["bias"] += bool(params.bias)
                    reached["penalized"] += penalized(params)
                    reached["path"] += penalized(params) and len(path) > 1
                else:
                    assert torch.equal(out[at], raw)
                    reached["plain"] += 1
                at += 1
    assert reached["penalized"]
    assert reached["path"]
    if seed == 3:
        assert all(reached.values()), reached


@BOTH
def test_what_is_not_finite_stays_unusable(module: ModuleType, device: str) -> None:
    """Under a mask, a bias and a penalty, but only in rows that have edits."""
    slots = random_slots(random.Random(1), 3, 80, 1)
    slots.out_counts = [0, 0, 0]
    edits = Edits(random.Random(1), slots, 6)
    edits.params = [
        Params(bias={1: 2.0}, min_new_tokens=4, eos_ids=(2, 1, 2)),
        Params(repetition=1.5),
        Params(),
    ]
    rows = [Row(slot, 2, []) for slot in (2, 0, 1)]
    for bad in (float("nan"), float("inf"), -float("inf")):
        for token in range(6):
            logits = torch.zeros(3, 6)
            logits[:, token] = bad
            out = edit(module, device, rows, slots, logits, edits)
            torch.testing.assert_close(out[0], logits[0], rtol=0, atol=0, equal_nan=True)
            assert out[1:, token].isnan().all()
            assert out.isfinite().sum() == 15


@BOTH
def test_a_long_chain_counts_every_draft(module: ModuleType, device: str) -> None:
    slots = random_slots(random.Random(3), 1, 80, 1)
    edits = Edits(random.Random(3), slots, 4)
    edits.params = [Params(frequency=0.25)]
    row = random_drafts(random.Random(3), 0, 63, 4, True)
    logits = torch.zeros(64, 4)
    out = edit(module, device, [row], slots, logits, edits)
    for node in range(64):
        history = edits.outputs[0] + row.tokens[:node]
        assert out[node].tolist() == [-0.25 * history.count(token) for token in range(4)]


@BOTH
def test_a_step_of_padding_alone(module: ModuleType, device: str) -> None:
    slots = random_slots(random.Random(0), 2, 80, 1)
    edits = Edits(random.Random(0), slots, 9)
    out = edit(module, device, [], slots, torch.ones(5, 9), edits, (3, 5))
    assert torch.equal(out, torch.zeros(5, 9))


@BOTH
@pytest.mark.parametrize("width", [1, 5, 64])
def test_emitted_tokens_are_counted_where_a_slot_is_penalized(
    module: ModuleType, device: str, width: int
) -> None:
    rng, vocab, count = random.Random(width), 7, 6
    tokens = [[rng.randrange(vocab) for _ in range(width)] for _ in range(count)]
    lens = [rng.choice((0, 1, width, rng.randint(0, width))) for _ in range(count)]
    order = rng.sample(range(count), count)
    chosen = [rng.random() < 0.6 for _ in range(count)]
    history = torch.randint(0, 9, (count, vocab), dtype=torch.int32)
    expected = history.clone()
    for row, slot in enumerate(order):
        for token in tokens[row][: lens[row]] if chosen[slot] else ():
            expected[slot, token] += 2
    emitted = torch.tensor(tokens, dtype=torch.int32)
    for row, length in enumerate(lens):
        emitted[row, length:] = -1
    got = history.to(device)
    module.count_emitted(
        emitted.to(device),
        torch.tensor(lens, dtype=torch.int32, device=device),
        torch.tensor(order, dtype=torch.int32, device=device),
        torch.tensor(chosen, device=device),
        got,
    )
    assert torch.equal(got.cpu(), expected)


@pytest.mark.gpu
def test_a_large_vocabulary_gives_the_reference_bits() -> None:
    rng = random.Random(8)
    slots = random_slots(rng, 64, 80, 1)
    slots.out_counts = [20] * 64
    edits = Edits(rng, slots, 30_000)
    rows = random_rows(rng, list(range(64)), 30_000, 15)
    nodes = sum(row.nodes for row in rows)
    logits = torch.randn(nodes, 30_000).mul(5).bfloat16()
    left = edit(logit_edits, "cpu", rows, slots, logits, edits)
    assert torch.equal(edit(logit_edits_gpu, DEVICE, rows, slots, logits, edits, width=16), left)
