"""Drafts from a row's own text: what followed the longest suffix seen before, the torch reference.

The text of slot s is history[s, :seq_lens[s] + 1]; the last of these is the bonus token.
"""

import torch


def suffix_match(
    history: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q: torch.Tensor,
    caps: torch.Tensor,
    least: int,
    most: int,
    *,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    proposed: torch.Tensor,
    depths: torch.Tensor,
) -> None:
    """Draft a chain for each of R rows that may have drafts.

    In: history int32[S, L]; slots, caps int32[R], caps[r] < 64 the drafts that the row has room
    for; seq_lens int32[S]; cu_q int32[R + 1] offsets of the rows' tokens, of which the first is
    the bonus token and the next caps[r] are drafted.

    A match of length m is an end e, 1 <= e < n, of a text of n tokens with history[e - m:e] equal
    to the last m tokens. The longest of ``least`` to ``most`` tokens wins, among equals the latest
    end. The drafts are the tokens from e on; where they reach the text's end they start over at
    e, as if the text went on repeating itself. So a match always fills the row.

    Out, for rows with caps[r] > 0: tokens, parents int32[T] at the drafts' places, a chain
    (parent i of node i + 1), or padding without a match: token 0, parent -1, which no walk
    accepts. For all rows: proposed and depths int32[R], caps[r] with a match and else 0. Rows with
    caps[r] = 0 are not read further. Nothing is raised.
    """
    proposed.zero_()
    depths.zero_()
    for row, cap in enumerate(caps.tolist()):
        if cap == 0:
            continue
        begin, slot = int(cu_q[row]) + 1, int(slots[row])
        count = min(int(seq_lens[slot]) + 1, history.shape[1])
        text = history[slot, :count].tolist()
        end = _match_end(text, least, most)
        tokens[begin : begin + cap] = 0
        parents[begin : begin + cap] = -1
        if end is not None:
            cycle = text[end:]
            drafts = [cycle[i % len(cycle)] for i in range(cap)]
            tokens[begin : begin + cap] = torch.tensor(drafts, dtype=torch.int32)
            parents[begin : begin + cap] = torch.arange(cap, dtype=torch.int32)
            proposed[row] = depths[row] = cap


def _match_end(text: list[int], least: int, most: int) -> int | None:
    best, found = least - 1, None
    for end in range(len(text) - 1, 0, -1):
        length = 0
        while length < min(most, end) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length > best:
            best, found = length, end
    return found


def append_tokens(
    history: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Write what R rows emitted behind their slots' text, in place.

    history int32[S, L]; slots, accept_lens int32[R]; tokens int32[R, W], the first accept_lens[r]
    of a row count; seq_lens int32[S] as the walk left them, so that the last token's place is
    seq_lens[slot]. Places from L on are not written.
    """
    for row, count in enumerate(accept_lens.tolist()):
        slot = int(slots[row])
        first = int(seq_lens[slot]) - count + 1
        room = max(0, min(count, history.shape[1] - first))
        history[slot, first : first + room] = tokens[row, :room]
