"""A draft model's pass over what a step accepted, laid out; torch operations of fixed sizes."""

import torch

_LAST_CHUNK, _VERIFY = 1, 2  # a row's kind; 0 is a chunk whose prompt goes on


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
    """Lay R rows out again, verify rows as the chains that they accepted.

    In: slots, starts int32[R]; kinds uint8 or int32[R]; cu_q int32[R + 1] offsets of the rows'
    tokens; accept_lens int32[R]; tokens, path int32[R, W] what the rows emitted and at which of
    their nodes, read below accept_lens; input_ids int64[T] what the target ran; prompts
    int32[S, L] or None, the text with which each slot was entered.

    Entry j of a row stands at its flat place cu_q[r] + j and at position starts[r] + j. Its source
    is the flat token whose feature belongs there: of a verify row path[r, j], of a chunk j itself.
    Its next id is the token behind it: tokens[r, j] of a verify row; of a chunk the next of its
    tokens, and behind its last one what the row emitted or, where the prompt goes on,
    prompts[slot, starts[r] + length] (0 without prompts). Entries of verify rows from
    accept_lens[r] on, and all from cu_q[R] on, are junk: their source is their own place and their
    next id is 0, or some id of the row's.

    Out: next_ids, sources, positions int64[T]; select int64[R], the row's newest entry: the one
    that accept_lens ends at, of a chunk the last; some place below T for rows without. Nothing is
    raised.
    """
    total, rows = len(input_ids), len(slots)
    place = torch.arange(total, device=slots.device)
    row = torch.searchsorted(cu_q[1:], place, right=True).clamp_(max=rows - 1)
    begins, ends = cu_q[:-1].long(), cu_q[1:].long()
    begin, inside = begins[row], place < ends[row]
    entry, lens = place - begin, accept_lens.long()
    verify = kinds == _VERIFY
    accepted = verify[row] & (entry < lens[row]) & inside
    column = entry.clamp(0, tokens.shape[1] - 1)
    sources.copy_(torch.where(accepted, begin + path[row, column], place))
    positions.copy_(torch.where(inside, starts[row] + entry, 0))
    behind = torch.where(inside, input_ids[(place + 1).clamp_(max=total - 1)], 0)
    behind = torch.where(place + 1 == ends[row], _behind_chunks(
        slots, kinds, starts + (ends - begins), lens, tokens, prompts
    )[row], behind)  # fmt: skip
    next_ids.copy_(torch.where(accepted, tokens[row, column], torch.where(inside, behind, 0)))
    newest = torch.where(verify, begins + lens, ends) - 1
    select.copy_(torch.minimum(torch.maximum(newest, begins), (ends - 1)).clamp_(min=0))


def _behind_chunks(
    slots: torch.Tensor,
    kinds: torch.Tensor,
    ends: torch.Tensor,
    lens: torch.Tensor,
    tokens: torch.Tensor,
    prompts: torch.Tensor | None,
) -> torch.Tensor:
    """int64[R]: the token at position ``ends`` int64[R] of rows that are chunks."""
    emitted = torch.where((kinds == _LAST_CHUNK) & (lens > 0), tokens[:, 0], 0).long()
    if prompts is None:
        return emitted
    column = ends.clamp(0, prompts.shape[1] - 1)
    return torch.where(kinds == 0, prompts[slots.long(), column].long(), emitted)
