"""Start an engine core process, watch it and end it.

The child runs in a session of its own, so a terminal's Ctrl-C reaches the frontend only, which
then decides. Its standard input stays open: when this process dies, by whatever signal, the pipe
ends and the core stops by itself.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from ..engine_core.config import EngineConfig, refuse_config
from ..engine_core.core_launch import CoreLaunch, CoreStatus, decode_status, encode_line
from ..engine_core.messages import CoreInfo
from ..engine_core.private_dir import make_private_dir, remove_private_dir
from ..engine_core.refusal import RefusedError
from ..engine_core.replay import ReplayReport, replay_worker
from ..engine_core.trace import TRACE_VARIABLE, TraceReader
from ..engine_core.train_spec import TrainSpec
from .errors import LaunchError, LaunchRefused

if TYPE_CHECKING:
    from ..engine.training.on_policy import Generate
    from ..engine.training.run import TrainReport

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 5.0
MAX_STATUS_LINES = 1000  # lines of noise on the child's stdout before its status line


def core_command() -> list[str]:
    """How a core process is started. ``-P`` keeps the working folder off its import path."""
    return [sys.executable, "-P", "-m", "outrider.engine.core_process"]


class CoreProcess:
    """A running core: its endpoint and token, and what ends it. Made by :func:`start_core`."""

    def __init__(
        self,
        config: EngineConfig,
        child: "subprocess.Popen[bytes]",
        folder: Path,
        launch: CoreLaunch,
    ) -> None:
        self.config = config
        self.endpoint = launch.endpoint
        self.token = launch.token
        self.info: CoreInfo | None = None
        self._child = child
        self._folder = folder
        self._stopping = False
        self._stop_lock = threading.Lock()
        self._watch_lock = threading.Lock()
        self._watchers: list[Callable[[int], None]] = []
        self._exit_status: int | None = None
        self._reaper = threading.Thread(target=self._reap, name="core-reaper", daemon=True)

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self._child.pid

    @property
    def stopping(self) -> bool:
        """Whether its end was asked for here."""
        return self._stopping

    @property
    def exit_status(self) -> int | None:
        """None while it runs, else its exit status (negative: the signal that ended it)."""
        return self._exit_status

    def on_exit(self, callback: Callable[[int], None]) -> None:
        """Call ``callback(exit status)`` from another thread at the core's end, at once if over."""
        with self._watch_lock:
            if self._exit_status is None:
                self._watchers.append(callback)
                return
        callback(self._exit_status)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the core's end; None if it still runs after ``timeout_s``."""
        self._reaper.join(timeout_s)
        return self._exit_status

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the core: close its input, then SIGTERM, then SIGKILL. Idempotent."""
        with self._stop_lock:
            self._stopping = True
            if self._child.stdin is not None:
                with contextlib.suppress(OSError):
                    self._child.stdin.close()
            if self.wait(timeout_s) is None:
                self._child.terminate()
                if self.wait(timeout_s) is None:
                    self._child.kill()
                    self.wait(timeout_s)
            remove_private_dir(self._folder)

    def _watch(self) -> None:
        self._reaper.start()

    def _reap(self) -> None:
        status = self._child.wait()
        with self._watch_lock:
            self._exit_status = status
            watchers, self._watchers = self._watchers, []
        for callback in watchers:
            with contextlib.suppress(RuntimeError):  # the watcher's event loop is closed
                callback(status)


def start_core(
    config: EngineConfig,
    *,
    timeout_s: float = START_TIMEOUT_S,
    command: Sequence[str] | None = None,
    trace: str | None = None,
) -> CoreProcess:
    """Start a core process and wait until it can be greeted. ``trace``: file it records steps in.

    Raises RefusedError for a configuration that is wrong in itself, LaunchError when the process
    cannot be started, ends early, or is not ready within ``timeout_s`` seconds.
    """
    refused = refuse_config(config)
    if refused is not None:
        raise RefusedError(refused)
    folder = make_private_dir()
    recording = {} if trace is None else {TRACE_VARIABLE: trace}
    launch = CoreLaunch(
        config=config, endpoint=f"ipc://{folder}/core", token=secrets.token_urlsafe(32)
    )
    try:
        child = subprocess.Popen(
            list(command or core_command()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | recording,
        )
    except OSError as error:
        remove_private_dir(folder)
        raise LaunchError(f"the engine core could not be started: {error}") from None
    core = CoreProcess(config, child, folder, launch)
    core._watch()
    try:
        core.info = _await_ready(core, child, launch, timeout_s)
    except BaseException:
        core.stop(1.0)
        raise
    return core


def _await_ready(
    core: CoreProcess, child: "subprocess.Popen[bytes]", launch: CoreLaunch, timeout_s: float
) -> CoreInfo | None:
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # its end is reported below, with the status
        child.stdin.write(encode_line(launch))
        child.stdin.flush()
    box: list[CoreStatus] = []
    done = threading.Event()
    threading.Thread(
        target=_read_stdout, args=(child.stdout, box, done), name="core-stdout", daemon=True
    ).start()
    deadline = time.monotonic() + timeout_s
    while not done.wait(0.05):
        if time.monotonic() > deadline:
            raise LaunchError(f"the engine core was not ready within {timeout_s:g} s")
    if not box:
        status = core.wait(STOP_TIMEOUT_S)
        raise LaunchError(
            f"the engine core ended before it was ready ({describe_exit(status)}); "
            "its messages are above"
        )
    status_line = box[0]
    if status_line.status == "error":
        prefix = f"{status_line.field}: " if status_line.field else ""
        flag = status_line.field in EngineConfig.__struct_fields__
        raise (LaunchRefused if flag else LaunchError)(prefix + status_line.message)
    return status_line.info


def _read_stdout(stream: IO[bytes], box: list[CoreStatus], done: threading.Event) -> None:
    """Find the status line; whatever else the child prints goes to standard error."""
    with contextlib.suppress(OSError, ValueError), stream:
        for number, line in enumerate(stream):
            if not box and number < MAX_STATUS_LINES:
                try:
                    box.append(decode_status(line))
                    done.set()
                    continue
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    pass
            sys.stderr.write(line.decode(errors="replace"))
    done.set()


def describe_exit(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "it still runs"
    if status < 0:
        return f"killed by signal {-status}"
    return f"exit status {status}"


def run_training(spec: TrainSpec, generate: "Generate") -> "TrainReport":
    """Train a draft in this process. Raises RefusedError."""
    from ..engine.training.run import train_draft

    return train_draft(spec, generate)


def replay_on_model(path: str) -> ReplayReport:
    """Run a trace's plans on the model again, in this process; compare what each step decided.

    Raises TraceError, RefusedError for a model that is not there any more, WorkerFailed.
    """
    from ..engine.build import build_worker

    trace = TraceReader(path)
    recorded = trace.header.config.worker
    config = msgspec.structs.replace(
        trace.header.config.engine,
        num_threads=recorded.num_threads,
        max_total_tokens=recorded.num_pages * recorded.page_size,
    )
    worker = build_worker(config)
    try:
        # Its drafter, if it has one, as when the trace was made.
        worker.prepare(trace.header.config)
        return replay_worker(trace, worker)
    finally:
        worker.shutdown()
