"""Rounds of chains with a net that does each half of a round at once."""

import torch

from ..models.draft_net import AcceptedRows, ChainDraftNet, ChainRows, ChainState
from .device_drafter import DraftRows, LoadedDraft, Verdict


class NativeChains:
    """What EAGLE's drafter asks of such a net, with the drafter's ``state`` of every slot.

    ``page_table`` int32[S, P]; ``prompts`` int32[S, L] as in `SlotTexts`.
    """

    def __init__(
        self,
        net: ChainDraftNet,
        draft: LoadedDraft,
        page_table: torch.Tensor,
        prompts: torch.Tensor,
        state: ChainState,
    ) -> None:
        self._net = net
        self._kv = draft.kv
        self._page_table = page_table
        self._prompts = prompts
        self._state = state

    def propose(self, rows: DraftRows, levels: int) -> None:
        """Draft up to ``levels`` tokens a row."""
        of = ChainRows(
            rows.slots,
            rows.caps,
            rows.seq_lens,
            self._page_table,
            rows.cu_q,
            rows.tokens,
            rows.parents,
            rows.proposed,
            rows.depths,
        )
        self._net.draft(of, self._state, self._kv, levels)

    def align(self, verdict: Verdict) -> None:
        """Run what was accepted, and keep level 1 of what follows it."""
        rows = AcceptedRows(
            verdict.slots,
            verdict.kinds,
            verdict.starts,
            verdict.accept_lens,
            verdict.tokens,
            verdict.path,
            verdict.batch,
            verdict.features,
            self._prompts,
        )
        self._net.follow(rows, self._state, self._kv)
