"""A planned batch cut to its verify lengths: torch, Triton and plain Python agree."""

import random
from collections import Counter
from functools import partial
from types import ModuleType

import pytest
import torch

from outrider.kernels import ragged_rows, ragged_rows_gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize(
    ("module", "device"), [(ragged_rows, "cpu"), (ragged_rows_gpu, DEVICE)], ids=["torch", "gpu"]
)
Row = tuple[int, int, int, int, int]  # tokens, nodes, cap, verify length, proposed


def random_row(rng: random.Random) -> Row:
    kind = rng.randrange(5)
    if kind == 0:  # padding
        return 0, 0, 0, 1, 0
    if kind == 1:  # a chunk of a prompt, or its last
        return rng.choice((1, 3, 140, 300)), rng.randrange(2), 0, 1, 0
    if kind == 2:  # drafts that came from elsewhere, or none
        nodes = rng.randrange(1, 6)
        return nodes, nodes, 0, 1, nodes - 1
    cap = rng.randrange(1, 8)
    proposed = rng.randrange(cap + 1)
    return cap + 1, cap + 1, cap, 1 + rng.randrange(proposed + 1), proposed


def expected(rows: list[Row], room: int) -> dict[str, list[int]]:
    """What is kept, row by row; tokens are named by their planned places."""
    out: dict[str, list[int]] = {"cu_q": [0], "node_cu": [0], "tokens": [], "index": [],
                                 "proposed": [], "depths": []}  # fmt: skip
    planned = 0
    for tokens, nodes, cap, length, proposed in rows:
        kept = length if cap else tokens
        out["tokens"] += range(planned, planned + kept)
        total = len(out["tokens"])
        out["index"] += range(total - (kept if cap else nodes), total)
        out["cu_q"].append(total)
        out["node_cu"].append(len(out["index"]))
        out["proposed"].append(min(proposed, length - 1) if cap else proposed)
        out["depths"].append(out["proposed"][-1])
        planned += tokens
    out["index"] += [max(0, len(out["tokens"]) - 1)] * (room - len(out["index"]))
    out["tokens"] += [-7] * (room - len(out["tokens"]))
    return out


def compact(module: ModuleType, device: str, rows: list[Row], room: int) -> dict[str, list[int]]:
    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def new(size: int) -> torch.Tensor:
        return torch.full((size,), -99, dtype=torch.int32, device=device)

    cu_q, node_cu = [0], [0]
    for length, nodes, *_ in rows:
        cu_q.append(cu_q[-1] + length)
        node_cu.append(node_cu[-1] + nodes)
    total, count = cu_q[-1], len(rows)
    outs = {"cu_q_out": new(count + 1), "node_cu_out": new(count + 1), "tokens_out": new(room),
            "parents_out": new(room), "node_index_out": new(room)}  # fmt: skip
    proposed = column([row[4] for row in rows])
    depths = proposed.clone()
    place = torch.arange(total, dtype=torch.int32, device=device)
    call = module.compact_rows
    if device == "cuda":
        call = partial(call, pdl=torch.cuda.get_device_capability() >= (9, 0))
    call(
        column(cu_q), column(node_cu), column([row[2] for row in rows]),
        column([row[3] for row in rows]), place + 1, place + 1000, **outs, proposed=proposed,
        depths=depths,
    )  # fmt: skip
    tokens, parents = outs["tokens_out"].tolist(), outs["parents_out"].tolist()
    for token, parent in zip(tokens, parents, strict=True):
        assert (parent == token + 999) if token else (parent == -1)
    return {
        "cu_q": outs["cu_q_out"].tolist(),
        "node_cu": outs["node_cu_out"].tolist(),
        "tokens": [token - 1 if token else -7 for token in tokens],
        "index": outs["node_index_out"].tolist(),
        "proposed": proposed.tolist(),
        "depths": depths.tolist(),
    }


@BOTH
def test_random_batches(module: ModuleType, device: str) -> None:
    rng, seen = random.Random(5), Counter[str]()
    for _ in range(60):
        rows = [random_row(rng) for _ in range(rng.randrange(1, 9))]
        kept = sum(length if cap else tokens for tokens, _, cap, length, _ in rows)
        room = max(1, kept + rng.choice((0, 0, 1, 150)))
        assert compact(module, device, rows, room) == expected(rows, room)
        seen["full"] += room == kept
        seen["cut"] += any(cap and length < proposed + 1 for _, _, cap, length, proposed in rows)
        seen["padding"] += any(tokens == 0 for tokens, *_ in rows)
        seen["chunks"] += any(tokens > 128 for tokens, *_ in rows)
    assert min(seen.values()) > 5, seen


@BOTH
def test_more_rows_than_one_look(module: ModuleType, device: str) -> None:
    rng = random.Random(6)
    rows = [(4, 4, 3, rng.randrange(1, 5), 3) for _ in range(300)]
    room = sum(row[3] for row in rows) + 5
    assert compact(module, device, rows, room) == expected(rows, room)


@BOTH
def test_what_has_no_room_is_lost_and_nothing_else_is_touched(
    module: ModuleType, device: str
) -> None:
    rows = [(4, 4, 3, 4, 3), (4, 4, 3, 4, 3)]
    found = compact(module, device, rows, 6)
    assert found["tokens"] == [0, 1, 2, 3, 4, 5]
    assert found["cu_q"] == [0, 4, 8]
