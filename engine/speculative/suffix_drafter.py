"""NGRAM on the device: drafts from each request's own text, which stays on the device."""

import torch

from ...engine_core.plan import SlotInit
from ...kernels.suffix_match_gpu import append_tokens, suffix_match
from .device_drafter import DrafterContext, DraftRows, Verdict
from .slot_texts import SlotTexts

_LEAST = 1  # tokens of a match: drafts of a weak one cost no more than the padding they replace


class SuffixDrafter:
    """A :class:`DeviceDrafter`: chains that continue the longest match of a text's own suffix.

    ``history`` int32[S, L]: the tokens of slot s; those up to its length and its bonus token
    count. ``most``: tokens of the longest match.
    """

    def __init__(self, slots: int, length: int, most: int, device: torch.device) -> None:
        self._texts = SlotTexts(slots, length, device)
        self.history = self._texts.tokens
        self._most = most

    @property
    def feature_layers(self) -> None:
        """It looks at tokens alone."""

    def enter(self, init: SlotInit) -> None:
        """Copy the request's tokens to the device: the prompt, and output from before."""
        self._texts.enter(init)

    def propose(self, rows: DraftRows) -> None:
        """Match every row that has a cap."""
        suffix_match(
            self.history,
            rows.slots,
            rows.seq_lens,
            rows.cu_q,
            rows.caps,
            _LEAST,
            self._most,
            tokens=rows.tokens,
            parents=rows.parents,
            proposed=rows.proposed,
            depths=rows.depths,
        )

    def align(self, verdict: Verdict) -> None:
        """Append what the rows emitted."""
        append_tokens(
            self.history, verdict.slots, verdict.seq_lens, verdict.accept_lens, verdict.tokens
        )

    def reset(self) -> None:
        """Nothing to do: a slot's text is written when a request enters it."""


def make(context: DrafterContext) -> SuffixDrafter:
    """The drafter that NGRAM's spec names for the device.

    Its longest match is as long as the trie's: a path less the token that continues it.
    """
    most = context.config.ngram().max_trie_depth - 1
    return SuffixDrafter(context.slots, context.length, most, context.device)
