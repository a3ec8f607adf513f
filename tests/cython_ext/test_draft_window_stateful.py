"""DraftWindowSlotMap against its plain model, and against a device that remembers who wrote what.

The device runs a step when it is launched and what the step read must still be there when it ends,
whatever steps launched in between wrote.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from outrider.cython_ext.draft_window import DraftWindowSlotMap
from outrider.engine_core.draft_window import draft_pool_pages

from ..reference.draft_window_ref import DraftWindowModel
from ..reference.window_view_ref import window_view
from ..stateful import run_until_reached

REACHED: Counter[str] = Counter()
SLOTS, TARGET_PAGES = 3, 48
Tag = tuple[int, int, int]  # target page, how often it was handed out, offset


def int32(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


@dataclass(eq=False)
class Request:
    """`length` is the device's, `known` what the host has heard; both are of committed tokens."""

    slot: int
    row: list[int]
    cached: int
    prompt: int
    length: int
    known: int
    flawless: bool  # its window was there from the start, and nothing has failed
    aborted: bool = False  # released while a step had a row of it


@dataclass
class Flight:
    step: int
    reads: dict[int, Tag] = field(default_factory=dict)
    pages: set[int] = field(default_factory=set)  # draft pages
    lengths: dict[Request, int] = field(default_factory=dict)


class WindowMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4]),
        window=st.integers(1, 9),
        width=st.integers(1, 4),
        overlap=st.sampled_from([True, False]),
        pool=st.sampled_from([None, 3, 4, 5, 6, 8, 9, 12]),
        seed=st.integers(0, 1 << 32),
    )
    def start(
        self, page_size: int, window: int, width: int, overlap: bool, pool: int | None, seed: int
    ) -> None:
        self.size, self.window, self.overlap = page_size, window, overlap
        self.width = min(width, window)
        self.roomy = pool is None
        pages = pool or draft_pool_pages(SLOTS, window, page_size, self.width, overlap)
        shape = (TARGET_PAGES, pages, page_size, window, SLOTS)
        self.real, self.model = DraftWindowSlotMap(*shape), DraftWindowModel(*shape)
        self.told = np.zeros(TARGET_PAGES + 1, np.int32)  # as a device knows the table
        self.free = list(range(1, TARGET_PAGES + 1))
        self.holders: Counter[int] = Counter()
        self.handed_out: Counter[int] = Counter()
        self.cached: list[list[int]] = []
        self.requests: list[Request] = []
        self.leases: list[Request] = []  # gone from the map, their target pages still read
        self.flights: list[Flight] = []
        self.memory: dict[int, Tag] = {}
        self.step_number = 0
        self.used_slots: set[int] = set()
        self.was_deferred: set[int] = set()
        self.burst(seed)

    # The target's side.

    def take(self, count: int) -> list[int] | None:
        while count > len(self.free) and self.cached:
            self.evict(0)
        if count > len(self.free):
            return None
        pages = [self.free.pop(0) for _ in range(count)]
        self.holders.update(pages)
        self.handed_out.update(pages)
        return pages

    def give(self, pages: list[int], tell: bool = True) -> None:
        self.holders.subtract(pages)
        gone = [page for page in pages if not self.holders[page]]
        if tell:
            self.on_target_free(gone)
        self.free += gone

    def on_target_free(self, pages: list[int]) -> None:
        slid_out = [page for page in pages if not self.model.readers(page)]
        REACHED["free_without_draft_page"] += bool(slid_out)
        assert self.real.on_target_free(int32(pages)) == self.model.on_target_free(pages)
        assert self.real.on_target_free(int32(pages)) == 0

    def cover(self, request: Request, end: int) -> bool:
        lacking = -(-end // self.size) - len(request.row)
        pages = self.take(lacking) if lacking > 0 else []
        request.row += pages or []
        assert len({*request.row}) == len(request.row)
        return pages is not None

    def tag(self, request: Request, position: int) -> Tag:
        page = request.row[position // self.size]
        return page, self.handed_out[page], position % self.size

    # Rules.

    @rule(seed=st.integers(0, 1 << 32))
    def attach(self, seed: int) -> None:
        self.enter(random.Random(seed), [*self.running(), *self.cached, []])

    @rule(seed=st.integers(0, 1 << 32))
    def fork(self, seed: int) -> None:
        """Another request begins with a running one's tokens; soon one of the two ends."""
        running = [row for row in self.running() if row]
        if running:
            self.enter(random.Random(seed), running)
            self.step(seed)
            while self.flights and seed % 2:
                self.end()
            self.finish(2 * seed + 1, abort=False, tail=False)

    @rule(seed=st.integers(0, 1 << 32))
    def compute_again(self, seed: int) -> None:
        """A prefix's window is computed again, bit by bit; another request has the same prefix."""
        rng = random.Random(seed)
        while self.flights:
            self.end()
        while len(self.requests) > SLOTS - 2:
            self.finish(seed, abort=False, tail=False)
        chains = [chain for chain in [*self.cached, *self.running()] if chain]
        if chains:
            chain = rng.choice(chains)
            self.holders.update(chain)  # it is not to be evicted between the two
            self.enter(rng, [chain], again=True)
            self.step(seed)
            self.enter(rng, [chain], again=False)
            self.give(chain)

    def running(self) -> list[list[int]]:
        """Whole pages of target KV by request; draft rows may still be computed again for some."""
        return [r.row[: max(r.cached, r.known) // self.size] for r in self.requests]

    def enter(self, rng: random.Random, chains: list[list[int]], again: bool | None = None) -> None:
        """A request whose prompt begins with a part of one of these pages' tokens."""
        draining = [request for request in self.leases if not request.aborted]
        slots = set(range(SLOTS)) - {request.slot for request in self.requests + draining}
        if not slots:
            return
        slot = rng.choice(sorted(slots & {r.slot for r in self.leases} or slots))
        chain = rng.choice(chains)
        shared = chain[: len(chain) - rng.choice([0, 0, 1, 2])] if len(chain) > 2 else chain
        self.holders.update(shared)
        cached = len(shared) * self.size
        prompt = cached + rng.choice([1, 2, rng.randrange(1, 14)])
        fresh = self.take(-(-prompt // self.size) - len(shared))
        if fresh is None:
            self.give(shared)
            return
        row = shared + fresh
        position = cached
        if again or (again is None and rng.random() < 0.3):
            position = max(0, cached - self.window)
            REACHED["recompute"] += position < cached
        low = self.real.rows_from(position, int32(row))
        assert low == self.real.attach(slot, position, int32(row))
        assert low == self.model.attach(slot, position, row)
        wanted = max(0, position - self.window)
        REACHED["prefix_with_rows"] += low < position
        last = self.model.drafts.get(row[(low - 1) // self.size]) if low else None
        reaches = min(self.size, position - (low - 1) // self.size * self.size)
        REACHED["page_still_to_fill"] += last is not None and last.begin < last.until < reaches
        REACHED["prefix_without_rows"] += low == position > 0
        REACHED["prefix_with_some_rows"] += wanted < low < position
        REACHED["slot_reuse"] += slot in self.used_slots
        REACHED["slot_reuse_in_flight"] += any(slot == r.slot for r in self.leases)
        self.used_slots.add(slot)
        flawless = low <= self.model.window_start(position)
        self.requests.append(Request(slot, row, cached, prompt, position, position, flawless))
        self.slide(slot, prompt)

    def slide(self, slot: int, length: int) -> None:
        self.real.slide(slot, length)
        self.model.slide(slot, length)

    @rule(seed=st.integers(0, 1 << 32))
    def step(self, seed: int) -> None:
        rng = random.Random(seed)
        while len(self.flights) > self.overlap:
            self.end()
        self.step_number += rng.choice([1, 1, 3])
        self.real.begin_step(self.step_number)
        self.model.begin_step(self.step_number)
        flight = Flight(self.step_number)
        for request in rng.sample(self.requests, len(self.requests)):
            if rng.random() < 0.85:
                self.row(request, flight, rng)
        self.flights.append(flight)
        if not self.overlap:
            self.end()

    def row(self, request: Request, flight: Flight, rng: random.Random) -> None:
        prefill = request.length < request.prompt
        if prefill:
            start = request.length
            end = rng.choice([start + 1, rng.randrange(start + 1, request.prompt + 1)])
        else:
            start = request.known
            ahead = sum(request in f.lengths for f in self.flights)
            end = start + (ahead + 1) * self.width
            if not self.cover(request, end):
                return
            if self.roomy or rng.random() < 0.5:
                self.slide(request.slot, start)
        self.ensure(request, start, end)
        begin = max(start, self.real.state(request.slot).floor)
        if not prefill:
            self.read(request, flight)
            begin, end = request.length, request.length + self.width
        for position, slot in self.slots(request, begin, end).items():
            self.memory[slot] = self.tag(request, position)
            flight.pages |= {slot // self.size} - {0}
        if prefill:
            request.length = request.known = end
        else:
            request.length += rng.randrange(1, self.width + 1)
        flight.lengths[request] = request.length

    def ensure(self, request: Request, start: int, end: int) -> None:
        before, table = self.real.stats(), self.real.table.copy()
        failed = self.real.ensure(request.slot, start, end, int32(request.row))
        assert failed == self.model.ensure(request.slot, start, end, request.row)
        after = self.real.stats()
        assert after.alloc_failures == before.alloc_failures + failed
        taken = set(self.real.table[(table == 0) & (self.real.table > 0)].tolist())
        reading = set().union(*(flight.pages for flight in self.flights))
        assert not taken & reading, "a page was taken that a step in flight reads or writes"
        REACHED["deferred_page_taken"] += bool(taken & self.was_deferred)
        REACHED["rescued_by_sliding"] += before.free_pages == 0 < len(taken)
        REACHED["exhausted"] += failed > 0
        REACHED["recovered"] += bool(taken) and not request.flawless
        # Of a page that another began in the middle, what lies before is never believed.
        begun = [page for page in self.shared_pages(request) if page in self.model.drafts]
        REACHED["begun_by_another"] += any(self.model.drafts[page].begin for page in begun)
        request.flawless &= not failed
        request.flawless &= not any(self.model.drafts[page].begin for page in begun)
        assert not (failed and self.roomy), "the sizing rule's pool was too small"

    def slots(self, request: Request, start: int, end: int) -> dict[int, int]:
        """Draft slot of each position, without those in the sink."""
        positions = range(start, end)
        table, known = self.real.table, self.model.table()
        found = {}
        for p in positions:
            target = request.row[p // self.size]
            assert table[target] == known[target]
            if table[target]:
                found[p] = int(table[target]) * self.size + p % self.size
        return found

    def read(self, request: Request, flight: Flight) -> None:
        """What the drafter reads at the device's length: rows of this very sequence, and no gap."""
        slots = int32([request.slot])
        view = window_view(
            int32(request.row)[None], int32([request.length]), self.real.lows(slots),
            self.real.table, window=self.window, page_size=self.size, width=self.width,
        )  # fmt: skip
        start, count, masked = view.starts[0], view.context_lens[0], view.masked[0]
        assert start + count == request.length
        assert start % self.size == 0
        for index in range(masked, count):
            page = int(view.pages[0, index // self.size])
            assert page, "a committed row of the view is in the sink"
            slot = page * self.size + index % self.size
            assert self.memory[slot] == self.tag(request, start + index)
            flight.reads[slot] = self.memory[slot]
            flight.pages.add(page)
        full = start == max(0, request.length - self.window) // self.size * self.size
        assert full or not request.flawless, "the view is shorter than what is there"
        REACHED["full_window"] += bool(full and count >= self.window)
        REACHED["masked"] += bool(masked)
        REACHED["short_window"] += not full

    @rule()
    def end(self) -> None:
        if not self.flights:
            return
        flight = self.flights.pop(0)
        for slot, tag in flight.reads.items():
            assert self.memory[slot] == tag, "overwritten while a step could read it"
        self.was_deferred |= {draft.page for draft in self.model.deferred}
        self.real.end_step(flight.step)
        self.model.end_step(flight.step)
        for request, length in flight.lengths.items():
            request.known = max(request.known, length)
        for request in [*self.leases]:
            if not any(request in f.lengths for f in self.flights):
                self.leases.remove(request)
                if not request.aborted:
                    self.release(request)
                self.give(request.row)

    @rule(at=st.integers(0, 1000), abort=st.booleans(), tail=st.booleans())
    def finish(self, at: int, abort: bool, tail: bool) -> None:
        """Release at once, or, as a lease does, when the last step that has a row is in."""
        if not self.requests:
            return
        shared = [r for r in self.requests if self.shared_pages(r)]
        among = shared if shared and at % 2 else self.requests
        request = among[at % len(among)]
        in_flight = any(request in f.lengths for f in self.flights)
        if not in_flight and tail:
            self.free_tail(request)
        if not in_flight and at % 3 == 0 and request.length >= self.size:
            whole = request.row[: request.length // self.size]
            self.cached.append(whole)
            self.holders.update(whole)
        self.requests.remove(request)
        if in_flight:
            request.aborted = abort and not self.roomy
            if request.aborted:
                self.release(request)
            self.leases.append(request)
            self.attach(at)
        elif at % 4 < 2:
            self.release(request)
            self.give(request.row)
        else:
            self.give(request.row)
            self.release(request)

    def shared_pages(self, request: Request) -> list[int]:
        tracked = self.model.requests[request.slot].tracked.values()
        return [page for page in tracked if len(self.model.readers(page)) > 1]

    @rule(seed=st.integers(0, 1 << 32))
    def abort(self, seed: int) -> None:
        """A request leaves while its newest step is in flight, and another takes the slot."""
        if self.requests:
            self.step(seed)
        if self.requests:
            self.finish(seed, abort=True, tail=False)

    def release(self, request: Request) -> None:
        shared = self.shared_pages(request)
        mine = [page for page in self.model.drafts if self.model.readers(page) == {request.slot}]
        before, deferred = self.real.stats().live_pages, self.real.stats().deferred_pages
        freed = self.real.release(request.slot)
        assert freed == self.model.release(request.slot) == len(mine)
        assert self.real.stats().live_pages == before - freed
        assert self.real.release(request.slot) == self.model.release(request.slot) == 0
        REACHED["double_release"] += 1
        REACHED["release_leaves_shared"] += bool(shared)
        REACHED["release_deferred"] += self.real.stats().deferred_pages > deferred

    @rule(at=st.integers(0, 1000))
    def cut_tail(self, at: int) -> None:
        """Give back what speculation reserved; the request goes on and gets other pages."""
        if self.requests:
            self.step(at)
            while self.flights:
                self.end()
            mid_page = [r for r in self.requests if r.prompt < r.length and r.length % self.size]
            self.free_tail(random.Random(at).choice(mid_page or self.requests))

    def free_tail(self, request: Request) -> None:
        keep = -(-max(request.length, request.prompt) // self.size)
        tail = request.row[keep:]
        if tail:
            mapped = any(page in self.model.drafts for page in tail)
            REACHED["tail_free"] += mapped
            REACHED["tail_free_mid_page"] += mapped and request.length % self.size > 0
            request.row = request.row[:keep]
            self.give(tail)

    @rule(at=st.integers(0, 1000))
    def evict(self, at: int) -> None:
        if self.cached:
            self.give(self.cached.pop(at % len(self.cached)))

    @rule()
    def reset(self) -> None:
        if self.flights:
            with pytest.raises(RuntimeError, match="in flight"):
                self.real.reset()
            REACHED["reset_refused"] += 1
            return
        REACHED["reset"] += bool(self.requests)
        self.real.reset()
        self.model.reset()
        for request in self.requests:
            self.give(request.row)
        self.requests.clear()

    @rule(seed=st.integers(0, 1 << 32))
    def burst(self, seed: int) -> None:
        """Steps by a plain random generator, which are cheaper than drawn ones."""
        rng = random.Random(seed)
        for _ in range(60):
            at = rng.randrange(1 << 32)
            match rng.randrange(34):
                case 0 | 1 | 2 | 3 | 4 | 5:
                    self.attach(at)
                case 6 | 7:
                    self.finish(at % 1000, rng.random() < 0.8, rng.random() < 0.5)
                case 18:
                    self.abort(at)
                case 20 | 21:
                    self.compute_again(at)
                case 15 | 16 | 17:
                    self.fork(at)
                case 8 | 9 | 14 | 19:
                    self.cut_tail(at % 1000)
                case 10 | 11:
                    self.end()
                case 12:
                    self.evict(at % 1000)
                case 13 if rng.random() < 0.5:
                    self.reset()
                case _:
                    self.step(at)
            self.same()

    @invariant()
    def same(self) -> None:
        self.real.check()
        assert self.real.table.tolist() == self.model.table()
        pages, drafts = self.real.take_changes()
        assert len(set(pages.tolist())) == len(pages)
        self.told[pages] = drafts
        assert self.told.tolist() == self.real.table.tolist()
        stats = self.real.stats()
        assert tuple(stats) == self.model.stats()
        taken = stats.live_pages + stats.deferred_pages
        assert taken + stats.free_pages == self.real.pool_pages - 1
        for slot in self.model.requests:
            low, floor, end, pages = self.real.state(slot)
            assert (low, floor, end, pages.tolist()) == self.model.state(slot)
        readers = [len(self.model.readers(page)) for page in self.model.drafts]
        REACHED["shared"] += any(count > 1 for count in readers)
        REACHED["deferred"] += bool(self.model.deferred)


WANTED = [
    "free_without_draft_page", "recompute", "prefix_with_rows", "prefix_without_rows",
    "prefix_with_some_rows", "page_still_to_fill", "slot_reuse", "slot_reuse_in_flight",
    "deferred_page_taken", "rescued_by_sliding", "begun_by_another", "exhausted", "recovered",
    "full_window", "masked", "short_window", "double_release", "release_leaves_shared",
    "release_deferred", "tail_free", "tail_free_mid_page", "reset", "reset_refused", "shared",
    "deferred",
]  # fmt: skip


def test_against_model_and_device() -> None:
    REACHED.clear()
    run_until_reached(WindowMachine, REACHED, WANTED, examples=80, steps=12)
