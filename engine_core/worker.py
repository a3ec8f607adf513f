"""The contract between the core and whatever runs the steps."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from .plan import HostDrafts, StepPlan, StepResult


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a ready worker tells the core (bytes are bytes, times are seconds).

    ``draft_survival``: whether its draft model, if it has one, gives confidence in this run.
    """

    vocab_size: int
    context_length: int
    num_pages: int
    page_size: int
    max_slots: int
    eos_ids: tuple[int, ...]
    weight_bytes: int
    kv_bytes_per_token: int
    num_threads: int
    device: str
    dtype: str
    draft_survival: bool = True


class WorkerFailed(RuntimeError):
    """The worker died or broke its contract; every open request must fail."""


class Worker(Protocol):
    """Runs steps in launch order. ``launch`` and ``upload_drafts`` return at once."""

    def info(self) -> WorkerInfo:
        """Sizes that the core plans with."""
        ...

    def measure(self, batch_tokens: Sequence[int]) -> list[float]:
        """T(batch tokens): seconds of a verify step of each size (rising), measured while idle.

        With a draft model, of steps that do not draft.
        """
        ...

    def measure_drafting(self, rows: Sequence[int]) -> list[float]:
        """Seconds that a draft model's drafting for so many rows (rising) adds to a step."""
        ...

    def launch(self, plan: StepPlan) -> None:
        """Queue a step; a late-bound one waits for its drafts."""
        ...

    def upload_drafts(self, drafts: HostDrafts) -> None:
        """Give the drafts of the oldest launched late-bound step that lacks them."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest launched step. Raises WorkerFailed."""
        ...

    def reset(self) -> None:
        """Forget every slot (only while idle); KV contents become meaningless."""
        ...

    def shutdown(self) -> None:
        """Stop; idempotent."""
        ...
