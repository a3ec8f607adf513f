"""The index work of drafting in Triton against its torch references, bit for bit."""

from collections.abc import Iterator

import pytest
import torch

from outrider.kernels import draft_extend, draft_layout, draft_nodes, draft_state, draft_tree
from outrider.kernels import draft_extend_gpu as extend_gpu
from outrider.kernels import draft_layout_gpu as layout_gpu
from outrider.kernels import draft_nodes_gpu as nodes_gpu
from outrider.kernels import draft_state_gpu as state_gpu
from outrider.kernels import draft_tree_gpu as tree_gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, PAGES, PAGE = 9, 4, 4
POISON = -77
Outputs = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _poison_new_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def ints(
    *shape: int, low: int = 0, high: int, seed: int, kind: torch.dtype = torch.int32
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(DEVICE, kind)


def poisoned(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=dtype, device=DEVICE)


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


def permuted(rows: int, seed: int) -> torch.Tensor:
    """Different slots."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(SLOTS, generator=generator)[:rows].to(DEVICE, torch.int32)


def same(one: Outputs, two: Outputs) -> None:
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


# A row's kind, length and accepted tokens.
Row = tuple[int, int, int]
EXTENDS: list[list[Row]] = [
    [(2, 1, 1)],
    [(0, 255, 0)],
    [(1, 256, 1)],
    [(0, 257, 0), (2, 4, 2)],
    [(2, 4, 1), (2, 4, 4), (0, 5, 0), (1, 3, 1), (2, 1, 1), (1, 1, 0)],
    [(2, 3, 0), (2, 0, 0), (0, 1, 0), (2, 4, 3)],
]


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("texts", [True, False])
@pytest.mark.parametrize("rows", EXTENDS)
def test_extend_inputs(rows: list[Row], texts: bool, padding: int) -> None:
    lengths, width = [length for _, length, _ in rows], 4
    total = sum(lengths) + padding
    accepted = torch.tensor([accept for _, _, accept in rows], dtype=torch.int32, device=DEVICE)
    column = torch.arange(width, device=DEVICE)
    beyond = column >= accepted[:, None]
    tokens = ints(len(rows), width, low=1000, high=2000, seed=1).masked_fill(beyond, -1)
    path = column.int().repeat(len(rows), 1).masked_fill(beyond, -1)
    path[:, 1:2] += (path[:, 1:2] > 0) & (torch.tensor(lengths, device=DEVICE)[:, None] > 2)
    kinds = torch.tensor([kind for kind, _, _ in rows], dtype=torch.uint8, device=DEVICE)
    outs = []
    for function in (draft_extend.extend_inputs, extend_gpu.extend_inputs):
        out = {name: poisoned(torch.int64, total) for name in ("next_ids", "sources", "positions")}
        out["select"] = poisoned(torch.int64, len(rows))
        function(
            permuted(len(rows), 2),
            kinds,
            ints(len(rows), high=9, seed=3),
            offsets(lengths),
            accepted,
            tokens,
            path,
            ints(total, high=900, seed=4, kind=torch.int64),
            ints(SLOTS, 300, low=5000, high=6000, seed=5) if texts else None,
            **out,
        )
        outs.append(out)
    same(*outs)
    if total:
        assert int(outs[1]["select"].max()) < total


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("passes", [1, 2, 26])
def test_chain_layout(rows: int, passes: int) -> None:
    caps = ints(rows, high=3, seed=rows)
    outs = []
    for module in (draft_layout, layout_gpu):
        out = {name: poisoned(torch.int64, passes, rows) for name in ("positions", "kv_slots")}
        out["kv_lens"] = poisoned(torch.int32, passes, rows)
        module.chain_layout(
            permuted(rows, 1),
            caps,
            ints(SLOTS, high=PAGE * PAGES, seed=2),
            ints(SLOTS, PAGES, high=40, seed=3),
            PAGE,
            **out,
        )
        outs.append(out)
    same(*outs)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize(("width", "levels", "ahead"), [(1, 1, 0), (4, 3, 0), (4, 8, 1), (3, 2, 1)])
def test_tree_layout(rows: int, width: int, levels: int, ahead: int) -> None:
    outs = []
    for module in (draft_layout, layout_gpu):
        shape = (rows, width * levels)
        out = {name: poisoned(torch.int64, *shape) for name in ("positions", "kv_slots")}
        out["kv_lens"] = poisoned(torch.int32, rows)
        module.tree_layout(
            permuted(rows, 1),
            ints(rows, high=3, seed=rows),
            ints(SLOTS, high=PAGE * PAGES, seed=2),
            ints(SLOTS, PAGES, high=40, seed=3),
            PAGE,
            width,
            ahead,
            **out,
        )
        outs.append(out)
    same(*outs)


def node_outputs(total: int, rows: int) -> Outputs:
    places = {name: poisoned(torch.int32, total) for name in ("tokens", "parents")}
    return places | {name: poisoned(torch.int32, rows) for name in ("proposed", "depths")}


@pytest.mark.parametrize("drafts", [1, 3, 40])
@pytest.mark.parametrize("caps", [[], [0], [1], [3, 0, 4, 2], [31, 32, 33]])
def test_write_chains(caps: list[int], drafts: int) -> None:
    cu_q = offsets([cap + 1 + cap % 2 for cap in caps])
    outs = []
    for module in (draft_nodes, nodes_gpu):
        out = node_outputs(int(cu_q[-1]) + 2, len(caps))
        if caps:
            module.write_chains(
                ints(drafts, len(caps), high=900, seed=1, kind=torch.int64),
                cu_q,
                torch.tensor(caps, dtype=torch.int32, device=DEVICE),
                **out,
            )
        outs.append(out)
    same(*outs)


class Tree:
    """A tree of ``rows`` grown with random chances, many of them equal."""

    def __init__(self, rows: int, width: int, levels: int) -> None:
        self.width, self.levels, beams = width, levels, max(1, levels - 1)
        columns = width + (levels - 1) * width * width
        self.reach = self.chances(rows, width, 0)
        self.scores = torch.full((rows, columns), float(POISON), device=DEVICE)
        self.candidates = poisoned(torch.int64, rows, columns)
        self.beams = poisoned(torch.int64, rows, beams, width)
        self.ids, self.bits = (poisoned(torch.int64, rows, beams * width) for _ in range(2))
        self.parents = poisoned(torch.int64, rows, width)
        branch = torch.arange(width, device=DEVICE)
        self.scores[:, :width], self.beams[:, 0] = self.reach, branch
        self.candidates[:, :width] = self.ids[:, :width] = branch + 100
        self.bits[:, :width] = 1 << branch

    @staticmethod
    def chances(rows: int, width: int, seed: int) -> torch.Tensor:
        values = ints(rows, width, low=1, high=5, seed=seed).float() / 4
        return values.sort(dim=1, descending=True).values

    def grow(self, expand: object) -> Iterator[Outputs]:
        assert callable(expand)
        rows, width = self.reach.shape
        fields = ("reach", "scores", "candidates", "beams", "ids", "bits", "parents")
        out = {name: getattr(self, name) for name in fields}
        for level in range(1, self.levels):
            chances = self.chances(rows * width, width, level).view(rows, width, width)
            tokens = ints(rows, width, width, high=900, seed=level, kind=torch.int64)
            expand(level, chances, tokens, **out)
            yield out


@pytest.mark.parametrize(("width", "levels"), [(1, 1), (1, 4), (2, 3), (3, 4), (8, 4)])
@pytest.mark.parametrize("rows", [1, 3])
def test_trees(rows: int, width: int, levels: int) -> None:
    trees = Tree(rows, width, levels), Tree(rows, width, levels)
    grown = trees[0].grow(draft_tree.expand_tree), trees[1].grow(tree_gpu.expand_tree)
    for one, two in zip(*grown, strict=True):
        same(one, two)
    columns = trees[0].scores.shape[1]
    for caps in ([0] * rows, [1] * rows, [7, 0, 63][:rows], [columns, columns + 20, 5][:rows]):
        cu_q, outs = offsets([cap + 1 for cap in caps]), []
        for module in (draft_nodes, nodes_gpu):
            out = node_outputs(int(cu_q[-1]) + 2, rows)
            module.select_tree(
                trees[0].scores,
                trees[0].candidates,
                trees[0].beams,
                cu_q,
                torch.tensor(caps, dtype=torch.int32, device=DEVICE),
                **out,
            )
            outs.append(out)
        same(*outs)


def states(seed: int, count: int, width: int) -> draft_state.State:
    tokens = ints(SLOTS, count, high=900, seed=seed, kind=torch.int64)
    hidden = ints(SLOTS, width, high=99, seed=seed + 1, kind=torch.bfloat16)
    return tokens, tokens.float() / 7, hidden


@pytest.mark.parametrize("with_probs", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize(("count", "width"), [(1, 1), (3, 1023), (4, 1024), (1, 1025)])
def test_states(rows: int, count: int, width: int, with_probs: bool) -> None:
    outs = []
    for module in (draft_state, state_gpu):
        state, slots = states(3, count, width), permuted(rows, 1)
        out = {"tokens": poisoned(torch.int64, rows, count)}
        out["hidden"] = poisoned(torch.bfloat16, rows, width)
        probs = poisoned(torch.float32, rows, count)
        module.take_state(slots, state, probs=probs if with_probs else None, **out)
        new, select = states(5, count, width), ints(rows, high=SLOTS, seed=6, kind=torch.int64)
        module.keep_state(
            slots,
            state,
            select,
            tokens=new[0][:rows],
            probs=new[1][:rows] if with_probs else None,
            hidden=new[2],
        )
        out |= {"probs": probs, "kept": state[0], "kept_probs": state[1], "kept_hidden": state[2]}
        outs.append(out)
    same(*outs)
