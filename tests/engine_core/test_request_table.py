"""The compiled table: its fast commit against the slow one, its bounds, and its errors."""

import random
from array import array

import numpy as np
import pytest

from outrider.cython_ext.page_allocator import PageAllocator
from outrider.cython_ext.request_table import RequestTable, note_unmatched
from outrider.engine_core.commit import Progress, commit_row
from outrider.engine_core.fast_rows import OFF_REASONS, attach, move_counts
from outrider.engine_core.ids import I32, RowKind
from outrider.engine_core.messages import RequestOutput
from outrider.engine_core.outputs import progress_output
from outrider.engine_core.request import Request

from .core_fixtures import LetterTail, request

WIDTH = 6


def int32(*values: int) -> I32:
    return np.array(values, dtype=np.int32)


def make_request(rng: random.Random, rid: str) -> Request:
    message = request(
        rid,
        range(1, rng.randrange(2, 9)),
        rng.randrange(1, 40),
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=tuple(rng.sample(range(40), rng.randrange(3))),
        min_new_tokens=0,
        stop=("zz",) if rng.random() < 0.1 else (),
        stream=rng.random() < 0.8,
    )
    prompt_len = len(message.prompt) // 4
    progress = Progress(message.params, prompt_len, 60, frozenset({0}), LetterTail())
    cap = min(60, prompt_len + message.params.max_new_tokens)
    return Request(message, 0, 0, cap, progress)


class FastSide:
    """Requests whose rows the table may commit."""

    def __init__(self, requests: list[Request]) -> None:
        self.table = RequestTable(len(requests), 4)
        self.requests = requests
        self.accepted = np.zeros(64, dtype=np.int64)
        self.drafted = np.zeros(64, dtype=np.int64)
        self.slow = self.fast = 0
        for slot, r in enumerate(requests):
            pages = np.arange(1, 30, dtype=np.int32)
            self.table.open(slot, r.length, r.max_total, pages, 0, False, True)
            attach(self.table, slot, r)
            self.table.plan_chunk(slot, r.length, 1, 1)

    def commit(
        self, step: int, runs: list[list[int]], proposed: list[int], reasons: list[int]
    ) -> list[RequestOutput]:
        slots = int32(*range(len(runs))).tobytes()
        fast = self.table.commit_fast(
            step,
            slots,
            bytes([RowKind.VERIFY]) * len(runs),
            int32(*map(len, runs)).tobytes(),
            int32(*(token for run in runs for token in run)).tobytes(),
            int32(*proposed).tobytes(),
            int32(*proposed).tobytes(),
            np.array(reasons, dtype=np.uint8),
            self.accepted,
            self.drafted,
        )
        self.fast += len(runs) - len(fast.slow_rows)
        self.slow += len(fast.slow_rows)
        for row in fast.slow_rows:
            r = self.requests[row]
            if r.progress.finish is not None:
                continue
            move_counts(self.table, row, r)
            kept = commit_row(r.progress, runs[row], RowKind.VERIFY, proposed[row], ())
            self.table.settle(row, kept, step)
            if not proposed[row] and reasons[row]:
                r.progress.spec_off_reason = OFF_REASONS[reasons[row]]
            if r.progress.finish is not None:
                self.table.detach(row)
        news = self.table.stream_outputs(slots, fast.slow_rows, 3, RequestOutput)
        late = [progress_output(self.requests[row], 3) for row in fast.slow_rows]
        return sorted(
            [*news, *(output for output in late if output is not None and not output.finish)],
            key=lambda output: output.rid,
        )


@pytest.mark.parametrize("seed", range(30))
def test_the_fast_commit_equals_the_slow_one(seed: int) -> None:
    rng = random.Random(seed)
    fast_requests = [make_request(random.Random(seed * 50 + i), f"r{i}") for i in range(8)]
    slow_requests = [make_request(random.Random(seed * 50 + i), f"r{i}") for i in range(8)]
    side = FastSide(fast_requests)
    correct = 0
    for step in range(2, 30):
        proposed = [rng.choice([0, 3, 5]) for _ in fast_requests]
        runs = [
            [rng.randrange(40) for _ in range(rng.randrange(1, count + 2))] for count in proposed
        ]
        reasons = [rng.randrange(len(OFF_REASONS)) if not count else 0 for count in proposed]
        news = side.commit(step, runs, proposed, reasons)
        expected: list[RequestOutput] = []
        for row, r in enumerate(slow_requests):
            if r.progress.finish is not None:
                continue
            kept = commit_row(r.progress, runs[row], RowKind.VERIFY, proposed[row], ())
            if not proposed[row] and reasons[row]:
                r.progress.spec_off_reason = OFF_REASONS[reasons[row]]
            assert side.table.length(row) == r.length
            output = progress_output(r, 3)
            if output is not None and output.finish is None:
                expected.append(output)
            correct += min(kept, len(runs[row]) - 1) if r.progress.finish is None else 0
        assert news == expected
    for row, (r, other) in enumerate(zip(fast_requests, slow_requests, strict=True)):
        move_counts(side.table, row, r)
        assert r.progress.stats() == other.progress.stats()
        assert r.progress.tokens == other.progress.tokens
        assert r.progress.finish == other.progress.finish
    assert side.fast > 0
    assert side.slow > 0
    assert side.accepted.sum() <= correct
    assert (side.accepted <= side.drafted).all()


def open_slot(table: RequestTable, slot: int, length: int, max_total: int, pages: int) -> None:
    ids = np.arange(1, pages + 1, dtype=np.int32)
    table.open(slot, length, max_total, ids, 0, False, True)


def test_pages_cover_the_upper_bound_while_a_row_is_in_flight() -> None:
    table, allocator = RequestTable(2, 4), PageAllocator(16)
    allocator.alloc(2)
    open_slot(table, 0, 7, 40, 2)
    assert table.unfilled(0) == 7
    assert table.plan_chunk(0, 7, 1, 1) == 0
    assert table.valid_kv(0) == 7
    # The prompt's last chunk is in flight: the bonus token will stand at 7.
    rows = table.plan_decode(2, int32(0), int32(WIDTH), allocator)
    assert np.frombuffer(rows.q_caps, np.int32).tolist() == [WIDTH]
    assert table.held(0) == 4  # positions 7..12
    table.settle(0, 1, 1)
    assert table.state(0).emits == WIDTH
    rows = table.plan_decode(3, int32(0), int32(WIDTH), allocator)
    assert table.held(0) == 5  # 8 known + 6 in flight - 1 + 6 = 19 positions
    assert np.frombuffer(rows.page_indexes, np.int32).tolist() == [4]
    table.settle(0, 3, 2)
    table.settle(0, 2, 3)
    assert table.state(0).emits == 0
    assert table.length(0) == 13
    assert table.valid_kv(0) == 12


def test_rows_are_held_back_without_pages_and_left_out_when_done() -> None:
    table, allocator = RequestTable(3, 1), PageAllocator(6)
    for slot in range(3):
        open_slot(table, slot, 2, 4 if slot == 1 else 20, 2)
        table.plan_chunk(slot, 2, 1, 1)
        table.settle(slot, 1, 1)
    allocator.alloc(4)
    slots, room = table.decodable(int32(0, 1, 2), 5)
    assert slots.tolist() == [0, 1, 2]
    assert room.tolist() == [5, 0, 5]
    rows = table.plan_decode(2, int32(0, 1, 2), int32(2, 2, 1), allocator)
    assert np.frombuffer(rows.slots, np.int32).tolist() == [0]
    assert rows.held_back == 2
    assert table.lacking_pages(int32(1, 2), int32(2, 1)) == 2
    allocator.free(int32(1, 2))
    rows = table.plan_decode(3, int32(1, 2), int32(1, 1), allocator)
    assert rows.held_back == 0
    # Slot 1 has one token left and it is in flight.
    assert table.decodable(int32(0, 1, 2), 5)[0].tolist() == [0, 2]
    assert table.bind_room(int32(1, 2), int32(4, 4)).tolist() == [0, 3]
    table.detach(2)
    assert table.bind_room(int32(2), int32(4)).tolist() == [0]


def test_expected_pages_follow_the_ratio_unless_the_length_is_sure() -> None:
    table = RequestTable(2, 4)
    for slot, sure in enumerate((False, True)):
        table.open(slot, 8, 108, np.arange(1, 3, dtype=np.int32), 0, sure, True)
    assert table.expected_pages(int32(0), 0.5, 4096) == 13
    assert table.expected_pages(int32(1), 0.5, 4096) == 25
    assert table.expected_pages(int32(0, 1), 0.0, 4096) == 25
    assert table.expected_pages(int32(0, 1), 1.0, 8) == 4


def test_wrong_calls_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        RequestTable(0, 4)
    table, allocator = RequestTable(2, 4), PageAllocator(4)
    pages = int32(1, 2)
    for args, text in (
        ((2, 3, 9, pages, 0), "slot 2 is outside 0..1"),
        ((0, 9, 8, pages, 0), "must ascend"),
        ((0, 9, 12, pages, 0), "2 pages cannot hold 9 tokens"),
    ):
        with pytest.raises(ValueError, match=text):
            table.open(*args, False, True)
    open_slot(table, 0, 5, 9, 2)
    assert table.max_slots == 2
    assert table.is_open(0)
    assert not table.is_open(1)
    assert not table.is_open(9)
    with pytest.raises(ValueError, match="slot 0 is open already"):
        open_slot(table, 0, 5, 9, 2)
    with pytest.raises(ValueError, match="slot 1 is not open"):
        table.length(1)
    with pytest.raises(ValueError, match="a chunk of 6 tokens; 5 are left"):
        table.plan_chunk(0, 6, 1, 0)
    table.plan_chunk(0, 5, 3, 1)
    assert table.last_step(0) == 3
    with pytest.raises(ValueError, match="step 3 is not after step 3"):
        table.plan_decode(3, int32(0), int32(1), allocator)
    with pytest.raises(ValueError, match="exceed the cap of 9"):
        table.settle(0, 5, 3)
    with pytest.raises(ValueError, match="unknown kind of damage"):
        table.corrupt_for_test(0, "other")
    with pytest.raises(ValueError, match="array of type 'i'"):
        table.attach(0, "r", BadSink(), int32(), True)
    table.close(0)
    assert not table.is_open(0)


class BadSink:
    """A sink whose tokens are no array of int32."""

    def __init__(self) -> None:
        self.tokens = array("q")
        self.sent = 0


def test_rows_without_drafts_and_reason_get_one() -> None:
    reasons = np.array([0, 3, 0, 0], dtype=np.uint8)
    note_unmatched(np.array([0, 0, 2, 0], dtype=np.int32).tobytes(), reasons, 3, 5)
    assert reasons.tolist() == [5, 3, 0, 0]
    with pytest.raises(ValueError, match="2 rows, proposed and reasons have fewer"):
        note_unmatched(bytes(4), reasons, 2, 5)
