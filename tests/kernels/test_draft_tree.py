"""Index work of drafting against its definition: trees with ties, caps, places, extensions."""

from typing import Any

import numpy as np
import pytest
import torch

from outrider.kernels import (
    draft_candidates,
    draft_extend,
    draft_layout,
    draft_nodes,
    draft_ops_cpu,
    draft_tree,
)

from ..reference import draft_tree_ref as ref


class Reference:
    """The references, of several modules."""

    extend_inputs = staticmethod(draft_extend.extend_inputs)
    chain_layout = staticmethod(draft_layout.chain_layout)
    tree_layout = staticmethod(draft_layout.tree_layout)
    top_candidates = staticmethod(draft_candidates.top_candidates)
    write_chains = staticmethod(draft_nodes.write_chains)
    expand_tree = staticmethod(draft_tree.expand_tree)
    select_tree = staticmethod(draft_nodes.select_tree)


@pytest.fixture(params=[Reference, draft_ops_cpu], ids=["torch", "cpu"])
def ops(request: pytest.FixtureRequest) -> Any:
    return request.param


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Oracle:
    """Next tokens that depend on the path alone, with chances of few values, so that many tie."""

    def __init__(self, seed: int, width: int, levels: list[float]) -> None:
        self._seed, self._width, self._levels = seed, width, levels

    def __call__(self, path: tuple[int, ...]) -> list[tuple[int, float]]:
        rng = np.random.default_rng([self._seed, *path])
        tokens = rng.permutation(50)[: self._width]
        chances = sorted(rng.choice(self._levels, self._width), reverse=True)
        return [(int(t), float(np.float32(c))) for t, c in zip(tokens, chances, strict=True)]


def grow(ops: Any, oracles: list[Oracle], steps: int, width: int) -> tuple[torch.Tensor, ...]:
    """Scores, candidates and beams of some rows' trees, by ``expand_tree``."""
    rows, beam_levels = len(oracles), max(1, steps - 1)
    columns = width + (steps - 1) * width * width
    scores = torch.full((rows, columns), torch.nan)
    candidates, beams, ids, bits, parents = (
        torch.full(size, -7)
        for size in (
            (rows, columns),
            (rows, beam_levels, width),
            (rows, beam_levels * width),
            (rows, beam_levels * width),
            (rows, width),
        )
    )
    paths: list[list[tuple[int, ...]]] = []
    for row, oracle in enumerate(oracles):
        first = oracle(())
        scores[row, :width] = torch.tensor([chance for _, chance in first])
        candidates[row, :width] = torch.tensor([token for token, _ in first])
        paths.append([(token,) for token, _ in first])
    beams[:, 0] = torch.arange(width)
    ids[:, :width] = candidates[:, :width]
    bits[:, :width] = 1 << torch.arange(width)
    reach = scores[:, :width].clone()
    for level in range(1, steps):
        after = [[o(p) for p in some] for o, some in zip(oracles, paths, strict=True)]
        chances = torch.tensor([[[c for _, c in best] for best in some] for some in after])
        tokens = torch.tensor([[[t for t, _ in best] for best in some] for some in after])
        ops.expand_tree(
            level, chances, tokens, reach=reach, scores=scores, candidates=candidates, beams=beams,
            ids=ids, bits=bits, parents=parents,
        )  # fmt: skip
        if level < beam_levels:
            here = slice(level * width, (level + 1) * width)
            paths = [
                [(*some[p], t) for p, t in zip(above, new, strict=True)]
                for some, above, new in zip(
                    paths, parents.tolist(), ids[:, here].tolist(), strict=True
                )
            ]
            for row, some in enumerate(paths):
                check_ancestors(some, ids[row].tolist(), bits[row].tolist(), level * width)
    return scores, candidates, beams


def check_ancestors(
    paths: list[tuple[int, ...]], ids: list[int], bits: list[int], begin: int
) -> None:
    """The set bits of each node name the tokens of its path, in order."""
    for k, path in enumerate(paths):
        members = [ids[i] for i in range(64) if bits[begin + k] >> i & 1]
        assert members == list(path)


@pytest.mark.parametrize("levels", [[0.5], [1.0, 0.0], [0.5, 0.25], [0.31, 0.17, 0.11, 0.05]])
@pytest.mark.parametrize(("steps", "width"), [(1, 1), (1, 4), (4, 1), (2, 2), (3, 4), (5, 3)])
def test_trees_are_those_of_their_definition(
    ops: Any, steps: int, width: int, levels: list[float]
) -> None:
    rows, ties = 5, 0
    oracles = [Oracle(seed, width, levels) for seed in range(rows)]
    scores, candidates, beams = grow(ops, oracles, steps, width)
    caps = [0, 1, 3, 7, 60]
    cu_q = np.cumsum([0, *(cap + 1 for cap in caps)])
    tokens = torch.full((int(cu_q[-1]),), -9, dtype=torch.int32)
    parents = tokens.clone()
    proposed, depths = int32(*[-9] * rows), int32(*[-9] * rows)
    ops.select_tree(
        scores, candidates, beams, int32(*cu_q.tolist()), int32(*caps),
        tokens=tokens, parents=parents, proposed=proposed, depths=depths,
    )  # fmt: skip
    for row, cap in enumerate(caps):
        wanted = ref.grow(oracles[row], steps, width)
        assert candidates[row].tolist() == [c.token for c in wanted]
        assert scores[row].tolist() == [c.score for c in wanted]
        chosen, above, depth = ref.choose(wanted, cap)
        padding = cap - len(chosen)
        begin, end = int(cu_q[row]), int(cu_q[row + 1])
        assert tokens[begin:end].tolist() == [-9, *chosen, *[0] * padding]
        assert parents[begin:end].tolist() == [-9, *above, *[-1] * padding]
        assert (int(proposed[row]), int(depths[row])) == (len(chosen), depth)
        ties += len({c.score for c in wanted}) < len(wanted)
    assert ties or width == 1 or len(levels) > 2


def test_chains_are_cut_and_padded(ops: Any) -> None:
    drafts = torch.tensor([[5, 6, 7], [8, 9, 10]])  # two drafts of each of three rows
    tokens, parents = int32(*[-9] * 9), int32(*[-9] * 9)
    proposed, depths = int32(-9, -9, -9), int32(-9, -9, -9)
    ops.write_chains(
        drafts, int32(0, 2, 3, 7), int32(1, 0, 3),
        tokens=tokens, parents=parents, proposed=proposed, depths=depths,
    )  # fmt: skip
    assert tokens.tolist() == [-9, 5, -9, -9, 7, 10, 0, -9, -9]
    assert parents.tolist() == [-9, 0, -9, -9, 0, 1, -1, -9, -9]
    assert proposed.tolist() == depths.tolist() == [1, 0, 2]


@pytest.mark.parametrize("page_size", [1, 4])
def test_passes_stand_behind_the_slots(ops: Any, page_size: int) -> None:
    table = torch.arange(1, 19, dtype=torch.int32).view(3, 6)
    table[1, 3:] = 0
    slots, caps, seq_lens = int32(1, 0, 2), int32(2, 0, 3), int32(3, 3 * page_size - 2, 2)
    seq_lens[1] = max(1, int(seq_lens[1]))
    out = {
        "positions": torch.full((4, 3), -9),
        "kv_slots": torch.full((4, 3), -9),
        "kv_lens": torch.full((4, 3), -9, dtype=torch.int32),
    }
    ops.chain_layout(slots, caps, seq_lens, table, page_size, **out)
    for i in range(4):
        places = [int(seq_lens[1]) + i, 0, 2 + i]
        assert out["positions"][i].tolist() == places
        assert out["kv_lens"][i].tolist() == [p + 1 for p in places]
        wanted = [kv_slot(table[1], places[0], page_size), 0, kv_slot(table[2], 2 + i, page_size)]
        assert out["kv_slots"][i].tolist() == wanted
    assert (out["kv_slots"][:, 0] < page_size).any()  # some had no page
    for ahead in (0, 1):
        tree = {
            "positions": torch.full((3, 6), -9),
            "kv_slots": torch.full((3, 6), -9),
            "kv_lens": int32(-9, -9, -9),
        }
        ops.tree_layout(slots, caps, seq_lens, table, page_size, 3, ahead, **tree)
        first = int(seq_lens[2]) + ahead
        assert tree["positions"][2].tolist() == [first] * 3 + [first + 1] * 3
        wanted = [kv_slot(table[2], first + m, page_size) for m in range(6)]
        assert tree["kv_slots"][2].tolist() == wanted
        assert tree["kv_lens"].tolist() == [int(seq_lens[1]) + ahead + 6, 6, first + 6]
        assert tree["positions"][1].tolist() == tree["kv_slots"][1].tolist() == [0] * 6


def kv_slot(pages: torch.Tensor, place: int, page_size: int) -> int:
    column = place // page_size
    page = int(pages[column]) if column < len(pages) else 0
    return page * page_size + place % page_size


def test_extensions_follow_the_accepted_path(ops: Any) -> None:
    """A verify row that took nodes 0, 2, one that failed, a chunk, a last chunk, and padding."""
    slots, kinds = int32(1, 4, 2, 3, 0), int32(2, 2, 0, 1, 2)
    starts, cu_q = int32(7, 9, 3, 0, 0), int32(0, 4, 6, 8, 10, 10)
    tokens = int32(*[-1] * 20).view(5, 4)
    path = tokens.clone()
    tokens[0, :2], path[0, :2] = int32(11, 12), int32(0, 2)
    tokens[3, 0], path[3, 0] = 55, 0
    prompts = torch.arange(100, dtype=torch.int32).view(5, 20)
    out = {
        name: torch.full((size,), -9)
        for name, size in (("next_ids", 12), ("sources", 12), ("positions", 12), ("select", 5))
    }
    ops.extend_inputs(
        slots, kinds, starts, cu_q, int32(2, 0, 0, 1, 0), tokens, path,
        torch.arange(100, 112), prompts, **out,
    )  # fmt: skip
    ids = out["next_ids"].tolist()
    assert ids[:2] == [11, 12]
    assert ids[6:10] == [107, 45, 109, 55]
    assert min(ids) >= 0
    assert out["sources"].tolist() == [0, 2, *range(2, 12)]
    assert out["positions"].tolist() == [7, 8, 9, 10, 9, 10, 3, 4, 0, 1, 0, 0]
    assert out["select"].tolist()[:4] == [1, 4, 7, 9]
    assert 0 <= int(out["select"][4]) < 12
    ops.extend_inputs(
        slots, kinds, starts, cu_q, int32(2, 0, 0, 1, 0), tokens, path,
        torch.arange(100, 112), None, **out,
    )  # fmt: skip
    assert out["next_ids"].tolist()[6:10] == [107, 0, 109, 55]


@pytest.mark.parametrize("count", [1, 3])
def test_candidates_are_the_likeliest_with_the_lower_id_first(ops: Any, count: int) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0], [0.0, torch.nan, 1.0, 2.0]])
    tokens = torch.full((3, count), -9)
    probs = torch.full((3, count), torch.nan) if count > 1 else None
    mapped = torch.tensor([10, 20, 30, 40])
    ops.top_candidates(logits, mapped, tokens=tokens, probs=probs)
    assert tokens[:2].tolist() == [[20, 30, 40][:count], [10, 20, 30][:count]]
    assert tokens.min() >= 10
    if probs is not None:
        wanted = torch.softmax(logits[:2].double(), 1).gather(
            1, torch.tensor([[1, 2, 3], [0, 1, 2]])
        )
        assert torch.allclose(probs[:2].double(), wanted, atol=1e-6)
        assert probs[2].tolist() == [0.0] * count
    ops.top_candidates(logits, None, tokens=tokens, probs=probs)
    assert tokens[1].tolist() == [0, 1, 2][:count]
