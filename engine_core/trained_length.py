"""How far back a block draft looks, beside the length of the texts that it was trained on."""

from typing import NamedTuple

from .draft_config import DraftConfig

_WINDOW = "speculative_draft_window_size"


class TrainedLength(NamedTuple):
    """``trained``: tokens of training's texts; ``reach``: most tokens that the draft sees."""

    trained: int
    reach: int

    @property
    def found(self) -> str:
        """What this means, in words."""
        if self.reach <= self.trained:
            return f"sees up to {self.reach} tokens, was trained on texts of {self.trained}"
        return (
            f"the draft sees up to {self.reach} tokens, but was trained on texts of "
            f"{self.trained}, and fewer drafts are accepted behind longer ones"
        )

    @property
    def remedy(self) -> str:
        """What to do; empty where all is well."""
        if self.reach <= self.trained:
            return ""
        return (
            f"set --speculative-draft-window-size {self.trained}, or train it at a longer "
            "--sequence-length"
        )

    @property
    def note(self) -> str | None:
        """For whoever starts an engine; None where all is well."""
        return f"{_WINDOW}: {self.found}; {self.remedy}" if self.remedy else None


def trained_length(draft: DraftConfig, context: int, window: int | None) -> TrainedLength | None:
    """Of a block draft that says what it was trained on; None for others.

    ``context``: tokens that are served a request; ``window``: of the draft, if it has one.
    """
    if draft.block is None or draft.trained_length is None:
        return None
    reach = context if window is None else min(context, window)
    sliding = draft.model.sliding_windows
    if all(sliding):
        reach = min(reach, max(sliding))
    return TrainedLength(draft.trained_length, reach)
