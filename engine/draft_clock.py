"""A draft model's part of a step, for the clock: with KV in the sink page alone."""

import torch

from ..engine_core.ids import RowKind
from .forward_batch import ForwardBatch
from .future_map import FutureMap
from .measure import DraftWork
from .speculative.device_drafter import DeviceDrafter, DraftRows, LoadedModel, Verdict

_LENGTH = 128  # tokens of a row before its drafts


def draft_work(drafter: DeviceDrafter, draft: LoadedModel, state: FutureMap) -> DraftWork:
    """What ``drafter`` does in steps of full drafts, all of which hold; only while idle."""
    config, drafts = draft.net.config, draft.shape.num_draft_tokens - 1
    width = config.feature_size
    lengths = torch.full_like(state.seq_lens, _LENGTH)

    def propose(rows: int) -> None:
        kept = state.page_table[:rows].clone()
        state.page_table[:rows] = 0
        tokens, parents = torch.zeros(2, rows * (drafts + 1), dtype=torch.int32)
        drafter.propose(
            DraftRows(
                torch.arange(rows, dtype=torch.int32),
                torch.arange(0, rows * (drafts + 1) + 1, drafts + 1, dtype=torch.int32),
                torch.full((rows,), drafts, dtype=torch.int32),
                lengths,
                tokens,
                parents,
                *torch.zeros(2, rows, dtype=torch.int32),
            )
        )
        state.page_table[:rows] = kept

    def align(batch: ForwardBatch) -> None:
        q_lens = batch.cu_q.diff()
        rows, longest = len(q_lens), int(q_lens.max())
        node = torch.arange(longest, dtype=torch.int32).expand(rows, -1).contiguous()
        drafter.align(
            Verdict(
                torch.arange(rows, dtype=torch.int32) % len(lengths),
                q_lens,
                torch.zeros_like(node),
                node,
                lengths,
                torch.full((rows,), int(RowKind.VERIFY), dtype=torch.uint8),
                batch.kv_lens - q_lens,
                batch,
                torch.zeros(len(batch.input_ids), width, dtype=draft.net.dtype),
            )
        )

    return DraftWork(propose, align)
