"""The requests that hold slots, by phase: prefilling, decoding, draining."""

from typing import final

import numpy as np

from ..cython_ext.request_table import RequestTable
from .fast_rows import attach, move_counts
from .ids import I32, RequestId, SlotId
from .lease import Lease
from .prefix_cache import CachedPrefix, PrefixCache
from .request import Draining, Finished, Running, Waiting
from .window_steps import WindowSteps


@final
class RunningBatch:
    """Slots and who is in them. Lists keep the order of admission.

    A slot is free, or holds one ``Running`` (prefilling until its last chunk is planned, then
    decoding) or one ``Draining`` request. ``states`` has every request that may still emit,
    also the waiting ones, by its id. ``freed_slots`` collects slots for whoever keeps state
    beside them and clears it.
    """

    def __init__(
        self,
        cache: PrefixCache,
        max_slots: int,
        draft_reach: int,
        windows: WindowSteps | None = None,
    ) -> None:
        """``draft_reach``: tokens from a verify row's first on that a drafter with KV writes.

        ``windows``: of a draft that has a pool of its own.
        """
        self.cache = cache
        self.windows = windows
        self.table = RequestTable(max_slots, cache.page_size, draft_reach)
        self.by_slot: list[Running | Draining | None] = [None] * max_slots
        self.free_slots = [SlotId(s) for s in reversed(range(max_slots))]
        self.prefilling: list[Running] = []
        self.decoding: list[Running] = []
        self.draining: list[Draining] = []
        self.states: dict[RequestId, Waiting | Running | Draining] = {}
        self.freed_slots: list[SlotId] = []
        self._serial = 0
        self._decoding_slots: I32 | None = None

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def running(self) -> list[Running]:
        """All that may get rows, decoding ones first."""
        return self.decoding + self.prefilling

    def decoding_slots(self) -> I32:
        """Slots of ``decoding``, int32, in its order."""
        if self._decoding_slots is None:
            self._decoding_slots = np.array([r.slot for r in self.decoding], dtype=np.int32)
        return self._decoding_slots

    def enter(self, waiting: Waiting, prefix: CachedPrefix, pages: I32) -> Running:
        """Put a request into a free slot with its cached prefix, locked by the caller, and
        ``pages`` (int32) for the rest of its tokens.
        """
        request = waiting.request
        slot = self.free_slots.pop()
        self._serial += 1
        lease = Lease(self.cache, request.salt, prefix)
        running = waiting.admit(slot, self._serial, lease)
        row = np.concatenate((prefix.pages, pages))
        self.table.open(
            slot,
            request.length,
            request.max_total,
            row,
            prefix.length,
            request.params.ignore_eos,
            request.speculative,
        )
        attach(self.table, slot, request)
        if self.windows is not None:
            self.windows.enter(slot, prefix.length, request.length, row)
        self.by_slot[slot] = running
        self.states[request.rid] = running
        self.prefilling.append(running)
        return running

    def start_decoding(self, running: Running) -> None:
        """The last chunk is planned."""
        self.prefilling.remove(running)
        self.decoding.append(running)
        self._decoding_slots = None

    def leave(self, running: Running) -> None:
        """Give it no more rows, retracted or finished; it drains until its last one is in."""
        if running in self.decoding:
            self.decoding.remove(running)
            self._decoding_slots = None
        else:
            self.prefilling.remove(running)
        draining = running.leave(self.table.last_step(running.slot))
        self.by_slot[running.slot] = draining
        move_counts(self.table, running.slot, running.request)
        self.table.detach(running.slot)
        if self.windows is not None:
            self.windows.leave(running.slot)
        self.draining.append(draining)
        if draining.retracted:
            self.states[running.request.rid] = draining
        else:
            self.finish_draining(draining)

    def finish_draining(self, draining: Draining) -> None:
        """It has a finish reason now: what is in flight of it counts nowhere."""
        del self.states[draining.request.rid]

    def drain(self, done_step: int) -> list[Waiting | Finished]:
        """Free the slots and pages of those whose last step is in."""
        if not self.draining:
            return []
        settled: list[Waiting | Finished] = []
        kept: list[Draining] = []
        for draining in self.draining:
            if draining.step > done_step:
                kept.append(draining)
                continue
            self._release(draining, done_step)
            state = draining.settle()
            if isinstance(state, Waiting):
                self.states[state.request.rid] = state
            settled.append(state)
        self.draining = kept
        return settled

    def pages_to_come(self) -> int:
        """Pages of draining requests, at most what they will give back."""
        return sum(self.table.held(d.slot) for d in self.draining)

    def publish(self, owner: Running | Draining) -> None:
        """Give the whole pages with valid KV to the radix tree."""
        valid = self.table.valid_kv(owner.slot)
        owner.lease.publish(owner.request.tokens()[:valid], self.table.pages(owner.slot))

    def _release(self, draining: Draining, done_step: int) -> None:
        finish = draining.request.progress.finish
        if finish is not None and finish.kind != "abort":
            self.publish(draining)
        slot = draining.slot
        draining.lease.release(self.table.pages(slot), draining.step, done_step)
        self.table.close(slot)
        self.by_slot[slot] = None
        self.free_slots.append(slot)
        self.freed_slots.append(slot)
