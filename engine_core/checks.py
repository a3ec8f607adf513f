"""Every invariant of the core's state as a named checker, run after each step when asked for.

They read only: the radix tree's recency order, say, is the same with and without them.
"""

from collections.abc import Callable

from .request import Draining, Running, Waiting
from .scheduler import Scheduler


class InvariantBroken(AssertionError):
    """The core's state contradicts itself; the message names the checker and what it found."""


def check_all(scheduler: Scheduler) -> None:
    """Run every checker. Raises InvariantBroken."""
    for check in CHECKS:
        try:
            check(scheduler)
        except AssertionError as error:
            raise InvariantBroken(f"{check.__name__}: {error}") from None


def compiled_structures(scheduler: Scheduler) -> None:
    """The allocator and the tree agree with themselves."""
    scheduler.cache.allocator.check()
    scheduler.cache.tree.check()


def page_conservation(scheduler: Scheduler) -> None:
    """Free, cached and private pages are all pages, and none has two owners."""
    cache, table = scheduler.cache, scheduler.batch.table
    owners = {"the tree": cache.tree.pages().tolist()}
    for holder in _holders(scheduler):
        private = holder.lease.private(table.pages(holder.slot))
        owners[f"slot {holder.slot}"] = private.tolist()
    owner: dict[int, str] = {}
    for name, pages in owners.items():
        before = len(owner)
        twice = owner.keys() & pages
        _require(not twice, f"pages {sorted(twice)} are of {name} and of another")
        owner.update(dict.fromkeys(pages, name))
        _require(len(owner) == before + len(pages), f"{name} has a page twice")
    for page in filter(lambda page: not 1 <= page <= cache.total, owner):
        raise AssertionError(f"page {page} of {owner[page]} does not exist")
    for page in filter(cache.allocator.is_free, owner):
        raise AssertionError(f"page {page} of {owner[page]} is free")
    total = len(owner) + cache.allocator.free_pages
    _require(total == cache.total, f"{total} pages are accounted for, of {cache.total}")


def shared_pages_locked(scheduler: Scheduler) -> None:
    """The pages that leases read from the tree are in it, and locked with nothing else."""
    cache, table = scheduler.cache, scheduler.batch.table
    cached = set(cache.tree.pages().tolist())
    shared: set[int] = set()
    duplicates = 0
    for holder in _holders(scheduler):
        pages = table.pages(holder.slot).tolist()
        spans = holder.lease.tree_spans
        for start, end in spans:
            _require(0 <= start <= end <= len(pages), f"slot {holder.slot} shares {start}..{end}")
            shared.update(pages[start:end])
        ends = [end for _, end in spans]
        duplicates += ends[-1] - sum(end - start for start, end in spans)
        duplicates += holder.lease.source != 0
        locks = holder.lease.node != 0
        _require(locks == (ends[-1] > 0), f"slot {holder.slot} shares pages without a lock")
    _require(shared <= cached, f"pages {sorted(shared - cached)} are shared but not cached")
    locked = cache.tree.locked_pages
    _require(len(shared) <= locked, f"{len(shared)} pages are shared but {locked} locked")
    most = len(shared) + duplicates
    _require(locked <= most, f"{locked} pages are locked, {most} by leases")


def copies_in_flight(scheduler: Scheduler) -> None:
    """A page that a request copies is kept by the tree, for just as long as its step is in flight.

    It goes into the first page of the request's own; others stay as they are.
    """
    cache, batch = scheduler.cache, scheduler.batch
    locked = set(cache.tree.pages(locked=True).tolist())
    planned = {
        init.slot: init.page_copies
        for flight in scheduler.flights
        for init in flight.plan.inits
        if init.page_copies
    }
    for holder in _holders(scheduler):
        slot, source = holder.slot, holder.lease.source
        copies = planned.pop(slot, ())
        _require(bool(copies) == (source != 0), f"slot {slot} copies {copies}, keeps {source}")
        for page, destination in copies:
            _require(page == source, f"slot {slot} copies page {page} and keeps {source}")
            _require(page in locked, f"slot {slot} copies page {page}, which may be evicted")
            shared = holder.lease.tree_spans[0][1]
            row = batch.table.pages(slot).tolist()
            _require(destination == row[shared], f"slot {slot} copies to page {destination}")
            _require(page not in row, f"slot {slot} copies a page that it has already")
    _require(not planned, f"slots {list(planned)} copy pages that nobody keeps")


def leases_open(scheduler: Scheduler) -> None:
    """Whoever holds a slot has not released its lease."""
    for holder in _holders(scheduler):
        _require(not holder.lease.released, f"slot {holder.slot} holds a released lease")


def slots_partition(scheduler: Scheduler) -> None:
    """A slot is free once, or has one owner and an open row in the table."""
    batch = scheduler.batch
    free = set(batch.free_slots)
    _require(len(free) == len(batch.free_slots), "a slot is free twice")
    for slot, owner in enumerate(batch.by_slot):
        _require((slot in free) == (owner is None), f"slot {slot} is both free and owned, or lost")
        _require(batch.table.is_open(slot) == (owner is not None), f"slot {slot} in the table")
        _require(owner is None or owner.slot == slot, f"slot {slot} has the owner of another")


def phases_partition(scheduler: Scheduler) -> None:
    """The lists of prefilling, decoding and draining requests are those in slots, each once."""
    batch = scheduler.batch
    listed: list[Running | Draining] = [*batch.prefilling, *batch.decoding, *batch.draining]
    slots = [entry.slot for entry in listed]
    _require(len(set(slots)) == len(slots), "a slot is in two lists")
    for entry in listed:
        _require(batch.by_slot[entry.slot] is entry, f"slot {entry.slot} has another state")
    _require(len(listed) == len(_holders(scheduler)), "a slot's owner is in no list")
    _require(
        batch.decoding_slots().tolist() == [r.slot for r in batch.decoding], "stale decoding slots"
    )
    limit = scheduler.config.max_running_requests
    _require(len(batch) <= limit, f"{len(batch)} requests run, {limit} may")


def states_registered(scheduler: Scheduler) -> None:
    """Every request that may emit is registered under its id, in the state it is in."""
    states, batch = scheduler.batch.states, scheduler.batch
    waiting = {w.request.rid for w in scheduler.queue}
    for rid, state in states.items():
        if state.request.rid != rid:
            raise AssertionError(f"{rid} names another request")
        if state.request.progress.finish is not None:
            raise AssertionError(f"{rid} is open after its end")
        if isinstance(state, Waiting):
            if rid not in waiting:
                raise AssertionError(f"{rid} waits outside the queue")
        elif batch.by_slot[state.slot] is not state:
            raise AssertionError(f"{rid} is not in its slot")
    _require(waiting <= states.keys(), f"{waiting - states.keys()} wait unregistered")
    for holder in _holders(scheduler):
        request = holder.request
        alive = isinstance(holder, Running) or request.progress.finish is None
        registered = states.get(request.rid) is holder
        _require(registered == alive, f"{request.rid} is registered wrongly")


def queue_order(scheduler: Scheduler) -> None:
    """Inside a priority the queue keeps the order of arrival."""
    by_priority = scheduler.config.engine.enable_priority_scheduling
    keys = [(-w.request.priority if by_priority else 0, w.request.arrival) for w in scheduler.queue]
    _require(keys == sorted(set(keys)), "the queue is out of order")


def table_agrees(scheduler: Scheduler) -> None:
    """The compiled columns agree with the requests they stand for."""
    batch = scheduler.batch
    for holder in _holders(scheduler):
        slot, request = holder.slot, holder.request
        state = batch.table.state(slot)
        length = request.length
        _require(state.length == length, f"slot {slot} counts {state.length} of {length} tokens")
        _require(state.max_total == request.max_total, f"slot {slot} has another cap")
        _require(0 <= state.filled <= state.target <= state.length, f"slot {slot} overfilled")
        if isinstance(holder, Running):
            prefilling = holder in batch.prefilling
            _require(prefilling == (state.filled < state.target), f"slot {slot}: wrong phase")


def lengths_capped(scheduler: Scheduler) -> None:
    """No request has more tokens than it may."""
    for state in [*scheduler.batch.states.values(), *scheduler.batch.draining]:
        request = state.request
        generated = request.generated
        if len(request.prompt) + generated > request.max_total:
            raise AssertionError(f"{request.rid} exceeds its cap")
        if generated > request.params.max_new_tokens:
            raise AssertionError(f"{request.rid}: too many")
        if request.progress.sent > generated:
            raise AssertionError(f"{request.rid} sent too much")


def pages_cover(scheduler: Scheduler) -> None:
    """A slot's pages hold its prompt and the farthest position its row in flight can touch.

    That is its last query token, or where its drafter wrote ahead of it.
    """
    table = scheduler.batch.table
    for holder in _holders(scheduler):
        state = table.state(holder.slot)
        end = max(state.target, state.length - 1 + max(state.emits, state.reach))
        room = state.held * scheduler.cache.page_size
        _require(room >= end, f"slot {holder.slot} has pages for {room} tokens of {end}")


def flights_consistent(scheduler: Scheduler) -> None:
    """Steps in flight are the newest ones; slots know the last one that has a row of theirs."""
    flights, batch = scheduler.flights, scheduler.batch
    steps = [flight.plan.step for flight in flights]
    first = scheduler.done_step + 1
    _require(steps == list(range(first, first + len(steps))), f"steps {steps} are in flight")
    newest: dict[int, int] = {}
    for flight in flights:
        newest.update(dict.fromkeys(flight.slots.tolist(), flight.plan.step))
    for slot, step in newest.items():
        _require(batch.by_slot[slot] is not None, f"slot {slot} was freed with a row in flight")
        _require(batch.table.last_step(slot) == step, f"slot {slot} forgot its row of {step}")
    for holder in _holders(scheduler):
        last = batch.table.last_step(holder.slot)
        emits = batch.table.state(holder.slot).emits
        _require((last >= first) == (holder.slot in newest), f"slot {holder.slot}: lost row")
        _require(emits == 0 or last >= first, f"slot {holder.slot} waits for {emits} tokens")
        if isinstance(holder, Draining):
            _require(first <= holder.step == last, f"slot {holder.slot} drains for {holder.step}")


def draft_windows(scheduler: Scheduler) -> None:
    """Whoever runs, and nobody else, reads draft pages: of pages that are its own or locked."""
    windows, table = scheduler.windows, scheduler.batch.table
    if windows is None:
        return
    windows.map.check()
    for slot, owner in enumerate(scheduler.batch.by_slot):
        runs = isinstance(owner, Running)
        _require(windows.is_open(slot) == runs, f"slot {slot}: a window without a request")
        if runs:
            read, row = windows.map.state(slot).pages.tolist(), table.pages(slot).tolist()
            _require(set(read) <= set(row), f"slot {slot} reads pages of another")
    for page in windows.map.table.nonzero()[0].tolist():
        free = scheduler.cache.allocator.is_free(page)
        _require(not free, f"page {page} is free and has a draft page")


CHECKS: tuple[Callable[[Scheduler], None], ...] = (
    compiled_structures,
    page_conservation,
    shared_pages_locked,
    copies_in_flight,
    leases_open,
    slots_partition,
    phases_partition,
    states_registered,
    queue_order,
    table_agrees,
    lengths_capped,
    pages_cover,
    flights_consistent,
    draft_windows,
)


def _holders(scheduler: Scheduler) -> list[Running | Draining]:
    return [owner for owner in scheduler.batch.by_slot if owner is not None]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
