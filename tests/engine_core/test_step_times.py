"""T(batch tokens): monotone, close to the truth, robust against outliers, current."""

import pytest

from outrider.engine_core.step_times import FRESH_STEPS, StepTimes, knot_sizes, measure_times

from .fake_worker import FakeWorker

SIZES = knot_sizes(64)


def line(n: float) -> float:
    return 1e-3 + 1e-4 * n


def table() -> StepTimes:
    return StepTimes(SIZES, [line(n) for n in SIZES])


@pytest.mark.parametrize("limit", [1, 2, 12, 64, 777])
def test_knots_rise_from_one_to_the_limit(limit: int) -> None:
    sizes = knot_sizes(limit)
    assert sizes[0] == 1
    assert sizes[-1] == limit
    assert sizes == sorted(set(sizes))
    assert len(sizes) < 30


def test_between_knots_and_past_the_last_it_is_a_line() -> None:
    times = table()
    for n in (1, 5, 13, 40, 64, 65, 200):
        assert times.seconds(n) == pytest.approx(line(n))
    assert len(times.table) == 65
    assert times.knots == tuple((n, line(n)) for n in SIZES)


def test_noise_in_the_measurement_cannot_make_more_tokens_cheaper() -> None:
    times = StepTimes([1, 2, 4], [2.0, 1.0, 3.0])
    assert times.seconds(2) == 2.0
    assert all(a <= b for a, b in zip(times.table, times.table[1:], strict=False))


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [
        ([1, 2], [1.0]),
        ([], []),
        ([2, 1], [1.0, 1.0]),
        ([0, 1], [1.0, 1.0]),
        ([1, 2], [1.0, 0.0]),
        ([1, 2], [1.0, float("inf")]),
        ([1, 2], [1.0, float("nan")]),
    ],
)
def test_tables_that_are_none(sizes: list[int], seconds: list[float]) -> None:
    with pytest.raises(ValueError, match=r"times|sizes"):
        StepTimes(sizes, seconds)


def feed(times: StepTimes, n: int, seconds: float, count: int) -> None:
    for _ in range(count):
        times.observe(n, int(seconds * 1e9))


def test_a_slower_machine_moves_sizes_that_were_not_run() -> None:
    times = table()
    feed(times, 8, 2 * line(8), 40)
    assert times.seconds(8) == pytest.approx(2 * line(8), rel=1e-3)
    assert times.seconds(48) == pytest.approx(2 * line(48), rel=1e-3)


def test_a_size_with_samples_of_its_own_follows_them() -> None:
    times = table()
    for _ in range(20):
        feed(times, 4, line(4), 1)
        feed(times, 48, 3 * line(48), 1)
    assert times.seconds(4) == pytest.approx(line(4), rel=1e-3)
    assert times.seconds(48) == pytest.approx(3 * line(48), rel=1e-3)


def test_old_samples_give_way_to_what_is_seen_elsewhere() -> None:
    times = table()
    feed(times, 48, 3 * line(48), 10)
    feed(times, 4, line(4), FRESH_STEPS + 10)
    assert times.seconds(48) == pytest.approx(line(48), rel=1e-3)


def test_outliers_do_not_move_it() -> None:
    times = table()
    for i in range(64):
        times.observe(8, int(line(8) * 1e9 * (50 if i % 4 == 0 else 1)))
    assert times.seconds(8) == pytest.approx(line(8), rel=1e-3)


def test_steps_without_time_or_past_the_table_teach_nothing() -> None:
    times = table()
    before = times.table.copy()
    for _ in range(20):
        times.observe(8, 0)
        times.observe(0, 1000)
        times.observe(65, 1000)
    assert (times.table == before).all()


def test_measured_from_a_worker() -> None:
    worker = FakeWorker(num_pages=16, page_size=16)
    times = measure_times(worker, 24)
    assert [n for n, _ in times.knots] == knot_sizes(24)
    assert times.seconds(24) > 0.0
