"""Workers that die or break their contract, and rows whose numbers are unusable."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from outrider.engine_core.plan import StepResult
from outrider.engine_core.worker import WorkerFailed

from .core_fixtures import Got, assert_all_pages_back, expected, make_core, request, run_all, take
from .fake_worker import FakeWorker


@pytest.mark.parametrize("overlap", [True, False])
def test_a_dead_worker_fails_every_open_request(overlap: bool) -> None:
    worker = FakeWorker(max_slots=2, page_size=4, fail_at_step=4)
    core = make_core(worker, disable_overlap_schedule=not overlap)
    for i in range(4):
        assert core.submit(request(f"r{i}", range(1, 9 + i), 20, ignore_eos=True)) is None
    got: dict[str, Got] = {}
    with pytest.raises(WorkerFailed, match="injected"):
        run_all(core, got)
    take(got, core.fail_all("the worker died"))
    assert {client.finish.status for client in got.values() if client.finish} == {500}
    assert len(got) == 4
    assert not core.has_work
    worker.plans.clear()
    worker.fail_at_step = None
    assert_all_pages_back(core)
    assert core.submit(request("after", range(1, 9), 5, ignore_eos=True)) is None
    assert len(run_all(core)["after"].tokens) == 5


def test_a_row_without_numbers_ends_its_request_only() -> None:
    worker = FakeWorker(
        page_size=4, row_error=lambda init, length: init.serial == 2 and length >= 15
    )
    core = make_core(worker)
    messages = [request(f"r{i}", range(1, 10 + i), 12, ignore_eos=True) for i in range(3)]
    for message in messages:
        assert core.submit(message) is None
    got = run_all(core)
    finish = got["r1"].finish
    assert finish is not None
    assert (finish.kind, finish.status, finish.message) == (
        "abort",
        500,
        "the logits are not numbers",
    )
    for rid in ("r0", "r2"):
        assert got[rid].tokens == expected(messages[int(rid[1])], 256, 50)[0]
    assert core.scheduler.counters.row_errors == 1
    assert_all_pages_back(core)


def i32_bytes(*values: int) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


BREAKS: dict[str, Callable[[StepResult], StepResult]] = {
    "result of step": lambda r: msgspec.structs.replace(r, step=r.step + 1),
    "the plan's 2 rows": lambda r: msgspec.structs.replace(r, proposed=i32_bytes(0)),
    "no whole number": lambda r: msgspec.structs.replace(r, depths=b"\0" * 7),
    "rows emit 2 tokens and 3": lambda r: msgspec.structs.replace(r, tokens=i32_bytes(1, 2, 3)),
    "row 1 emits 2": lambda r: msgspec.structs.replace(
        r, accept_lens=i32_bytes(1, 2), tokens=i32_bytes(1, 2, 3)
    ),
    "row 0 emits 0": lambda r: msgspec.structs.replace(
        r, accept_lens=i32_bytes(0, 1), tokens=i32_bytes(1)
    ),
    "row 0 verified 1 drafts": lambda r: msgspec.structs.replace(r, proposed=i32_bytes(1, 0)),
    "token 50 is outside": lambda r: msgspec.structs.replace(r, tokens=i32_bytes(1, 50)),
}


@pytest.mark.parametrize("text", BREAKS)
def test_a_result_that_does_not_answer_its_plan(text: str) -> None:
    worker = FakeWorker()
    core = make_core(worker, disable_overlap_schedule=True)
    for rid in "ab":
        assert core.submit(request(rid, [1, 2], 9, ignore_eos=True)) is None
    core.step()
    collect = worker.collect
    worker.collect = lambda: BREAKS[text](collect())  # type: ignore[method-assign]
    with pytest.raises(WorkerFailed, match=text):
        core.step()
    assert len(core.fail_all("broken")) == 2


def test_missing_logprobs_break_the_contract() -> None:
    worker = FakeWorker()
    core = make_core(worker, disable_overlap_schedule=True)
    assert core.submit(request("a", [1, 2], 9, logprobs=2)) is None
    collect = worker.collect
    worker.collect = lambda: msgspec.structs.replace(  # type: ignore[method-assign]
        collect(), logprobs=()
    )
    with pytest.raises(WorkerFailed, match="lacks the log-probability"):
        core.step()


def test_only_one_step_may_be_in_flight_while_planning() -> None:
    core = make_core(FakeWorker())
    assert core.submit(request("a", [1, 2], 9, ignore_eos=True)) is None
    assert core.scheduler.plan() is not None
    assert core.scheduler.plan() is not None
    with pytest.raises(RuntimeError, match="two steps are in flight"):
        core.scheduler.plan()


@pytest.mark.parametrize("policy", ["fixed", "auto"])
def test_a_threaded_worker_with_late_drafts(policy: str) -> None:
    worker = FakeWorker(num_pages=128, step_seconds=0.001)
    core = make_core(worker, policy=policy, speculative_algorithm="NGRAM", right_of_8=7)
    messages = [request(f"r{i}", range(1, 4 + i), 30, ignore_eos=True) for i in range(6)]
    for message in messages:
        assert core.submit(message) is None
    got = run_all(core)
    worker.shutdown()
    for message in messages:
        assert got[message.rid].tokens == expected(message, 256, 50)[0]
    stats = core.stats(0)
    assert stats.spec_accepted_tokens > 0
    assert stats.plan_cpu > 0
    assert stats.propose_cpu > 0
    assert stats.wait_for_drafts > 0
    assert stats.worker_busy > 0
