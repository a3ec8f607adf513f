"""The worker of a model over several ranks, as the core drives it."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from ...engine_core.config import CoreConfig
from ...engine_core.plan import HostDrafts, StepPlan, StepResult
from ...engine_core.worker import WorkerFailed, WorkerInfo
from ..worker import DeviceCounts, EngineWorker, GraphWorker
from .bounded import bounded
from .group import Group
from .messages import Collect, Measure, Prepare, Replay, Reset, ToRank, VerifyWidth
from .patience import Vigil, rank_timeout_s
from .ranks import Ranks

_STOP_S = 5.0
_ANSWER_S = 1.0  # for a sign of life, when something is wrong or over
# From a rank's end to the end of this process, if what it does by then has not broken off.
_GRACE_S = 1.0
_EXPLAIN_S = 0.5  # a collective may break off before the exit status that explains it is known


class ParallelWorker:
    """Tells every rank what the core asks of rank 0's worker, in the same order.

    Ranks run the same steps on their shares and take rank 0's decisions over; what they are told
    to collect nobody reads. A rank that ends early fails this worker at once, whatever it is at.
    One that gives no sign of life (when a call takes long or fails, and at the shutdown) is killed,
    which is an early end too.
    """

    def __init__(self, inner: EngineWorker, ranks: Ranks, group: Group) -> None:
        self._inner = inner
        self._ranks = ranks
        self._group = group
        self._vigil = Vigil(rank_timeout_s(), ranks.find_hung)
        self._broken = False
        self._closed = False
        self._wake: Callable[[], None] | None = None
        ranks.on_lost(self._lose)

    def info(self) -> WorkerInfo:
        """Sizes that the core plans with; bytes are those of rank 0, which holds the most."""
        return self._inner.info()

    def prepare(self, config: CoreConfig) -> None:
        """Get ready on every rank."""
        with self._everywhere(Prepare(config)):
            self._inner.prepare(config)

    def fail(self, reason: str) -> None:
        """Make ``collect`` raise."""
        self._inner.fail(reason)

    def watch(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when a rank ends early, also if one has already."""
        self._wake = wake
        if self._ranks.lost() is not None:
            wake()

    def check(self) -> None:
        """Raise WorkerFailed if a rank has ended early."""
        lost = self._ranks.explain()
        if lost is not None and not self._closed:
            self._broken = True
            raise WorkerFailed(f"the worker failed:\n{lost}")

    def measure(self, batch_tokens: Sequence[int]) -> list[float]:
        """T(batch tokens) on rank 0, which every rank takes part in."""
        with self._everywhere(Measure(tuple(batch_tokens))):
            return self._inner.measure(batch_tokens)

    def measure_drafting(self, rows: Sequence[int]) -> list[float]:
        """Seconds of drafting on rank 0, in which every rank takes part."""
        with self._everywhere(Measure(tuple(rows), drafting=True)):
            return self._inner.measure_drafting(rows)

    def launch(self, plan: StepPlan) -> None:
        """Queue a step on every rank."""
        with self._everywhere(plan):
            self._inner.launch(plan)

    def upload_drafts(self, drafts: HostDrafts) -> None:
        """Give every rank the drafts of the oldest late-bound step that lacks them."""
        with self._everywhere(drafts):
            self._inner.upload_drafts(drafts)

    def collect(self) -> StepResult:
        """Wait for the oldest launched step. Raises WorkerFailed."""
        with self._everywhere(Collect()):
            return self._inner.collect()

    def reset(self) -> None:
        """Forget every slot on every rank."""
        with self._everywhere(Reset()):
            self._inner.reset()

    def shutdown(self) -> None:
        """Stop every rank after the steps already launched; idempotent. Never hangs."""
        if self._closed:
            return
        self._closed = True
        self._vigil.close()
        if self._broken or self._hung() is not None:
            self._ranks.end(0.0)
            bounded(self._group.abort, _GRACE_S)
            bounded(self._inner.shutdown, _GRACE_S)
        else:
            self._ranks.stop()
            bounded(self._inner.shutdown, _STOP_S)
        self._group.leave()
        for name in self._ranks.end(_STOP_S):
            print(f"outrider: {name} did not end within {_STOP_S:g} s", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _everywhere(self, message: ToRank) -> Iterator[None]:
        """Rank 0's part of what all ranks are told to do; its error names a rank that was lost."""
        self._ranks.send(message)
        began = time.monotonic()
        self._vigil.begin()
        try:
            yield
        except RuntimeError as error:
            self._broken = True
            seconds = time.monotonic() - began
            lost = self._ranks.explain(_EXPLAIN_S) or self._ranks.find_hung(_ANSWER_S)
            # A step on a GPU has a time limit of its own, which no collective tells of.
            waited = isinstance(message, Collect) and seconds > rank_timeout_s()
            if lost is None and (waited or self._group.late):
                lost = (
                    f"the ranks did not end a step together in {seconds:.0f} s, "
                    f"though all give signs of life: {self._ranks.names()}"
                )
            if lost is None:
                raise
            # Clients are told the last line.
            raise WorkerFailed(f"{error}\n{lost}") from error
        finally:
            self._vigil.done()

    def _hung(self) -> str | None:
        """Whom the shutdown need not wait for; nobody asks later, so it is said here."""
        known = self._ranks.lost()
        hung = known or self._ranks.find_hung(_ANSWER_S)
        if known is None and hung is not None:
            print(f"outrider: {hung}", file=sys.stderr, flush=True)
        return hung

    def _lose(self, reason: str) -> None:
        """A rank is gone (called from a thread that watches it)."""
        self._inner.fail(reason)
        if self._wake is not None:
            self._wake()
        giving_up = threading.Timer(_GRACE_S, self._give_up, (reason,))
        giving_up.daemon = True
        giving_up.start()
        self._group.abort()

    def _give_up(self, reason: str) -> None:
        """End the process if it still waits for the rank: who is open gets an error this way."""
        if self._vigil.calling and not self._broken:
            print(f"outrider: {reason}", file=sys.stderr, flush=True)
            bounded(lambda: self._ranks.end(0.0), _GRACE_S)  # and their folder goes
            os._exit(1)


class ParallelGraphWorker(ParallelWorker):
    """One whose ranks replay CUDA graphs; counts are those of rank 0."""

    @property
    def counts(self) -> DeviceCounts:
        """What rank 0 ran so far."""
        return self._graphs.counts

    def set_verify_width(self, width: int) -> None:
        """Verify rows have up to ``width`` query tokens from now on; only while idle."""
        with self._everywhere(VerifyWidth(width)):
            self._graphs.set_verify_width(width)

    def replay_seconds(self, rows: int, tokens: int, steps: int) -> float | None:
        """Seconds a replay of the graph that the latest step of this size ran, on all ranks."""
        with self._everywhere(Replay(rows, tokens, steps)):
            return self._graphs.replay_seconds(rows, tokens, steps)

    @property
    def _graphs(self) -> GraphWorker:
        assert isinstance(self._inner, GraphWorker)
        return self._inner
