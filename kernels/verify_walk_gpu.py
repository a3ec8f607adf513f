"""The acceptance walk over draft trees and the slots' next state on a GPU, one program a row.

Which nodes their parents accept is known at once; the walk then only follows lowest children.
"""

import torch
import triton
import triton.language as tl


def verify_walk(
    targets: torch.Tensor,
    input_ids: torch.Tensor,
    host_parents: torch.Tensor,
    cu_q: torch.Tensor,
    node_cu: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    last_tokens: torch.Tensor,
    out_counts: torch.Tensor,
    *,
    accept_lens: torch.Tensor,
    tokens: torch.Tensor,
    accept_idx: torch.Tensor,
    most: torch.Tensor | None = None,
    trimmed: torch.Tensor | None = None,
) -> None:
    """Accept R rows and move their slots' state over what they emit, see the reference.

    Raises ValueError unless ``most`` and ``trimmed`` come together.
    """
    if (most is None) != (trimmed is None):
        raise ValueError("most and trimmed come together")
    rows, width = accept_idx.shape
    if rows:
        _verify_walk_kernel[(rows,)](
            targets,
            input_ids,
            host_parents,
            cu_q,
            node_cu,
            slots,
            starts,
            seq_lens,
            last_tokens,
            out_counts,
            accept_lens,
            tokens,
            accept_idx,
            accept_lens if most is None else most,
            accept_lens if trimmed is None else trimmed,
            LIMITED=most is not None,
            WIDTH=width,
            LANES=max(32, triton.next_power_of_2(width)),
            num_warps=1,
        )


@triton.jit
def _verify_walk_kernel(
    targets: tl.tensor,
    input_ids: tl.tensor,
    host_parents: tl.tensor,
    cu_q: tl.tensor,
    node_cu: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    seq_lens: tl.tensor,
    last_tokens: tl.tensor,
    out_counts: tl.tensor,
    accept_lens: tl.tensor,
    tokens: tl.tensor,
    accept_idx: tl.tensor,
    most: tl.tensor,
    trimmed: tl.tensor,
    LIMITED: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    begin = tl.load(cu_q + row)
    end = tl.load(cu_q + row + 1)
    targets += tl.load(node_cu + row)
    width = tl.load(node_cu + row + 1) - tl.load(node_cu + row)
    slot = tl.load(slots + row).to(tl.int64)
    start = tl.load(starts + row)

    first = end - width
    drafted = (lane > 0) & (lane < width)
    parent = tl.load(host_parents + first + lane, mask=drafted, other=-1)
    # Rising nodes along every path: the walk ends even in a broken tree.
    drafted = (parent >= 0) & (parent < lane)
    draft = tl.load(input_ids + first + lane, mask=drafted, other=-1)
    wanted = tl.load(targets + parent, mask=drafted, other=-1)
    accepting = tl.where((wanted >= 0) & (draft == wanted), parent, -1)

    path = tl.full([LANES], -1, tl.int32)
    length = 0
    last_node = 0
    node = tl.where(width > 0, 0, LANES)
    while node < LANES:
        path = tl.where(lane == length, node, path)
        length += 1
        last_node = node
        node = tl.min(tl.where(accepting == node, lane, LANES), 0)

    # Only the path's end can be unusable: no draft is accepted below a negative target.
    if LIMITED:
        limit = tl.maximum(tl.load(most + row), 1)
        end_target = tl.load(targets + last_node, mask=width > 0, other=-1)
        over = tl.maximum(length - (end_target < 0).to(tl.int32) - limit, 0)
        tl.store(trimmed + row, over)
        length = tl.minimum(length, limit)
        last_node = tl.sum(tl.where(lane == length - 1, path, 0), 0)
    last = tl.load(targets + last_node, mask=width > 0, other=-1).to(tl.int32)
    length = tl.where(last >= 0, length, 0)
    emits = length > 0
    path = tl.where(lane < length, path, -1)
    emitted = tl.load(targets + path, mask=path >= 0, other=-1).to(tl.int32)
    tl.store(accept_lens + row, length)
    tl.store(accept_idx + row * WIDTH + lane, path, mask=lane < WIDTH)
    tl.store(tokens + row * WIDTH + lane, emitted, mask=lane < WIDTH)

    moves = (end > begin) & ((width == 0) | emits)
    tl.store(seq_lens + slot, start + (first - begin) + length, mask=moves)
    tl.store(last_tokens + slot, last, mask=emits)
    count = tl.load(out_counts + slot, mask=emits, other=0)
    tl.store(out_counts + slot, count + length, mask=emits)
