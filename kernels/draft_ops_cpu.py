"""The index work of drafting on a CPU, without torch: its calls cost as much as a small layer.

Signatures and meanings are those of the references in ``draft_*.py``.
"""

import numpy as np
import numpy.typing as npt
import torch

from . import draft_rows_cpu, greedy_argmax_cpu
from .draft_state import State
from .noise_streams import DRAFT
from .rejection_sample import LEAST_HEAT
from .rejection_sample_cpu import draw_unfiltered

_LEAST = torch.finfo(torch.float32).min
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


def extend_inputs(
    slots: torch.Tensor,
    kinds: torch.Tensor,
    starts: torch.Tensor,
    cu_q: torch.Tensor,
    accept_lens: torch.Tensor,
    tokens: torch.Tensor,
    path: torch.Tensor,
    input_ids: torch.Tensor,
    prompts: torch.Tensor | None,
    *,
    next_ids: torch.Tensor,
    sources: torch.Tensor,
    positions: torch.Tensor,
    select: torch.Tensor,
) -> None:
    """Lay R rows out again, verify rows as the chains that they accepted; see the reference."""
    draft_rows_cpu.extend_inputs(
        slots.numpy(),
        kinds.numpy().astype(np.uint8, copy=False),
        starts.numpy(),
        cu_q.numpy(),
        accept_lens.numpy(),
        tokens.numpy(),
        path.numpy(),
        input_ids.numpy(),
        None if prompts is None else prompts.numpy(),
        next_ids.numpy(),
        sources.numpy(),
        positions.numpy(),
        select.numpy(),
    )


def chain_layout(
    slots: torch.Tensor,
    caps: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    *,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    kv_lens: torch.Tensor,
) -> None:
    """Lay out N passes over R rows of one token each; see the reference."""
    place, rows, drafts = positions.numpy(), slots.numpy(), caps.numpy() > 0
    np.multiply(
        seq_lens.numpy()[rows] + np.arange(len(place))[:, None], drafts, out=place, casting="unsafe"
    )
    kv_slots.numpy()[:] = _kv_slots(rows, drafts, place, page_table, page_size)
    np.add(place, 1, out=kv_lens.numpy(), casting="unsafe")


def tree_layout(
    slots: torch.Tensor,
    caps: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    width: int,
    ahead: int,
    *,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    kv_lens: torch.Tensor,
) -> None:
    """Lay out one pass over R rows of C tree nodes each; see the reference."""
    rows, drafts = slots.numpy(), caps.numpy()[:, None] > 0
    node = np.arange(positions.shape[1])
    first = (seq_lens.numpy()[rows][:, None] + ahead) * drafts
    positions.numpy()[:] = (first + node // width) * drafts
    index = ((first + node) * drafts).astype(np.int64)
    kv_slots.numpy()[:] = _kv_slots(rows[:, None], drafts, index, page_table, page_size)
    kv_lens.numpy()[:] = first[:, 0] + len(node)


def _kv_slots(
    rows: I32, drafts: npt.NDArray[np.bool_], index: I64, page_table: torch.Tensor, page_size: int
) -> I64:
    """KV slots of sequence indices; 0 where no draft is made, page 0 beyond the table."""
    table = page_table.numpy()
    column = index // page_size
    most = table.shape[1] - 1
    pages = table[rows, np.minimum(column, most)] * (column <= most)
    slots: I64 = (pages.astype(np.int64) * page_size + index % page_size) * drafts
    return slots


def top_candidates(
    logits: torch.Tensor,
    token_ids: torch.Tensor | None,
    *,
    tokens: torch.Tensor,
    probs: torch.Tensor | None,
) -> None:
    """The K most likely tokens of each of N rows; see the reference."""
    values = logits if logits.dtype == torch.float32 else logits.float()
    ids = None if token_ids is None else token_ids.numpy()
    out = tokens.numpy()
    if probs is None and out.shape[1] == 1:
        greedy_argmax_cpu.greedy_tokens(values.numpy(), ids, out)
        return
    best = np.empty(len(values), dtype=np.int64)
    row = np.arange(len(values))
    if probs is not None:
        chances = torch.softmax(values, dim=1).numpy()
        left = values.clone().numpy()
    else:
        left = values.numpy()
    for rank in range(out.shape[1]):
        greedy_argmax_cpu.greedy_argmax(left, best)
        unusable = best < 0
        best[unusable] = 0
        out[:, rank] = best
        if probs is not None:
            left[row, best] = np.where(unusable, left[row, best], _LEAST)
            probs.numpy()[:, rank] = np.where(unusable, 0, chances[row, best])
    if ids is not None:
        out[:] = ids[out]


def draw_drafts(
    logits: torch.Tensor,
    token_ids: torch.Tensor | None,
    temperatures: torch.Tensor,
    sampled: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    tokens: torch.Tensor,
) -> None:
    """A token of each of N rows, drawn where ``sampled``; see the reference."""
    values = logits if logits.dtype == torch.float32 else logits.float()
    best = np.empty(len(values), dtype=np.int64)
    greedy_argmax_cpu.greedy_argmax(values.numpy(), best)
    ids, drawn = torch.from_numpy(best), sampled
    infinite = ids < 0
    if infinite.any():
        part = values[infinite]
        drawn = sampled.clone()
        drawn[infinite] &= (part < torch.inf).all(dim=1) & (part > -torch.inf).any(dim=1)
        ids[infinite] = 0
    heat, keys = temperatures.clamp(min=LEAST_HEAT), seeds ^ DRAFT
    if drawn.all():
        ids = draw_unfiltered(values, heat, keys, positions)
    elif drawn.any():
        ids[drawn] = draw_unfiltered(values[drawn], heat[drawn], keys[drawn], positions[drawn])
    tokens[:, 0] = ids if token_ids is None else token_ids[ids]


def write_chains(
    drafts: torch.Tensor,
    cu_q: torch.Tensor,
    caps: torch.Tensor,
    *,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    proposed: torch.Tensor,
    depths: torch.Tensor,
) -> None:
    """Write the first caps[r] of N drafts of each of R rows as a chain; see the reference."""
    draft_rows_cpu.write_chains(
        drafts.numpy(),
        cu_q.numpy(),
        caps.numpy(),
        tokens.numpy(),
        parents.numpy(),
        proposed.numpy(),
        depths.numpy(),
    )


def take_state(
    slots: torch.Tensor,
    state: State,
    *,
    tokens: torch.Tensor,
    probs: torch.Tensor | None,
    hidden: torch.Tensor,
) -> None:
    """Copy the state of R rows' slots; see the reference."""
    index = slots.numpy()
    for kept, out in zip(state, (tokens, probs, hidden), strict=True):
        if out is not None:
            draft_rows_cpu.take_rows(index, _bytes(kept), _bytes(out))


def keep_state(
    slots: torch.Tensor,
    state: State,
    select: torch.Tensor,
    *,
    tokens: torch.Tensor,
    probs: torch.Tensor | None,
    hidden: torch.Tensor,
) -> None:
    """Replace the state of R rows' slots; see the reference."""
    index = slots.numpy()
    draft_rows_cpu.keep_rows(index, None, _bytes(tokens), _bytes(state[0]))
    if probs is not None:
        draft_rows_cpu.keep_rows(index, None, _bytes(probs), _bytes(state[1]))
    draft_rows_cpu.keep_rows(index, select.numpy(), _bytes(hidden), _bytes(state[2]))


def pick_rows(index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows index[n] of ``rows`` [T, H], as [N, H]."""
    return torch.from_numpy(_bytes(rows)[index.numpy()]).view(rows.dtype)


def _bytes(rows: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Rows as their bytes, of dtypes too that numpy has not."""
    array: npt.NDArray[np.uint8] = rows.view(torch.uint8).numpy()
    return array


def expand_tree(
    level: int,
    chances: torch.Tensor,
    successors: torch.Tensor,
    *,
    reach: torch.Tensor,
    scores: torch.Tensor,
    candidates: torch.Tensor,
    beams: torch.Tensor,
    ids: torch.Tensor,
    bits: torch.Tensor,
    parents: torch.Tensor,
) -> None:
    """Grow R trees by a level; see the reference."""
    best_so_far = reach.numpy()
    rows, width = best_so_far.shape
    begin = width + (level - 1) * width * width
    cumulative = (best_so_far[:, :, None] * chances.numpy()).reshape(rows, -1)
    following = successors.numpy().reshape(rows, -1)
    scores.numpy()[:, begin : begin + width * width] = cumulative
    candidates.numpy()[:, begin : begin + width * width] = following
    if level >= beams.shape[1]:
        return
    best = np.argsort(-cumulative, axis=1, kind="stable")[:, :width]
    best_so_far[:] = np.take_along_axis(cumulative, best, 1)
    above = parents.numpy()
    above[:] = best // width
    beams.numpy()[:, level] = begin + best
    here = slice(level * width, (level + 1) * width)
    ids.numpy()[:, here] = np.take_along_axis(following, best, 1)
    sets = bits.numpy()
    own = np.uint64(1) << np.arange(here.start, here.stop, dtype=np.uint64)
    before = sets[:, (level - 1) * width : level * width]
    sets[:, here] = np.take_along_axis(before, above, 1) | own.view(np.int64)


def select_tree(
    scores: torch.Tensor,
    candidates: torch.Tensor,
    beams: torch.Tensor,
    cu_q: torch.Tensor,
    caps: torch.Tensor,
    *,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    proposed: torch.Tensor,
    depths: torch.Tensor,
) -> None:
    """Write the best caps[r] of C candidates of each of R rows as a tree; see the reference."""
    width, columns = beams.shape[2], scores.shape[1]
    ranked = np.argsort(-scores.numpy(), axis=1, kind="stable")
    given, of_beam = candidates.numpy(), beams.numpy().reshape(len(ranked), -1)
    out, above = tokens.numpy(), parents.numpy()
    deepest, counts = depths.numpy(), proposed.numpy()
    for row, (begin, cap) in enumerate(zip(cu_q.tolist(), caps.tolist(), strict=False)):
        first, count = begin + 1, min(cap, columns)
        chosen = np.sort(ranked[row, :count])
        level = np.where(chosen < width, 0, 1 + (chosen - width) // (width * width))
        beam = (level - 1) * width + (chosen - width) % (width * width) // width
        number = 1 + np.searchsorted(chosen, of_beam[row, np.maximum(beam, 0)])
        out[first : first + count] = given[row, chosen]
        above[first : first + count] = np.where(level == 0, 0, number)
        out[first + count : first + cap] = 0
        above[first + count : first + cap] = -1
        deepest[row] = level.max(initial=-1) + 1
        counts[row] = count
