"""A rank that decides otherwise, dies or never comes up: nothing changes, or all ends clearly."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from outrider.engine.build import build_worker
from outrider.engine.parallel import ranks as rank_processes
from outrider.engine.parallel.messages import OpenPool, ToRank
from outrider.engine.parallel.patience import TIMEOUT_VARIABLE, Vigil, rank_timeout_s
from outrider.engine.parallel.worker import ParallelWorker
from outrider.engine_core.core_launch import CoreLaunch, encode_line
from outrider.engine_core.messages import (
    PROTOCOL_VERSION,
    FinishReason,
    GenerateRequest,
    Hello,
    Outputs,
    Ready,
    encode,
)
from outrider.engine_core.refusal import RefusedError
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.worker import WorkerFailed

from ..cores import running_engine, tiny_config
from ..test_core_process import Child, take
from ..tiny import write_checkpoint
from .rank_cores import VOCAB, doomed_engine, requests, run, step_for_ever

pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", VOCAB)


def test_noise_on_rank_1_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits lie so close together that rank 1 would decide otherwise again and again."""
    folder = write_checkpoint(tmp_path / "flat", VOCAB, scale=0.002)
    with running_engine(tiny_config(folder, "NGRAM")) as engine:
        expected = run(engine.core)
    script = Path(__file__).with_name("noisy_rank.py")
    monkeypatch.setattr(rank_processes, "rank_command", lambda: [sys.executable, "-P", str(script)])
    monkeypatch.setenv("OUTRIDER_TEST_NOISE", str(tmp_path / "count"))
    monkeypatch.setenv("OUTRIDER_TEST_MODEL", str(folder))
    monkeypatch.setenv("OUTRIDER_TEST_VOCAB", str(VOCAB))
    with running_engine(tiny_config(folder, "NGRAM", tp_size=2)) as engine:
        assert run(engine.core) == expected
    nodes, differ = map(int, (tmp_path / "count").read_text().split())
    assert nodes > 120
    assert differ > 10


@pytest.mark.parametrize("way", ["fail", "refuse"])
def test_a_rank_that_fails_ends_the_steps_with_its_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    script = Path(__file__).with_name("failing_rank.py")
    command = [sys.executable, "-P", str(script), way]
    monkeypatch.setattr(rank_processes, "rank_command", lambda: command)
    with doomed_engine(tiny_config(folder, "NGRAM", tp_size=2)) as (core, worker, pid):
        woken = threading.Event()
        worker.watch(woken.set)
        for message in requests(400):
            assert core.submit(message) is None
        reason = rf"rank 1 \(process {pid}\) ended early: exit status 1: .*rank 1 had enough"
        with pytest.raises(WorkerFailed, match=reason):
            step_for_ever(core)
        assert woken.wait(1.0)
        with pytest.raises(WorkerFailed, match="rank 1"):
            worker.check()


@pytest.mark.parametrize("asked_early", [True, False])
def test_a_rank_that_hangs_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked_early: bool
) -> None:
    """By a question while the step waits, or once a collective was given up."""
    monkeypatch.setenv(TIMEOUT_VARIABLE, "2")
    if not asked_early:
        monkeypatch.setattr(Vigil, "begin", lambda self: None)
    with doomed_engine(tiny_config(folder, "NGRAM", tp_size=2)) as (core, worker, pid):
        assert isinstance(worker, ParallelWorker)
        for message in requests(400):
            assert core.submit(message) is None
        core.step()
        stop(pid)
        stopped = time.monotonic()
        reason = rf"rank 1 \(process {pid}\) hangs: no sign of life within [\d.]+ s$"
        with pytest.raises(WorkerFailed, match=reason) as error:
            step_for_ever(core)
        assert time.monotonic() - stopped < 5.0
        assert worker._group.late is not asked_early
        assert ("did not come to a sum" in str(error.value)) is not asked_early
        wait_for_end(pid, 1.0)


def test_ranks_that_live_but_do_not_meet_are_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Path(__file__).with_name("failing_rank.py")
    command = [sys.executable, "-P", str(script), "sleep"]
    monkeypatch.setattr(rank_processes, "rank_command", lambda: command)
    monkeypatch.setenv(TIMEOUT_VARIABLE, "1")
    with doomed_engine(tiny_config(folder, "NGRAM", tp_size=2)) as (core, _, pid):
        for message in requests(400):
            assert core.submit(message) is None
        reason = rf"in [12] s, though all .*: rank 0 \(process \d+\), rank 1 \(process {pid}\)$"
        with pytest.raises(WorkerFailed, match=reason):
            step_for_ever(core)


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "inf", "nan"])
def test_a_timeout_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, text)
    with pytest.raises(RefusedError, match=TIMEOUT_VARIABLE):
        rank_timeout_s()


def test_what_a_rank_refuses_is_named(folder: Path) -> None:
    with pytest.raises(RefusedError, match=r"tp_size.*4.*attention heads"):
        build_worker(tiny_config(folder, tp_size=4))


def test_a_rank_that_cannot_start_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        rank_processes, "rank_command", lambda: [sys.executable, "-c", "raise SystemExit(3)"]
    )
    with pytest.raises(WorkerFailed, match=r"rank 1 .*ended early: exit status 3"):
        build_worker(tiny_config(folder, tp_size=2))


def test_a_rank_that_ends_before_the_ranks_meet_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = rank_processes.Ranks.send
    killed: list[tuple[int, float]] = []

    def kill(ranks: rank_processes.Ranks, message: ToRank) -> None:
        if isinstance(message, OpenPool) and not killed:
            killed.append((ranks.pids[0], time.monotonic()))
            os.kill(ranks.pids[0], signal.SIGKILL)
        send(ranks, message)

    monkeypatch.setattr(rank_processes.Ranks, "send", kill)
    config = tiny_config(folder, tp_size=2)
    with pytest.raises(WorkerFailed, match=r"rank 1 \(process \d+\).*killed by signal 9") as error:
        build_worker(config)
    ((pid, when),) = killed
    assert time.monotonic() - when < 5.0
    assert str(pid) in str(error.value)
    # What still waits for the rank is in nobody's way.
    with running_engine(config) as engine:
        assert len(run(engine.core)) == 4


def test_a_rank_that_ends_before_it_is_watched_wakes_the_core(folder: Path) -> None:
    with doomed_engine(tiny_config(folder, tp_size=2)) as (_, worker, pid):
        assert isinstance(worker, ParallelWorker)
        os.kill(pid, signal.SIGKILL)
        assert worker._ranks.lost(5.0) is not None
        woken = threading.Event()
        worker.watch(woken.set)
        assert woken.is_set()
        with pytest.raises(WorkerFailed, match="rank 1"):
            worker.check()


class CoreProcess:
    """A core process of two ranks, with a client that has a request open."""

    def __init__(self, folder: Path, place: Path) -> None:
        private = place / "outrider-x"
        private.mkdir()
        endpoint = f"ipc://{private}/core"
        launch = CoreLaunch(config=tiny_config(folder, tp_size=2), endpoint=endpoint, token="t")
        self.child = Child(encode_line(launch))
        self._context = zmq.Context()
        self.client = self._context.socket(zmq.DEALER)
        try:
            self._greet(endpoint)
        except BaseException:
            self.close()
            raise

    def _greet(self, endpoint: str) -> None:
        status = self.child.status()
        assert status.status == "ready", status
        self.rank = only_child_of(self.child.process.pid)
        self.client.connect(endpoint)
        self.client.send(encode(Hello(PROTOCOL_VERSION, "t")))
        assert isinstance(take(self.client), Ready)

    def generate(self, tokens: int = 480) -> None:
        """Open a request and wait for its first token."""
        params = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
        prompt = np.array([1, 2], np.int32).tobytes()
        self.client.send(encode(GenerateRequest("r", prompt, params)))
        assert isinstance(take(self.client), Outputs)

    def close(self) -> None:
        self.child.close()
        self._context.destroy(linger=0)


def only_child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def finish_of(client: "zmq.Socket[bytes]") -> FinishReason:
    while True:
        message = take(client)
        assert isinstance(message, Outputs)
        for output in message.outputs:
            if output.finish is not None:
                return output.finish


def state_of(pid: int) -> str:
    """Its letter in /proc; "Z" also for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def wait_for_state(pid: int, state: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while state_of(pid) != state:
        assert time.monotonic() < deadline, f"process {pid} is {state_of(pid)}, not {state}"
        time.sleep(0.02)


def wait_for_end(pid: int, seconds: float) -> None:
    """Until it is gone, or its parent is and nobody here reaps it."""
    wait_for_state(pid, "Z", seconds)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_for_state(pid, "T", 5.0)


@pytest.fixture
def process(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CoreProcess]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    process = CoreProcess(folder, tmp_path)
    yield process
    process.close()


def test_open_requests_learn_that_a_rank_was_killed(process: CoreProcess) -> None:
    process.generate()
    os.kill(process.rank, signal.SIGKILL)
    killed = time.monotonic()
    finish = finish_of(process.client)
    assert time.monotonic() - killed < 1.5
    assert (finish.kind, finish.status) == ("abort", 500)
    assert finish.message is not None
    assert finish.message.startswith("the worker failed: rank 1 (")  # which names no field
    code, _, err = process.child.end()
    assert code == 1
    assert "killed by signal 9" in err


def test_an_idle_core_ends_with_a_rank(process: CoreProcess) -> None:
    os.kill(process.rank, signal.SIGKILL)
    assert process.child.process.wait(5.0) == 1
    assert "rank 1" in process.child.end()[2]


def test_a_rank_ends_with_a_killed_core_and_cleans_up(process: CoreProcess, tmp_path: Path) -> None:
    process.generate()
    process.child.process.kill()
    wait_for_end(process.rank, 3.0)
    assert [path.name for path in tmp_path.iterdir()] == ["outrider-x"]


def test_sigterm_stops_the_ranks_too(process: CoreProcess, tmp_path: Path) -> None:
    process.generate(40)
    process.child.process.send_signal(signal.SIGTERM)
    assert process.child.process.wait(15.0) == 0
    assert process.child.end() == (0, b"", "")
    wait_for_end(process.rank, 1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["outrider-x"]


def test_open_requests_learn_which_rank_hangs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(TIMEOUT_VARIABLE, "2")
    process = CoreProcess(folder, tmp_path)
    try:
        process.generate()
        stop(process.rank)
        finish = finish_of(process.client)
        assert (finish.kind, finish.status) == ("abort", 500)
        assert finish.message is not None
        named = f"the worker failed: rank 1 (process {process.rank}) hangs: "
        assert finish.message.startswith(named)
        assert process.child.process.wait(5.0) == 1
        wait_for_end(process.rank, 1.0)
        assert [path.name for path in tmp_path.iterdir()] == ["outrider-x"]
    finally:
        process.close()


@pytest.mark.parametrize("busy", [True, False])
def test_a_stop_ends_a_rank_that_hangs(process: CoreProcess, tmp_path: Path, busy: bool) -> None:
    if busy:
        process.generate()
    stop(process.rank)
    stopped = time.monotonic()
    stdin = process.child.process.stdin
    assert stdin is not None
    stdin.close()
    process.child.process.stdin = None
    assert process.child.process.wait(9.0) == int(busy)
    assert time.monotonic() - stopped < 8.0  # before the parent would kill
    wait_for_end(process.rank, 1.0)
    assert f"rank 1 (process {process.rank}) hangs" in process.child.end()[2]
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_rank_outlives_no_killed_core(process: CoreProcess, tmp_path: Path) -> None:
    stop(process.rank)
    process.child.process.kill()
    wait_for_end(process.rank, 3.0)
    assert [path.name for path in tmp_path.iterdir()] == ["outrider-x"]
