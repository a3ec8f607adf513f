"""A planned batch cut to its rows' verify lengths, the torch reference."""

import torch


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
) -> None:
    """Keep the first tokens of R rows and close the gaps.

    In: cu_q, node_cu int32[R + 1] offsets of the rows' planned tokens and nodes; a row's nodes are
    its last tokens. caps int32[R]: a row with a cap above 0 is a chain of nodes and keeps
    verify_lens[r] of them (int32[R], 1 or more), all others stay as they are. tokens, parents
    int32[T], the latter within their row.

    Out: cu_q_out, node_cu_out int32[R + 1]; tokens_out, parents_out int32[G], what is kept, 0 and
    -1 behind it; node_index_out int32[G], the flat tokens of the nodes, the last token repeated.
    What is kept beyond G tokens is lost. In place: proposed and depths int32[R] of the rows that
    were cut become verify_lens - 1 at most.
    """
    planned, nodes = cu_q.diff(), node_cu.diff()
    cut = caps > 0
    kept = torch.where(cut, torch.minimum(planned, verify_lens), planned)
    kept_nodes = torch.where(cut, kept, nodes)
    for lengths, out in ((kept, cu_q_out), (kept_nodes, node_cu_out)):
        out[0] = 0
        out[1:] = lengths.cumsum(0)
    for values in (proposed, depths):
        values.copy_(torch.where(cut, torch.minimum(values, verify_lens - 1), values))
    tokens_out.zero_()
    parents_out.fill_(-1)
    total, room = int(cu_q_out[-1]), len(tokens_out)
    node_index_out.fill_(max(0, min(total, room) - 1))
    for row in range(len(caps)):
        begin, first = int(cu_q_out[row]), int(cu_q[row])
        count = min(int(kept[row]), room - begin)
        if count > 0:
            tokens_out[begin : begin + count] = tokens[first : first + count]
            parents_out[begin : begin + count] = parents[first : first + count]
        at, end = int(node_cu_out[row]), begin + int(kept[row])
        index = torch.arange(end - int(kept_nodes[row]), end, dtype=torch.int32)
        index = index[: max(0, len(node_index_out) - at)]
        node_index_out[at : at + len(index)] = index.to(node_index_out.device)
