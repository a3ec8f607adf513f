"""Keeps a host drafter in step with the slots, and makes the drafts of late-bound steps."""

from typing import Protocol, final

import numpy as np

from .config import CoreConfig
from .controller import BoundDrafts
from .counters import Counters
from .host_drafter import HostDrafter
from .ids import F32, I32, RowKind, i32, u8
from .plan import HostDrafts, StepPlan, StepResult
from .running_batch import RunningBatch
from .scheduler import Committed
from .step_builder import Flight
from .step_planner import StepPolicy


class DraftPolicy(StepPolicy, Protocol):
    """What late-bound steps ask of the length controller (see :mod:`controller`)."""

    def start(self, slot: int) -> None:
        """A new request enters the slot."""
        ...

    def offer(
        self, slots: I32, counts: I32, match_lens: I32, tokens: I32, parents: I32, weights: F32
    ) -> None:
        """Take the trees that continue the slots' committed text."""
        ...

    def bind(self, slots: I32, caps: I32, batch_tokens: int, verify_rows: int) -> BoundDrafts:
        """Choose the nodes that a late-bound step verifies."""
        ...

    def learn(self, slots: I32, lens: I32, tokens: I32) -> None:
        """Compare offered trees with what rows emitted."""
        ...

    def observe(self, result: StepResult, decode_only: bool) -> None:
        """Learn times from a result, of verify rows alone or not."""
        ...


@final
class LateDrafts:
    """One host drafter and the length policy that chooses among its trees.

    Text reaches the drafter once: at ``plan_made`` what a request brings into its slot, at
    ``committed`` what it keeps of a step, the last tokens of a finished one too.
    """

    def __init__(
        self,
        drafter: HostDrafter,
        policy: DraftPolicy,
        batch: RunningBatch,
        counters: Counters,
        config: CoreConfig,
    ) -> None:
        self._drafter = drafter
        self._policy = policy
        self._batch = batch
        self._counters = counters
        self._vocab_size = config.worker.vocab_size
        self._width = config.draft_width

    @property
    def nodes(self) -> int:
        """Nodes of the drafter's trie."""
        return self._drafter.node_count

    def plan_made(self, plan: StepPlan) -> None:
        """Open the slots that the plan fills."""
        self._close_freed()
        for init in plan.inits:
            owner = self._batch.by_slot[init.slot]
            assert owner is not None, "a slot was freed while its first plan was made"
            request = owner.request
            returns = request.progress.retractions > 0
            self._drafter.open(init.slot, request.salt, request.tokens(), learn=not returns)
            self._policy.start(init.slot)

    def committed(self, result: StepResult, committed: Committed) -> None:
        """Take a step's tokens."""
        slots, counts = i32(committed.slots), i32(committed.counts)
        tokens = i32(committed.tokens)
        self._policy.learn(slots, counts, tokens)
        verifies = u8(committed.plan.kinds) == RowKind.VERIFY
        self._policy.observe(result, bool(verifies.all()))
        if len(slots):
            cu = np.zeros(len(slots) + 1, dtype=np.int32)
            np.cumsum(counts, out=cu[1:])
            self._drafter.extend(slots, cu, tokens)
        self._close_freed()

    def bind(self, flight: Flight) -> HostDrafts:
        """Drafts for a late-bound step, from the text that its predecessor's result completed."""
        caps = np.zeros(len(flight.slots), dtype=np.int32)
        rows = flight.verify_rows
        caps[:rows] = self._batch.table.bind_room(flight.slots[:rows], flight.q_caps[:rows])
        self._offer(flight.slots, caps)
        bound = self._policy.bind(flight.slots, caps, flight.base_tokens, rows)
        np.copyto(flight.reasons, bound.reasons, where=bound.reasons != 0)
        return self._checked(flight.plan.step, bound)

    def shadow(self, flight: Flight) -> None:
        """Offer trees for a step that runs without, to learn what they would have been worth."""
        slots = flight.slots[: flight.verify_rows]
        widths = np.full(len(slots), self._width, dtype=np.int32)
        self._offer(slots, self._batch.table.bind_room(slots, widths))

    def flush(self) -> None:
        """Forget all that was learned."""
        self._drafter.flush()

    def _offer(self, slots: I32, caps: I32) -> None:
        wanted = np.flatnonzero(caps)
        if not len(wanted):
            return
        slots = slots[wanted]
        trees = self._drafter.propose(slots, caps[wanted])
        self._policy.offer(
            slots, trees.counts, trees.match_len, trees.tokens, trees.parents, trees.weights
        )

    def _checked(self, step: int, bound: BoundDrafts) -> HostDrafts:
        """Cut the drafts of rows that propose a token which the vocabulary lacks."""
        counts, tokens, parents = bound.counts, bound.tokens, bound.parents
        wrong = (tokens < 0) | (tokens >= self._vocab_size)
        if wrong.any():
            row_of_token = np.repeat(np.arange(len(counts)), counts)
            bad = np.unique(row_of_token[wrong])
            keep = ~np.isin(row_of_token, bad)
            self._counters.draft_invalid += int((~keep).sum())
            counts = counts.copy()
            counts[bad] = 0
            tokens, parents = tokens[keep], parents[keep]
        room = b"" if bound.device_caps is None else bound.device_caps.tobytes()
        return HostDrafts(step, counts.tobytes(), tokens.tobytes(), parents.tobytes(), room)

    def _close_freed(self) -> None:
        for slot in self._batch.freed_slots:
            self._drafter.close(slot)
        self._batch.freed_slots.clear()
