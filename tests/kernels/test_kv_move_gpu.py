"""Accepted nodes end side by side, whatever the path: kernels, compiled code, plain Python."""

import random
from types import ModuleType

import pytest
import torch

from outrider.kernels import (
    kv_move,
    kv_move_gpu,
    page_updates,
    page_updates_gpu,
    step_layout,
    step_layout_gpu,
    verify_walk,
    verify_walk_gpu,
)

from .step_model import (
    DEVICE,
    PREFILL_LAST,
    VERIFY,
    Compiled,
    Row,
    Slots,
    make_inputs,
    plain_advance,
    plain_paths,
    random_rows,
    random_slots,
)

BOTH = pytest.mark.parametrize(
    ("module", "device"), [(kv_move, "cpu"), (kv_move_gpu, DEVICE)], ids=["torch", "gpu"]
)
Shape = tuple[int, int, int]  # layers, kv heads, head_dim


def random_kv(slots: Slots, shape: Shape, dtype: torch.dtype, seed: int) -> torch.Tensor:
    layers, heads, dim = shape
    places = (1 + sum(len(pages) for pages in slots.page_table)) * slots.page_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(layers, 2, places, heads, dim, generator=generator).to(dtype)


def check(
    module: ModuleType,
    device: str,
    slots: Slots,
    paths: list[tuple[int, list[int]]],
    kv: torch.Tensor,
    padding: int = 0,
    width: int = 1,
) -> None:
    """Move (slot, path) rows; all sources are those of before the step."""
    expected = kv.clone()
    for slot, path in paths:
        for i, node in enumerate(path):
            start = slots.seq_lens[slot]
            source, target = slots.kv_slot(slot, start + node), slots.kv_slot(slot, start + i)
            expected[:, :, target] = kv[:, :, source]
    width = max([width, *(len(path) for _, path in paths)])
    lists = [path + [-9] * (width - len(path)) for _, path in paths] + [[-9] * width] * padding
    state = slots.tensors(device)

    def int32(values: list[int], fill: int) -> torch.Tensor:
        return torch.tensor(values + [fill] * padding, dtype=torch.int32, device=device)

    moved = kv.to(device)
    module.move_accepted(
        moved,
        int32([slot for slot, _ in paths], 0),
        int32([slots.seq_lens[slot] for slot, _ in paths], -5),
        state["page_table"],
        slots.page_size,
        int32([len(path) for _, path in paths], 0),
        torch.tensor(lists, dtype=torch.int32, device=device).reshape(-1, width),
    )
    assert torch.equal(moved.cpu(), expected)


def random_path(rng: random.Random, nodes: int, length: int) -> list[int]:
    return [0, *sorted(rng.sample(range(1, nodes), length - 1))] if length else []


@BOTH
@pytest.mark.parametrize(
    ("page_size", "shape"), [(1, (2, 1, 8)), (3, (1, 3, 20)), (16, (3, 2, 16))]
)
def test_random_paths(module: ModuleType, device: str, page_size: int, shape: Shape) -> None:
    rng = random.Random(page_size)
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16))
    for trial in range(3):
        slots = random_slots(rng, 7, -(-90 // page_size), page_size)
        paths = [
            (slot, random_path(rng, nodes := rng.choice((1, 2, 9, 16)), rng.randint(0, nodes)))
            for slot in rng.sample(range(7), 5)
        ]
        kv = random_kv(slots, shape, dtype, trial)
        check(module, device, slots, paths, kv, rng.choice((0, 3)), rng.choice((1, 17)))


@BOTH
@pytest.mark.parametrize("length", [1, 2, 4, 5, 6, 9, 33])
def test_every_batch_of_moves(module: ModuleType, device: str, length: int) -> None:
    """Nodes one place too far read what the next move overwrites; so do gaps within a batch."""
    slots = random_slots(random.Random(length), 3, 90, 1)
    kv = random_kv(slots, (1, 1, 4), torch.float32, length)
    shifted = [0, *range(2, length + 1)]
    late = [*range(length - 1), length + 1] if length > 1 else [0]
    spread = [min(2 * i, i + 3) for i in range(length)]
    check(module, device, slots, [(0, shifted), (1, late), (2, spread)], kv)


@BOTH
def test_nothing_to_move(module: ModuleType, device: str) -> None:
    slots = random_slots(random.Random(1), 3, 90, 1)
    kv = random_kv(slots, (2, 1, 4), torch.float32, 1)
    check(module, device, slots, [(0, [0, 1, 2]), (2, []), (1, [0])], kv, padding=2)
    check(module, device, slots, [(0, [0]), (2, []), (1, [0])], kv, padding=2)
    check(module, device, slots, [], kv, padding=3, width=4)
    check(module, device, slots, [], kv)


class Steps:
    """Runs whole steps with either kind of kernel; a token's value doubles as its KV."""

    def __init__(self, gpu: bool, slots: Slots) -> None:
        self.layout, self.walk = (
            (step_layout_gpu, verify_walk_gpu) if gpu else (step_layout, verify_walk)
        )
        self.move, self.updates = (
            (kv_move_gpu, page_updates_gpu) if gpu else (kv_move, page_updates)
        )
        self.device = DEVICE if gpu else "cpu"
        self.page_size = slots.page_size
        self.state = slots.tensors(self.device)
        self.state["page_table"].zero_()
        self.kv = random_kv(slots, (1, 1, 2), torch.float32, 0).to(self.device)

    def map_pages(self, changes: list[tuple[int, int, int]]) -> None:
        room = [*changes, *[(10**6,) * 3] * (90 - len(changes))]
        listed = torch.tensor(room, dtype=torch.int32, device=self.device).T.contiguous()
        count = torch.tensor([len(changes)], dtype=torch.int32, device=self.device)
        self.updates.apply_page_updates(self.state["page_table"], *listed, count)

    def run(self, rows: list[Row], targets: list[int]) -> dict[str, torch.Tensor]:
        state = self.state
        inputs = make_inputs(rows, self.device, (2, 5))
        inputs.width = 10
        out, accepted = inputs.outputs(), inputs.accepted()
        self.layout.lay_out(
            inputs.slots,
            inputs.kinds,
            inputs.starts,
            inputs.cu_q,
            inputs.host_tokens,
            inputs.host_parents,
            state["seq_lens"],
            state["last_tokens"],
            state["page_table"],
            self.page_size,
            **out,
        )
        self.kv[:, :, out["kv_slots"]] = out["input_ids"].float()[:, None, None]
        self.walk.verify_walk(
            torch.tensor(targets, device=self.device),
            out["input_ids"],
            inputs.host_parents,
            inputs.cu_q,
            inputs.node_cu,
            inputs.slots,
            out["starts_before"],
            state["seq_lens"],
            state["last_tokens"],
            state["out_counts"],
            **accepted,
        )
        self.move.move_accepted(
            self.kv,
            inputs.slots,
            out["starts_before"],
            state["page_table"],
            self.page_size,
            accepted["accept_lens"],
            accepted["accept_idx"],
        )
        return out


def wide_drafts(rng: random.Random, slot: int) -> Row:
    parents = [rng.randint(0, min(i, 2)) for i in range(rng.randint(0, 9))]
    return Row(slot, VERIFY, [rng.randrange(2) for _ in parents], parents)


def accepting_targets(rng: random.Random, row: Row) -> list[int]:
    """Targets that mostly follow a node's last child."""
    children = [[i for i, p in enumerate(row.parents) if p == node] for node in range(row.nodes)]
    return [
        row.tokens[own[-1]] if own and rng.random() < 0.8 else rng.randrange(2) for own in children
    ]


@pytest.mark.parametrize("kernels", ["torch", "gpu"])
def test_whole_steps_keep_each_request_s_tokens(kernels: str) -> None:
    """Page updates, layout, KV write, walk and move, step after step: KV holds the history."""
    page_size = 4
    rng = random.Random(page_size)
    slots = random_slots(rng, 4, 160 // page_size, page_size)
    slots.seq_lens, slots.out_counts = [0] * 4, [0] * 4
    steps, compiled = Steps(kernels == "gpu", slots), Compiled(slots)
    mapped = [0] * 4
    history: list[list[int]] = [[] for _ in range(4)]
    moved = 0
    for step in range(9):
        rows = [
            wide_drafts(rng, slot)
            if step
            else Row(slot, PREFILL_LAST, [rng.randrange(2) for _ in range(slot + 1)], start=0)
            for slot in rng.sample(range(4), 3 if step else 4)
        ]
        changes = []
        for row in rows:
            end = slots.seq_lens[row.slot] + row.length
            while mapped[row.slot] * page_size < end:
                column = mapped[row.slot]
                changes.append((row.slot, column, slots.page_table[row.slot][column]))
                mapped[row.slot] += 1
        targets = [accepting_targets(rng, row) for row in rows]
        flat = [t for wanted in targets for t in wanted]
        steps.map_pages(changes)
        out = steps.run(rows, flat)
        expected = compiled.lay_out(rows)
        for name, values in expected.items():
            assert out[name][: len(values)].tolist() == values
        paths, moves = compiled.accept(flat)
        assert paths == plain_paths(rows, targets)
        moved += len(moves)
        for row, (_, emitted) in zip(rows, paths, strict=True):
            history[row.slot] += emitted if row.kind == VERIFY else row.tokens + emitted
        plain_advance(rows, expected["starts_before"], paths, slots)
        for name in ("seq_lens", "last_tokens", "out_counts"):
            assert steps.state[name].tolist() == getattr(slots, name)
            assert compiled.state[name].tolist() == getattr(slots, name)
        for slot, tokens in enumerate(history):
            # The newest token is the next step's first: its KV is still to come.
            assert slots.seq_lens[slot] == len(tokens) - 1
            places = [slots.kv_slot(slot, i) for i in range(len(tokens) - 1)]
            wanted = torch.tensor(tokens[:-1], dtype=torch.float32, device=steps.device)
            assert (steps.kv[:, :, places] == wanted[:, None, None]).all()
    assert moved > 10


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_256_rows_of_a_real_shape(dtype: torch.dtype) -> None:
    rng = random.Random(9)
    slots = random_slots(rng, 256, 9, 16)
    kv = random_kv(slots, (2, 8, 128), dtype, 0)
    paths = [(s, random_path(rng, 64, rng.randint(0, 64))) for s in rng.sample(range(256), 250)]
    check(kv_move_gpu, DEVICE, slots, paths, kv, padding=6)


@pytest.mark.gpu
def test_a_captured_step_replays_over_changing_plans() -> None:
    """One CUDA graph of layout, walk and move; only its input buffers change between replays."""
    rng = random.Random(3)
    slots = random_slots(rng, 16, 40, 8)
    kv = random_kv(slots, (2, 2, 64), torch.bfloat16, 0).to(DEVICE)
    state, width, tokens = slots.tensors(DEVICE), 16, 16 * 70
    compiled = Compiled(slots)
    plan = make_inputs([], DEVICE, (16, tokens))
    plan.width = width
    out, accepted = plan.outputs(), plan.accepted()
    targets = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)

    def run() -> None:
        step_layout_gpu.lay_out(
            plan.slots,
            plan.kinds,
            plan.starts,
            plan.cu_q,
            plan.host_tokens,
            plan.host_parents,
            state["seq_lens"],
            state["last_tokens"],
            state["page_table"],
            8,
            **out,
            longest=None,
        )
        verify_walk_gpu.verify_walk(
            targets,
            out["input_ids"],
            plan.host_parents,
            plan.cu_q,
            plan.node_cu,
            plan.slots,
            out["starts_before"],
            state["seq_lens"],
            state["last_tokens"],
            state["out_counts"],
            **accepted,
        )
        move_arguments = (kv, plan.slots, out["starts_before"], state["page_table"], 8)
        kv_move_gpu.move_accepted(*move_arguments, accepted["accept_lens"], accepted["accept_idx"])

    run()  # Compiles; padding alone changes nothing.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(12):
        slots.seq_lens = [min(length, 200) for length in slots.seq_lens]
        state["seq_lens"].copy_(torch.tensor(slots.seq_lens))
        compiled.state["seq_lens"][:] = slots.seq_lens
        rows = random_rows(rng, rng.sample(range(16), rng.randint(1, 16)), 2, width - 1)
        used = sum(row.length for row in rows)
        fresh = make_inputs(rows, "cpu", (16 - len(rows), tokens - used))
        for name in vars(plan):
            if name != "width":
                getattr(plan, name).copy_(getattr(fresh, name))
        chosen = [[rng.randrange(2) for _ in range(row.nodes)] for row in rows]
        flat = [t for wanted in chosen for t in wanted]
        targets[: len(flat)] = torch.tensor(flat, device=DEVICE)
        before = kv.clone()
        graph.replay()
        expected = compiled.lay_out(rows)
        for name, values in expected.items():
            assert out[name][: len(values)].tolist() == values
        _, moves = compiled.accept(flat)
        for source, target in moves:
            before[:, :, target] = before[:, :, source]
        assert torch.equal(kv, before)
        for name in ("seq_lens", "last_tokens", "out_counts"):
            setattr(slots, name, compiled.state[name].tolist())
            assert state[name].tolist() == getattr(slots, name)
