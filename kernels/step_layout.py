"""The rows of a step laid out as the flat batch that the model consumes, the torch reference."""

import torch

VERIFY = 2  # a row's kind; the smaller ones are prefill chunks


def lay_out(
    slots: torch.Tensor,
    kinds: torch.Tensor,
    starts: torch.Tensor,
    cu_q: torch.Tensor,
    host_tokens: torch.Tensor,
    host_parents: torch.Tensor,
    seq_lens: torch.Tensor,
    last_tokens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    *,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    kv_lens: torch.Tensor,
    tree_bits: torch.Tensor,
    is_tree: torch.Tensor,
    starts_before: torch.Tensor,
) -> None:
    """Resolve R rows against the slots' state and write their T tokens.

    In: slots int32[R]; kinds uint8 or int32[R] (0, 1: prefill, 2: verify); starts int32[R], read
    for prefill rows; cu_q int32[R + 1] offsets of the rows' tokens. host_tokens int32[T]: prefill
    tokens and drafts at their flat places. host_parents int32[T], read for the drafts of verify
    rows: the parent's index within the row, below the node's own, or -1 for padding, which is no
    draft: it goes on as a chain would, or stands alone in a row that branches. seq_lens,
    last_tokens int32[S]: a verify row starts at its slot's length with its slot's last token.
    page_table int32[S, P], 0 = no page.

    Out: input_ids int64[T]; positions int64[T] = start + depth in the tree; kv_slots int64[T] of
    the sequence indices start, start + 1, ...; tree_bits int64[T], bit j set iff the token sees
    token j < 64 of its row; kv_lens int32[R] = start + length; is_tree uint8[R], 0 for chains;
    starts_before int32[R], every row's start.

    Rows of length 0 are padding: their slot is not used and their outputs are 0. So are the
    outputs of tokens from cu_q[R] on, whose KV therefore goes to page 0, as does that of indices
    without a page. The host has checked everything: nothing is raised, and a row that branches
    has at most 64 tokens.
    """
    for output in (input_ids, positions, kv_slots, kv_lens, tree_bits, is_tree, starts_before):
        output.zero_()
    bounds = cu_q.tolist()
    for row, slot in enumerate(slots.tolist()):
        begin, end = bounds[row], bounds[row + 1]
        if begin == end:
            continue
        verify = int(kinds[row]) == VERIFY
        start = int(seq_lens[slot]) if verify else int(starts[row])
        parents = host_parents[begin:end].tolist() if verify else []
        input_ids[begin:end] = host_tokens[begin:end]
        if verify:
            input_ids[begin] = last_tokens[slot]
        branches = any(parents[i] >= 0 and parents[i] != i - 1 for i in range(1, len(parents)))
        bits, depths = _shape(parents if branches else [], end - begin)
        tree_bits[begin:end] = torch.tensor(bits)
        positions[begin:end] = start + torch.tensor(depths)
        index = start + torch.arange(end - begin)
        pages = torch.zeros_like(index)
        inside = index // page_size < page_table.shape[1]
        pages[inside] = page_table[slot, index[inside] // page_size].long()
        kv_slots[begin:end] = pages * page_size + index % page_size
        kv_lens[row] = start + end - begin
        is_tree[row] = branches
        starts_before[row] = start


def _shape(parents: list[int], length: int) -> tuple[list[int], list[int]]:
    """Signed 64-bit ancestor sets and depths of a row; no parents: a chain."""
    bits, depths = [1], [0]
    for node in range(1, length):
        parent = parents[node] if parents else node - 1
        own = 1 << node if node < 64 else 0
        bits.append(own if parent < 0 else bits[parent] | own)
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return [b - (1 << 64) if b >> 63 else b for b in bits], depths
