"""A draft window's slot map in dicts and sets: what is mapped, who reads it, when it is free."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Request:
    """`tracked`: target page of each page-table column that it reads."""

    low: int
    floor: int
    end: int
    first: int
    last_step: int = 0
    tracked: dict[int, int] = field(default_factory=dict)


@dataclass
class Draft:
    """A draft page with an owner: which offsets are written, and the newest step that read it."""

    page: int
    begin: int
    until: int
    last_step: int = 0


class DraftWindowModel:
    def __init__(
        self, target_pages: int, pool_pages: int, page_size: int, window: int, max_slots: int
    ) -> None:
        self.target_pages, self.max_slots = target_pages, max_slots
        self.pool_pages, self.size, self.window = pool_pages, page_size, window
        self.step = self.done = 0
        self.high_water = self.failures = self.found = self.missing = 0
        self._clear()

    def _clear(self) -> None:
        self.requests: dict[int, Request] = {}
        self.drafts: dict[int, Draft] = {}  # by target page
        self.free = list(range(self.pool_pages - 1, 0, -1))
        self.deferred: list[Draft] = []

    def readers(self, page: int) -> set[int]:
        return {slot for slot, r in self.requests.items() if page in r.tracked.values()}

    def table(self) -> list[int]:
        pages = range(self.target_pages + 1)
        return [self.drafts[page].page if page in self.drafts else 0 for page in pages]

    def stats(self) -> tuple[int, ...]:
        return (
            len(self.drafts), len(self.deferred), len(self.free), self.high_water, self.failures,
            self.found, self.missing,
        )  # fmt: skip

    def state(self, slot: int) -> tuple[int, int, int, list[int]]:
        request = self._open(slot)
        pages = [page for _, page in sorted(request.tracked.items())]
        return request.low, request.floor, request.end, pages

    def _open(self, slot: int) -> Request:
        if slot not in self.requests:
            raise ValueError(f"slot {slot}")
        return self.requests[slot]

    def window_start(self, length: int) -> int:
        return max(0, length - self.window) // self.size * self.size

    def begin_step(self, step: int) -> None:
        if step <= self.step:
            raise ValueError("step")
        self.step = step

    def end_step(self, step: int) -> None:
        if step <= self.done or step > self.step:
            raise ValueError("step")
        self.done = step
        waiting, self.deferred = self.deferred, []
        for draft in waiting:
            self._give(draft)

    def _give(self, draft: Draft) -> None:
        if draft.last_step <= self.done:
            self.free.append(draft.page)
        else:
            self.deferred.append(draft)

    def rows_from(self, position: int, pages: Sequence[int]) -> int:
        """The lowest of the positions below `position` whose rows are there without a gap."""
        low = position
        for at in range(position - 1, self.window_start(position) - 1, -1):
            draft = self.drafts.get(pages[at // self.size])
            if draft is None or not draft.begin <= at % self.size < draft.until:
                break
            low = at
        return low

    def attach(self, slot: int, position: int, pages: Sequence[int]) -> int:
        if slot in self.requests or position > len(pages) * self.size:
            raise ValueError("attach")
        low = self.rows_from(position, pages)
        first = low // self.size
        request = Request(low, self.window_start(position), position, first)
        request.tracked = {at // self.size: pages[at // self.size] for at in range(low, position)}
        self.requests[slot] = request
        wanted = max(0, position - self.window)
        there = sum(at >= low for at in range(wanted, position))
        self.found += there
        self.missing += position - wanted - there
        return low

    def ensure(self, slot: int, start: int, end: int, pages: Sequence[int]) -> int:
        request, size = self._open(slot), self.size
        touched = sorted({at // size for at in range(max(start, request.floor), end)})
        if not 0 <= start <= end or end > len(pages) * size:
            raise ValueError("start or end")
        if touched and max(start, request.floor) < request.first * size:
            raise ValueError("start")
        if any(request.tracked.get(c, pages[c]) != pages[c] for c in touched):
            raise ValueError("pages")
        failed = 0
        if start > request.end:
            request.low = max(request.low, start)
        begin = max(start, request.floor)
        if touched:
            past = max(request.tracked, default=request.first - 1)
            if touched[0] > past + 1:
                self._drop_below(request, touched[0])
            request.tracked |= {
                c: pages[c] for c in range(request.first, touched[-1] + 1) if c > past
            }
        for column in reversed(touched):
            offsets = [at % size for at in range(begin, end) if at // size == column]
            low = self._write(request, column, min(offsets), max(offsets) + 1, start)
            failed += low is None
            end_here = column * size + max(offsets) + 1
            request.low = max(request.low, end_here if low is None else low)
        if touched:
            self._drop_below(request, min(touched[0], request.low // size))
        request.end = max(request.end, end)
        request.last_step = self.step
        return failed

    def _write(
        self, request: Request, column: int, begin: int, until: int, length: int
    ) -> int | None:
        """From which position on its rows may be read, None without a page."""
        target, first = request.tracked[column], column * self.size
        if target not in self.drafts:
            written = min(max(request.low - first, begin), self.size)
            if not self.free:
                self._slide(request, length)
            if not self.free:
                self.failures += 1
                return None
            self.drafts[target] = Draft(self.free.pop(), written, written)
            taken = len(self.drafts) + len(self.deferred)
            self.high_water = max(self.high_water, taken)
        draft = self.drafts[target]
        if begin > draft.until:
            if len(self.readers(target)) > 1:
                return first + self.size
            draft.begin = begin
        draft.until = max(draft.until, until)
        return first + draft.begin if draft.begin else 0

    def _stop(self, request: Request, columns: Sequence[int]) -> None:
        for column in columns:
            target = request.tracked.pop(column)
            if target in self.drafts:
                draft = self.drafts[target]
                draft.last_step = max(draft.last_step, request.last_step)
                if not self.readers(target):
                    self._give(self.drafts.pop(target))

    def _drop_below(self, request: Request, column: int) -> None:
        self._stop(request, [c for c in sorted(request.tracked) if c < column])
        request.first = max(request.first, column)

    def _slide(self, request: Request, length: int) -> None:
        start = self.window_start(length)
        request.low, request.floor = max(request.low, start), max(request.floor, start)
        self._drop_below(request, request.floor // self.size)

    def slide(self, slot: int, length: int) -> None:
        self._slide(self._open(slot), length)

    def release(self, slot: int) -> int:
        before = len(self.drafts)
        if slot in self.requests:
            request = self.requests[slot]
            self._stop(request, sorted(request.tracked))
            del self.requests[slot]
        return before - len(self.drafts)

    def on_target_free(self, pages: Sequence[int]) -> int:
        before = len(self.drafts)
        for _, request in sorted(self.requests.items()):
            gone = [c for c, page in request.tracked.items() if page in pages]
            if gone:
                self._stop(request, [c for c in sorted(request.tracked) if c >= min(gone)])
                request.end = min(request.end, min(gone) * self.size)
        return before - len(self.drafts)

    def reset(self) -> None:
        if self.done < self.step:
            raise RuntimeError("in flight")
        self._clear()
