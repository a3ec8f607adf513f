"""The acceptance walk and the state it leaves: kernels, compiled code and plain Python agree."""

import copy
import random
from types import ModuleType

import pytest
import torch

from outrider.kernels import verify_walk, verify_walk_gpu

from .step_model import (
    DEVICE,
    PREFILL,
    PREFILL_LAST,
    VERIFY,
    Compiled,
    Paths,
    Row,
    Slots,
    make_inputs,
    plain_advance,
    plain_layout,
    plain_paths,
    random_rows,
    random_slots,
)

BOTH = pytest.mark.parametrize(
    ("module", "device"), [(verify_walk, "cpu"), (verify_walk_gpu, DEVICE)], ids=["torch", "gpu"]
)
STATE = ("seq_lens", "last_tokens", "out_counts")


def random_targets(rng: random.Random, rows: list[Row], vocab: int) -> list[list[int]]:
    """Targets that often accept, now and then with an unusable one."""
    bad = rng.choice((0.0, 0.1))
    return [
        [-1 if rng.random() < bad else rng.randrange(vocab) for _ in range(row.nodes)]
        for row in rows
    ]


def accept(
    module: ModuleType,
    device: str,
    rows: list[Row],
    slots: Slots,
    targets: list[list[int]],
    room: tuple[int, int] = (0, 0),
    width: int = 0,
) -> tuple[Paths, dict[str, list[int]]]:
    """Run a kernel on poisoned outputs: the rows' paths and the state afterwards."""
    inputs, state = make_inputs(rows, device, room), slots.tensors(device)
    inputs.width = max(inputs.width, width)
    layout = plain_layout(rows, slots)
    more_rows, more_tokens = room
    # Padding tokens equal to every target, padding targets that are usable: neither may count.
    ids = torch.tensor(layout["input_ids"] + [1] * more_tokens, device=device)
    starts = torch.tensor(
        layout["starts_before"] + [-5] * more_rows, dtype=torch.int32, device=device
    )
    flat = torch.tensor([t for wanted in targets for t in wanted] + [1] * more_tokens)
    out = inputs.accepted()
    module.verify_walk(
        flat.long().to(device),
        ids,
        inputs.host_parents,
        inputs.cu_q,
        inputs.node_cu,
        inputs.slots,
        starts,
        *(state[name] for name in STATE),
        **out,
    )
    paths: Paths = []
    for length, nodes, tokens in zip(
        *(out[name].tolist() for name in ("accept_lens", "accept_idx", "tokens")), strict=True
    ):
        assert set(nodes[length:]) | set(tokens[length:]) <= {-1}
        paths.append((nodes[:length], tokens[:length]))
    assert paths[len(rows) :] == [([], [])] * more_rows
    return paths[: len(rows)], {name: state[name].tolist() for name in STATE}


def check(
    module: ModuleType,
    device: str,
    rows: list[Row],
    slots: Slots,
    targets: list[list[int]],
    room: tuple[int, int] = (0, 0),
    width: int = 0,
) -> Paths:
    """Everybody agrees on one step; ``slots`` moves on."""
    got, state = accept(module, device, rows, slots, targets, room, width)
    compiled = Compiled(slots)
    compiled.lay_out(rows)
    paths, _ = compiled.accept([t for wanted in targets for t in wanted])
    assert paths == plain_paths(rows, targets) == got
    plain_advance(rows, plain_layout(rows, slots)["starts_before"], paths, slots)
    after = {name: getattr(slots, name) for name in STATE}
    assert state == after == {name: compiled.state[name].tolist() for name in STATE}
    return paths


@BOTH
@pytest.mark.parametrize("most", [0, 1, 15, 40])
def test_random_rows(module: ModuleType, device: str, most: int) -> None:
    rng = random.Random(most)
    longest, refused, width = 0, 0, rng.choice((0, most + 1, most + 5))
    for _ in range(12):
        slots = random_slots(rng, 12, 40, 3)
        rows = random_rows(rng, rng.sample(range(12), rng.randint(1, 9)), 2, most)
        targets = random_targets(rng, rows, 2)
        room = rng.choice(((0, 0), (3, 4), (0, 40)))
        paths = check(module, device, rows, slots, targets, room, width)
        longest = max([longest, *(len(path) for path, _ in paths)])
        refused += any(row.nodes and not path for row, (path, _) in zip(rows, paths, strict=True))
    assert refused >= 2
    assert longest > min(most, 4)


@BOTH
def test_corners(module: ModuleType, device: str) -> None:
    """Full chains, an unusable target on and beside the path, equal siblings, late children."""
    chain = list(range(63))
    cases: list[tuple[Row, list[int], tuple[list[int], list[int]]]] = [
        (Row(0, PREFILL, [1, 1, 1], start=4), [], ([], [])),
        (Row(0, PREFILL_LAST, [1, 1], start=4), [6], ([0], [6])),
        (Row(0, PREFILL_LAST, [1, 1], start=4), [-1], ([], [])),
        (Row(0, VERIFY, []), [8], ([0], [8])),
        (Row(0, VERIFY, []), [-1], ([], [])),
        (Row(0, VERIFY, [3, 3], [0, 1]), [3, 3, 9], ([0, 1, 2], [3, 3, 9])),
        (Row(0, VERIFY, [3, 3], [0, 1]), [3, -1, 9], ([], [])),
        (Row(0, VERIFY, [3, 3], [0, 1]), [2, -1, -1], ([0], [2])),
        (Row(0, VERIFY, [5, 5, 6, 7], [0, 0, 2, 1]), [5, 7, 6, 0, 4], ([0, 1, 4], [5, 7, 4])),
        (Row(0, VERIFY, [1] * 63, chain), [1] * 64, (list(range(64)), [1] * 64)),
        (Row(0, VERIFY, [1] * 63, [0] * 62 + [62]), [1] * 64, ([0, 1], [1, 1])),
        (Row(0, VERIFY, [2] * 61 + [1, 1], [0] * 62 + [62]), [1] * 64, ([0, 62, 63], [1] * 3)),
    ]
    rng = random.Random(5)
    for row, targets, expected in cases:
        slots = random_slots(rng, 1, 100, 1)
        assert check(module, device, [row], slots, [targets], (1, 1)) == [expected]
    together = [copy.copy(row) for row, _, _ in cases]
    for slot, row in enumerate(together):
        row.slot = slot
    slots = random_slots(rng, len(cases), 100, 1)
    paths = check(module, device, together, slots, [t for _, t, _ in cases], (2, 3), 64)
    assert paths == [expected for _, _, expected in cases]


@BOTH
def test_padded_drafts_are_never_accepted(module: ModuleType, device: str) -> None:
    """Tokens that equal every target, in rows of padding and behind a chain."""
    slots = random_slots(random.Random(3), 2, 90, 1)
    rows = [Row(0, VERIFY, [0] * 5, [-1] * 5), Row(1, VERIFY, [0] * 5, [0, 1, -1, -1, -1])]
    paths, state = accept(module, device, rows, slots, [[0] * 6, [0] * 6])
    assert paths == [([0], [0]), ([0, 1, 2], [0, 0, 0])]
    assert [state["seq_lens"][s] - slots.seq_lens[s] for s in (0, 1)] == [1, 3]


@BOTH
def test_a_step_of_padding_alone(module: ModuleType, device: str) -> None:
    slots = random_slots(random.Random(0), 2, 80, 1)
    before = {name: list(getattr(slots, name)) for name in STATE}
    assert accept(module, device, [], slots, [], (3, 5)) == ([], before)


@BOTH
def test_state_agrees_after_many_steps(module: ModuleType, device: str) -> None:
    """Chunks until a prompt ends, then drafts, over the state that the steps before left."""
    rng = random.Random(11)
    slots = random_slots(rng, 6, 200, 1)
    slots.seq_lens = [0] * 6
    slots.out_counts = [0] * 6
    left = [rng.randint(1, 30) for _ in range(6)]
    for _ in range(25):
        rows = []
        for slot in rng.sample(range(6), rng.randint(1, 6)):
            if left[slot]:
                count = rng.randint(1, left[slot])
                left[slot] -= count
                kind = PREFILL if left[slot] else PREFILL_LAST
                chunk = [rng.randrange(2) for _ in range(count)]
                rows.append(Row(slot, kind, chunk, start=slots.seq_lens[slot]))
            else:
                rows += [r for r in random_rows(rng, [slot], 2, 7) if r.kind == VERIFY]
        if rows:
            targets = [[rng.randrange(2) for _ in range(row.nodes)] for row in rows]
            check(module, device, rows, slots, targets, rng.choice(((0, 0), (2, 8))), 8)
    assert min(slots.out_counts) > 5


@pytest.mark.gpu
@pytest.mark.parametrize("most", [15, 63])
def test_256_rows(most: int) -> None:
    rng = random.Random(most)
    slots = random_slots(rng, 256, 300, 1)
    for _ in range(10):
        rows = random_rows(rng, rng.sample(range(256), 250), 2, most)
        slots.seq_lens = [min(length, 200) for length in slots.seq_lens]
        check(verify_walk_gpu, DEVICE, rows, slots, random_targets(rng, rows, 2), (6, 90))


@BOTH
def test_rows_emit_no_more_than_they_may(module: ModuleType, device: str) -> None:
    """As without limits, cut; an unusable target beyond the limit does no harm."""
    rng = random.Random(9)
    trimmed_rows, harmless = 0, 0
    for _ in range(40):
        slots = random_slots(rng, 12, 40, 3)
        rows = random_rows(rng, rng.sample(range(12), rng.randint(1, 9)), 2, 15)
        targets = [
            [-1 if rng.random() < 0.15 else rng.randrange(2) for _ in range(row.nodes)]
            for row in rows
        ]
        limits = [rng.randint(1, 3) for _ in rows]
        wanted: list[tuple[list[int], list[int]]] = []
        for row, target, limit in zip(rows, targets, limits, strict=True):
            path = plain_paths([row], [[max(t, -2) for t in target]])[0]
            if not path[0]:
                open_ended = [7 if t < 0 else t for t in target]  # 7: what nobody drafts
                nodes, tokens = plain_paths([row], [open_ended])[0]
                if len(nodes) > limit:
                    path = nodes[:-1], tokens[:-1]
                    harmless += 1
            wanted.append(path)
        inputs, state = make_inputs(rows, device, (0, 0)), slots.tensors(device)
        out = inputs.accepted()
        starts = plain_layout(rows, slots)["starts_before"]
        most = torch.tensor(limits, dtype=torch.int32, device=device)
        trimmed = torch.full_like(most, -9)
        module.verify_walk(
            torch.tensor([t for target in targets for t in target]).long().to(device),
            torch.tensor(plain_layout(rows, slots)["input_ids"], device=device),
            inputs.host_parents,
            inputs.cu_q,
            inputs.node_cu,
            inputs.slots,
            torch.tensor(starts, dtype=torch.int32, device=device),
            *(state[name] for name in STATE),
            **out,
            most=most,
            trimmed=trimmed,
        )
        paths = [(nodes[:limit], tokens[:limit]) for (nodes, tokens), limit
                 in zip(wanted, limits, strict=True)]  # fmt: skip
        lens = out["accept_lens"].tolist()
        assert lens == [len(nodes) for nodes, _ in paths]
        for at, (nodes, tokens) in enumerate(paths):
            assert out["accept_idx"][at].tolist()[: len(nodes)] == nodes
            assert out["tokens"][at].tolist()[: len(tokens)] == tokens
            assert set(out["tokens"][at].tolist()[len(tokens) :]) <= {-1}
        over = [len(nodes) - len(kept) for (nodes, _), (kept, _) in zip(wanted, paths, strict=True)]
        assert trimmed.tolist() == over
        plain_advance(rows, starts, paths, slots)
        assert {name: state[name].tolist() for name in STATE} == {
            name: getattr(slots, name) for name in STATE
        }
        trimmed_rows += sum(count > 0 for count in over)
    assert trimmed_rows > 10
    assert harmless > 2
