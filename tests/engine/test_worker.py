"""The worker's thread: order, late-bound steps, failures, measuring, stopping."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outrider.engine.measure import DraftWork, StepTimer
from outrider.engine.worker import TorchWorker
from outrider.engine_core.ids import i32
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.worker import Worker, WorkerFailed, WorkerInfo

from .driver import Driver, bigram_driver, chain
from .tiny import load_tiny, write_checkpoint

VOCAB = 12
GREEDY = SamplingParams(temperature=0.0)
INFO = WorkerInfo(
    vocab_size=VOCAB,
    context_length=256,
    num_pages=64,
    page_size=4,
    max_slots=8,
    eos_ids=(0,),
    weight_bytes=1,
    kv_bytes_per_token=1,
    num_threads=1,
    device="cpu",
    dtype="float32",
)


class Running:
    """A driver whose steps go through a worker's thread."""

    def __init__(self) -> None:
        table = torch.full((VOCAB, VOCAB), 0.0)
        for token in range(VOCAB):
            table[token, (token + 1) % VOCAB] = 1.0
        self.driver: Driver = bigram_driver(table)
        self.worker = TorchWorker(
            INFO, self.driver.runner, StepTimer(self.driver.runner._model, self.driver.kv)
        )
        self.driver.enter(0, [3], GREEDY)

    def launch(self, tokens: list[int] | None = None) -> None:
        plan, drafts = self.driver.verify_plan({0: chain(tokens) if tokens else None})
        self.driver.step += 1
        self.worker.launch(plan)
        if drafts is not None:
            self.worker.upload_drafts(drafts)


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running()
    yield running
    running.worker.shutdown()
    assert not running.worker._thread.is_alive()


def test_it_is_a_worker(running: Running) -> None:
    worker: Worker = running.worker
    assert worker.info() is INFO


def test_launched_steps_run_in_order_before_they_are_collected(running: Running) -> None:
    first = running.driver.step
    for _ in range(4):
        running.launch()
    running.launch([9, 10, 0])
    results = [running.worker.collect() for _ in range(5)]
    assert [result.step for result in results] == list(range(first, first + 5))
    assert [i32(result.tokens).tolist() for result in results] == [
        [5], [6], [7], [8], [9, 10, 11]
    ]  # fmt: skip
    assert all(result.busy_ns > 0 for result in results)
    assert [result.batch_tokens for result in results] == [1, 1, 1, 1, 4]


def test_a_late_bound_step_waits_for_its_drafts(running: Running) -> None:
    plan, drafts = running.driver.verify_plan({0: chain([5, 6])})
    assert drafts is not None
    running.worker.launch(plan)
    got: list[list[int]] = []
    collector = threading.Thread(
        target=lambda: got.append(i32(running.worker.collect().tokens).tolist())
    )
    collector.start()
    collector.join(0.05)
    assert collector.is_alive()
    running.worker.upload_drafts(drafts)
    collector.join(5.0)
    assert got == [[5, 6, 7]]


def test_waiting_time_is_told_apart_from_work(running: Running) -> None:
    plan, drafts = running.driver.verify_plan({0: chain([5])})
    assert drafts is not None
    running.worker.launch(plan)
    threading.Event().wait(0.03)
    running.worker.upload_drafts(drafts)
    result = running.worker.collect()
    assert result.wait_ns > 20e6 > result.busy_ns


def test_a_failure_surfaces_with_its_traceback_and_stays(running: Running) -> None:
    running.launch()
    running.launch([VOCAB])
    running.launch()
    assert i32(running.worker.collect().tokens).tolist() == [5]
    for _ in range(2):
        with pytest.raises(WorkerFailed, match=r"(?s)Traceback.*token 12 is outside"):
            running.worker.collect()
    with pytest.raises(WorkerFailed, match="stopped"):
        running.worker.measure([1])


def test_drafts_of_another_step_are_a_failure(running: Running) -> None:
    plan, drafts = running.driver.verify_plan({0: chain([5])})
    assert drafts is not None
    running.worker.launch(plan)
    running.worker.upload_drafts(type(drafts)(99, drafts.counts, drafts.tokens, drafts.parents))
    with pytest.raises(WorkerFailed, match="drafts of step 99 came for step"):
        running.worker.collect()


def test_reset_forgets_every_slot(running: Running) -> None:
    running.worker.reset()
    assert running.driver.state.seq_lens.tolist() == [0] * 8
    assert not running.driver.state.page_table.any()


def test_shutdown_ends_a_worker_that_waits_for_drafts(running: Running) -> None:
    plan, _ = running.driver.verify_plan({0: chain([5])})
    running.worker.launch(plan)
    running.worker.shutdown()
    running.worker.shutdown()
    with pytest.raises(WorkerFailed, match="shut down"):
        running.worker.collect()


def test_measuring_is_short_rising_and_leaves_kv_alone(tmp_path: Path) -> None:
    model, config = load_tiny(write_checkpoint(tmp_path / "m", VOCAB))
    driver = Driver(model, config)
    worker = TorchWorker(INFO, driver.runner, StepTimer(model, driver.kv))
    try:
        driver.enter(0, [1, 2, 3], GREEDY)
        before = driver.kv_of(0).clone()
        times = worker.measure([1, 2, 3, 8, 12, 700])
        assert len(times) == 6
        assert all(0.0 < seconds < 1.0 for seconds in times)
        assert times[-1] > times[0]
        assert torch.equal(driver.kv_of(0), before)
    finally:
        worker.shutdown()


def test_drafting_is_measured_beside_the_steps_that_it_follows(tmp_path: Path) -> None:
    model, config = load_tiny(write_checkpoint(tmp_path / "m", VOCAB))
    driver = Driver(model, config)
    timer = StepTimer(model, driver.kv)
    worker = TorchWorker(INFO, driver.runner, timer)
    drafted, aligned = set[int](), set[int]()

    def draft(rows: int) -> None:
        drafted.add(rows)
        time.sleep(1e-4 * rows)

    try:
        with pytest.raises(WorkerFailed, match="no draft model"):
            worker.measure_drafting([1, 2])
        timer.draft_work = DraftWork(draft, lambda batch: aligned.add(len(batch.input_ids)))
        times = worker.measure_drafting([1, 4])
        assert 1e-4 <= times[0] < times[1]
        assert drafted == {1, 4}
        worker.measure([1, 2])
        assert aligned == {1, 2}
    finally:
        worker.shutdown()


def test_sizes_without_time_to_measure_continue_the_slope() -> None:
    from outrider.engine.measure import _coarse_first, _complete

    assert _coarse_first([1, 2, 3, 4, 6, 8, 12]) == [1, 2, 4, 8, 3, 6, 12]
    assert _complete([1, 2, 3, 5], {1: 1.0, 3: 2.0}) == [1.0, 1.5, 2.0, 3.0]
    assert _complete([2, 4], {2: 3.0}) == [3.0, 6.0]
    assert _complete([1, 2, 4], {1: 9.0, 2: 2.0, 4: 3.0}) == [2.0, 2.0, 3.0]
