"""Orders of the waiting queue."""

import pytest

from outrider.engine_core.commit import Progress
from outrider.engine_core.queue import LPM_MAX_OVERTAKES, LPM_QUEUE_LIMIT, WaitingQueue
from outrider.engine_core.request import Request, Waiting

from .core_fixtures import request


def waiting(arrival: int, priority: int = 0, length: int = 1) -> Waiting:
    message = request(f"r{arrival}", range(length), priority=priority)
    progress = Progress(message.params, length, 100, frozenset(), None)
    return Waiting(Request(message, arrival, 0, 100, progress))


def by_length(entry: Waiting) -> int:
    return len(entry.request.prompt)


def drain(queue: WaitingQueue) -> list[int]:
    order: list[int] = []
    while len(queue):
        entry = queue.next(by_length)
        queue.admitted(entry)
        order.append(entry.request.arrival)
    return order


def test_fcfs_keeps_arrival_order_and_a_retracted_request_returns_to_its_place() -> None:
    queue = WaitingQueue("fcfs", False)
    for arrival in (1, 2, 0):
        queue.push(waiting(arrival, priority=arrival))
    assert len(queue) == 3
    assert queue.last().request.arrival == 2
    assert drain(queue) == [0, 1, 2]


def test_priority_goes_first_and_inside_it_arrival_counts() -> None:
    queue = WaitingQueue("fcfs", True)
    for arrival, priority in enumerate((0, 5, 5, 1, 0)):
        queue.push(waiting(arrival, priority))
    assert queue.last().request.arrival == 4
    assert drain(queue) == [1, 2, 3, 0, 4]


def test_longest_cached_prefix_first_inside_a_priority() -> None:
    queue = WaitingQueue("lpm", True)
    for arrival, (priority, length) in enumerate([(0, 9), (1, 2), (1, 4), (1, 4), (0, 12)]):
        queue.push(waiting(arrival, priority, length))
    assert drain(queue) == [2, 3, 1, 4, 0]


def test_no_request_starves_behind_longer_prefixes() -> None:
    queue = WaitingQueue("lpm", False)
    queue.push(waiting(0, length=1))
    for arrival in range(1, 2 * LPM_MAX_OVERTAKES):
        queue.push(waiting(arrival, length=5))
        entry = queue.next(by_length)
        queue.admitted(entry)
        if entry.request.arrival == 0:
            break
    assert arrival == LPM_MAX_OVERTAKES + 1


def test_a_long_queue_is_first_come_first_served() -> None:
    queue = WaitingQueue("lpm", False)
    for arrival in range(LPM_QUEUE_LIMIT + 1):
        queue.push(waiting(arrival, length=1 + arrival % 7))
    assert drain(queue)[0] == 0


def test_removing_a_stranger_is_an_error() -> None:
    queue = WaitingQueue("fcfs", False)
    queue.push(waiting(3))
    with pytest.raises(ValueError, match="r1 is not waiting"):
        queue.remove(waiting(1))
    with pytest.raises(ValueError, match="r4 is not waiting"):
        queue.remove(waiting(4))
