"""Row by row index work of drafting on a CPU.

All arrays are C-contiguous. Raises ValueError naming an argument that would lead out of an array.
"""

import numpy as np
from numpy.typing import NDArray

_I32 = NDArray[np.int32]
_I64 = NDArray[np.int64]
_U8 = NDArray[np.uint8]

__pyx_capi__: dict[str, object]  # what other compiled modules call

def extend_inputs(
    slots: _I32,
    kinds: _U8,
    starts: _I32,
    cu_q: _I32,
    accept_lens: _I32,
    tokens: _I32,
    path: _I32,
    input_ids: _I64,
    prompts: _I32 | None,
    next_ids: _I64,
    sources: _I64,
    positions: _I64,
    select: _I64,
) -> None:
    """As kernels.draft_extend.extend_inputs."""

def drop_junk(
    kinds: _U8,
    accept_lens: _I32,
    cu_q: _I32,
    next_ids: _I64,
    sources: _I64,
    positions: _I64,
    kv_slots: _I64,
    kv_lens: _I32,
    begins: _I32,
    select: _I64,
) -> int:
    """Move the entries that R rows keep to the front of int64[T] arrays; returns their number E.

    Verify rows keep ``accept_lens`` [R] entries, one at least if they have any; chunks keep all.
    In place: the four int64[T], and ``kv_lens`` [R], less what was dropped. Out: ``begins``
    [R + 1] offsets and ``select`` [R], the rows' last entries.
    """

def write_chains(
    drafts: _I64,
    cu_q: _I32,
    caps: _I32,
    tokens: _I32,
    parents: _I32,
    proposed: _I32,
    depths: _I32,
) -> None:
    """As kernels.draft_nodes.write_chains."""

def ask(slots: _I32, kinds: _U8, q_caps: _I32, asked: _I32, caps: _I32, cu_q: _I32) -> int:
    """Lay out the rows of a step that may have drafts; returns their number.

    Verify rows of ``kinds`` [R] with more than one token in ``q_caps`` [R]. Out, for them:
    ``asked``, their ``slots`` [R]; ``caps``, the drafts that they have room for; ``cu_q``, offsets
    of their tokens.
    """

def give(
    kinds: _U8,
    q_caps: _I32,
    cu_q: _I32,
    proposed: _I32,
    tokens: _I32,
    parents: _I32,
    counts: _I32,
) -> int:
    """Move what was proposed to the front of ``tokens`` and ``parents`` [T]; returns its number.

    ``cu_q`` and ``proposed`` are those of the rows that ``ask`` chose among ``kinds`` and
    ``q_caps`` [R]. Out: ``counts`` [R], the drafts of each row of the step.
    """

def spread(lens: _I32, values: _I32, grid: _I32) -> None:
    """Write ``grid`` [R, W]: runs of ``lens`` [R] values that lie side by side, -1 behind them."""

def take_rows(slots: _I32, state: _U8, out: _U8) -> None:
    """Write out[r] = state[slots[r]], rows of bytes."""

def keep_rows(slots: _I32, select: _I64 | None, rows: _U8, state: _U8) -> None:
    """Write state[slots[r]] = rows[select[r]], rows of bytes; ``select`` None takes rows[r]."""
