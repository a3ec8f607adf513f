"""What a drafter keeps of each slot between steps, in one Triton launch each way."""

import torch
import triton
import triton.language as tl

from .draft_state import State

_BLOCK = 1024


@triton.jit
def _move(
    slots: tl.tensor,
    select: tl.tensor,
    tokens_from: tl.tensor,
    tokens_to: tl.tensor,
    probs_from: tl.tensor,
    probs_to: tl.tensor,
    hidden_from: tl.tensor,
    hidden_to: tl.tensor,
    width: tl.tensor,
    from_stride: tl.tensor,
    to_stride: tl.tensor,
    COUNT: tl.constexpr,
    LANES: tl.constexpr,
    TAKE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Row program_id(0), from its slot or to it; the second axis shares the hidden state."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, LANES)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + row).to(tl.int64)
    source = slot if TAKE else row
    target = row if TAKE else slot
    hidden_source = slot
    if not TAKE:
        hidden_source = tl.load(select + row)
    value = tl.load(hidden_from + hidden_source * from_stride + column, mask=column < width)
    tl.store(hidden_to + target * to_stride + column, value, mask=column < width)
    if tl.program_id(1) == 0:
        inside = lane < COUNT
        token = tl.load(tokens_from + source * COUNT + lane, mask=inside)
        tl.store(tokens_to + target * COUNT + lane, token, mask=inside)
        if probs_to is not None:
            chance = tl.load(probs_from + source * COUNT + lane, mask=inside)
            tl.store(probs_to + target * COUNT + lane, chance, mask=inside)


def take_state(
    slots: torch.Tensor,
    state: State,
    *,
    tokens: torch.Tensor,
    probs: torch.Tensor | None,
    hidden: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Copy the state of R rows' slots, see the reference.

    ``pdl``: programmatic dependent launch (Hopper and later). Raises ValueError unless all rows
    are contiguous.
    """
    probs_from = None if probs is None else state[1]
    _launch(
        slots, None, (state[0], tokens), (probs_from, probs), (state[2], hidden), True, pdl
    )  # fmt: skip


def keep_state(
    slots: torch.Tensor,
    state: State,
    select: torch.Tensor,
    *,
    tokens: torch.Tensor,
    probs: torch.Tensor | None,
    hidden: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Replace the state of R rows' slots, see the reference and ``take_state``."""
    probs_to = None if probs is None else state[1]
    _launch(
        slots, select, (tokens, state[0]), (probs, probs_to), (hidden, state[2]), False, pdl
    )  # fmt: skip


def _launch(
    slots: torch.Tensor,
    select: torch.Tensor | None,
    tokens: tuple[torch.Tensor, torch.Tensor],
    probs: tuple[torch.Tensor | None, torch.Tensor | None],
    hidden: tuple[torch.Tensor, torch.Tensor],
    take: bool,
    pdl: bool,
) -> None:
    count, width = tokens[0].shape[1], hidden[0].shape[1]
    for tensor in (*tokens, *probs):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError("tokens and probs are not contiguous")
    if any(tensor.stride(1) != 1 for tensor in hidden):
        raise ValueError("hidden states are not contiguous rows")
    if len(slots) == 0:
        return
    block = min(_BLOCK, triton.next_power_of_2(width))
    _move[(len(slots), triton.cdiv(width, block))](
        slots,
        select,
        *tokens,
        *probs,
        *hidden,
        width,
        hidden[0].stride(0),
        hidden[1].stride(0),
        COUNT=count,
        LANES=triton.next_power_of_2(count),
        TAKE=take,
        BLOCK=block,
        PDL=pdl,
        num_warps=max(1, block // 256),
        launch_pdl=pdl,
    )
