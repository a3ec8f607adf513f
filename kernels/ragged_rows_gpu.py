"""A planned batch cut to its rows' verify lengths, in one Triton launch.

Each row's program adds up the lengths before its own, which saves a launch for the prefix sums; one
program more fills the padding.
"""

import torch
import triton
import triton.language as tl

_MOST_ROWS = 256  # that a program looks at together
_BLOCK = 128  # tokens that it copies together


@triton.jit
def _compact(
    cu_q: tl.tensor,
    node_cu: tl.tensor,
    caps: tl.tensor,
    verify_lens: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor,
    cu_q_out: tl.tensor,
    node_cu_out: tl.tensor,
    tokens_out: tl.tensor,
    parents_out: tl.tensor,
    node_index_out: tl.tensor,
    proposed: tl.tensor,
    depths: tl.tensor,
    rows: tl.tensor,
    room: tl.tensor,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begins = tl.zeros([ROWS], tl.int32)
    node_begins = tl.zeros([ROWS], tl.int32)
    for low in range(0, rows, ROWS):
        other = low + tl.arange(0, ROWS)
        before = (other < rows) & (other < row)
        planned = tl.load(cu_q + other + 1, mask=before, other=0)
        planned -= tl.load(cu_q + other, mask=before, other=0)
        nodes = tl.load(node_cu + other + 1, mask=before, other=0)
        nodes -= tl.load(node_cu + other, mask=before, other=0)
        cut = tl.load(caps + other, mask=before, other=0) > 0
        lens = tl.load(verify_lens + other, mask=before, other=0)
        kept = tl.where(cut, tl.minimum(planned, lens), planned)
        begins += kept
        node_begins += tl.where(cut, kept, nodes)
    begin = tl.sum(begins, 0)
    node_begin = tl.sum(node_begins, 0)
    lane = tl.arange(0, BLOCK)
    if row == rows:  # behind them all
        tl.store(cu_q_out + row, begin)
        tl.store(node_cu_out + row, node_begin)
        last = tl.maximum(tl.minimum(begin, room) - 1, 0)
        for low in range(tl.minimum(begin, node_begin), room, BLOCK):
            place = low + lane
            behind = (place >= begin) & (place < room)
            tl.store(tokens_out + place, 0, mask=behind)
            tl.store(parents_out + place, -1, mask=behind)
            tl.store(node_index_out + place, last, mask=(place >= node_begin) & (place < room))
    else:
        first = tl.load(cu_q + row)
        length = tl.load(cu_q + row + 1) - first
        count = tl.load(node_cu + row + 1) - tl.load(node_cu + row)
        cuts = tl.load(caps + row) > 0
        most = tl.load(verify_lens + row)
        length = tl.where(cuts, tl.minimum(length, most), length)
        count = tl.where(cuts, length, count)
        tl.store(cu_q_out + row, begin)
        tl.store(node_cu_out + row, node_begin)
        drafts = tl.load(proposed + row)
        depth = tl.load(depths + row)
        tl.store(proposed + row, tl.minimum(drafts, most - 1), mask=cuts)
        tl.store(depths + row, tl.minimum(depth, most - 1), mask=cuts)
        for low in range(0, length, BLOCK):
            lanes = low + lane
            inside = (lanes < length) & (begin + lanes < room)
            token = tl.load(tokens + first + lanes, mask=inside, other=0)
            parent = tl.load(parents + first + lanes, mask=inside, other=-1)
            tl.store(tokens_out + begin + lanes, token, mask=inside)
            tl.store(parents_out + begin + lanes, parent, mask=inside)
        for low in range(0, count, BLOCK):
            lanes = low + lane
            inside = (lanes < count) & (node_begin + lanes < room)
            place = begin + length - count + lanes
            tl.store(node_index_out + node_begin + lanes, place, mask=inside)


def compact_rows(
    cu_q: torch.Tensor,
    node_cu: torch.Tensor,
    caps: torch.Tensor,
    verify_lens: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    *,
    cu_q_out: torch.Tensor,
    node_cu_out: torch.Tensor,
    tokens_out: torch.Tensor,
    parents_out: torch.Tensor,
    node_index_out: torch.Tensor,
    proposed: torch.Tensor,
    depths: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Keep the first tokens of R rows and close the gaps, see the reference.

    ``pdl``: programmatic dependent launch (Hopper and later). Raises ValueError unless what is
    written by token has the same length.
    """
    rows, room = len(caps), len(tokens_out)
    if len(parents_out) != room or len(node_index_out) != room:
        raise ValueError(f"outputs of {room}, {len(parents_out)} and {len(node_index_out)} tokens")
    _compact[(rows + 1,)](
        cu_q,
        node_cu,
        caps,
        verify_lens,
        tokens,
        parents,
        cu_q_out,
        node_cu_out,
        tokens_out,
        parents_out,
        node_index_out,
        proposed,
        depths,
        rows,
        room,
        BLOCK=_BLOCK,
        ROWS=min(triton.next_power_of_2(max(rows, 1)), _MOST_ROWS),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
