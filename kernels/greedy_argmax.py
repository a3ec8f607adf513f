"""Greedy choice over rows of logits, the torch reference."""

import torch


def greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    """int64[N]: the id of each row's largest logit, the lowest one among equals.

    ``logits`` is float32[N, V]. A row with a NaN or an infinity has no choice: -1.
    """
    usable = torch.isfinite(logits).all(dim=1)
    equal_best = logits == logits.amax(dim=1, keepdim=True)
    # argmax does not promise which of several largest elements it returns; of a 0/1 row we ask
    # for the largest countdown, which is unique.
    countdown = torch.arange(logits.shape[1], 0, -1, device=logits.device)
    first = (equal_best * countdown).argmax(dim=1)
    return torch.where(usable, first, -1)


def draft_argmax(
    logits: torch.Tensor, addend: torch.Tensor | None, *, tokens: torch.Tensor
) -> None:
    """The id of each row's largest logit, the lowest one among equals, whatever the logits hold.

    In: logits [N, V] of any float dtype; addend [N, V] of the same one or None, to be added to
    them and rounded to it.

    Out: tokens int64[N]. Of a row with a NaN it is the lowest id of one.
    """
    total = logits if addend is None else logits + addend
    nan = total.isnan()
    largest = total.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(dim=1, keepdim=True)
    best = torch.where(nan.any(dim=1, keepdim=True), nan, total == largest)
    # As above: of a 0/1 row the largest countdown is unique.
    countdown = torch.arange(total.shape[1], 0, -1, device=total.device)
    tokens.copy_((best * countdown).argmax(dim=1))
