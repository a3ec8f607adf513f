"""What a drafter keeps of each slot between steps; torch operations.

A state is three tensors by slot: ``tokens`` int64[S, K] of level 1, ``probs`` float32[S, K] their
probabilities, and ``hidden`` [S, H], the recurrent state behind them.
"""

import torch

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def take_state(
    slots: torch.Tensor,
    state: State,
    *,
    tokens: torch.Tensor,
    probs: torch.Tensor | None,
    hidden: torch.Tensor,
) -> None:
    """Copy the state of R rows' slots (int32[R]).

    Out: tokens int64[R, K], probs float32[R, K] if wanted, hidden [R, H].
    """
    index = slots.long()
    tokens.copy_(state[0][index])
    if probs is not None:
        probs.copy_(state[1][index])
    hidden.copy_(state[2][index])


def keep_state(
    slots: torch.Tensor,
    state: State,
    select: torch.Tensor,
    *,
    tokens: torch.Tensor,
    probs: torch.Tensor | None,
    hidden: torch.Tensor,
) -> None:
    """Replace the state of R rows' slots (int32[R], different ones save for padding).

    In: tokens int64[R, K]; probs float32[R, K], or None, which leaves them; hidden [T, H], of which
    row r keeps number select[r] of int64[R].
    """
    index = slots.long()
    state[0][index] = tokens
    if probs is not None:
        state[1][index] = probs
    state[2][index] = hidden.index_select(0, select)
