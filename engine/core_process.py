"""The engine-core process: ``python -m outrider.engine.core_process``.

Reads one ``CoreLaunch`` line from standard input, answers with one ``CoreStatus`` line on
standard output, then serves. The end of standard input means that the parent is gone: it stops.
"""

import contextlib
import gc
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import BinaryIO

import msgspec
import zmq

from ..engine_core.core_launch import CoreLaunch, CoreStatus, decode_launch, encode_line
from ..engine_core.refusal import RefusedError
from ..engine_core.worker import WorkerFailed
from .build import build_engine
from .child_stdout import take_stdout
from .core_server import CoreServer
from .wakeup import Wakeup

SIGTERM_DRAIN_S = 4.0  # the parent kills 5 s after its SIGTERM
# A step that does not end so long after the time for open requests is given up: the parent kills
# 10 s after it has closed standard input, and what ranks and devices hold takes time to let go.
STEP_GRACE_S = 3.0
# The worker gives the GIL up around each torch operation and must get it back at once.
_SWITCH_INTERVAL_S = 100e-6


class StopRequests:
    """Why the process should stop: SIGTERM (with a drain), or the end of standard input."""

    def __init__(self, wakeup: Wakeup) -> None:
        self._wakeup = wakeup
        self._drain_s: float | None = None
        self._asked: SimpleQueue[float] = SimpleQueue()  # a signal handler may put at any point
        self.input_ended = False
        signal.signal(signal.SIGTERM, lambda *_: self._ask(SIGTERM_DRAIN_S))

    def watch(self, stdin: int) -> None:
        """Read the descriptor to its end in a thread; what comes is ignored."""

        def read() -> None:
            # Not through sys.stdin, whose lock a thread at exit must not hold.
            while os.read(stdin, 4096):
                pass
            self.input_ended = True
            self._ask(0.0)

        threading.Thread(target=read, name="outrider-stdin", daemon=True).start()

    def when_overdue(self, give_up: Callable[[], None]) -> None:
        """Call ``give_up`` in a thread ``STEP_GRACE_S`` after what open requests were given."""

        def wait() -> None:
            deadline = math.inf
            with contextlib.suppress(Empty):
                while True:
                    left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
                    deadline = min(deadline, self._asked.get(timeout=left))
            give_up()

        threading.Thread(target=wait, name="outrider-overdue", daemon=True).start()

    def drain_s(self) -> float | None:
        """Seconds that open requests still have from now on, told once; None: go on."""
        wanted, self._drain_s = self._drain_s, None
        return wanted

    def _ask(self, drain_s: float) -> None:
        self._drain_s = drain_s
        self._asked.put(time.monotonic() + drain_s + STEP_GRACE_S)
        self._wakeup.wake()


def main() -> int:
    """Run the process; returns its exit status."""
    status_out = take_stdout()
    wakeup = Wakeup()
    stops = StopRequests(wakeup)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to decide on
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        launch = decode_launch(sys.stdin.buffer.readline())
    except msgspec.MsgspecError as error:
        return _refuse(status_out, "", f"the launch line is not valid: {error}")
    stops.watch(sys.stdin.fileno())
    try:
        return _serve(launch, stops, wakeup, status_out)
    finally:
        if stops.input_ended:
            _remove_endpoint(launch.endpoint)


def _serve(launch: CoreLaunch, stops: StopRequests, wakeup: Wakeup, status_out: BinaryIO) -> int:
    try:
        engine = build_engine(launch.config)
    except RefusedError as error:
        return _refuse(status_out, error.refused.field, error.refused.reason)
    except Exception as error:
        traceback.print_exc()
        return _refuse(status_out, "", f"the engine could not start: {error!r}")
    try:
        try:
            server = CoreServer(engine, launch.endpoint, launch.token, wakeup)
        except zmq.ZMQError as error:
            return _refuse(status_out, "endpoint", f"cannot listen on {launch.endpoint}: {error}")
        gc.collect()
        gc.freeze()
        _answer(status_out, CoreStatus(status="ready", info=engine.info))
        # The step in progress holds the loop; a failed worker breaks it off.
        reason = f"a step did not end within {STEP_GRACE_S:g} s of the engine's end"
        stops.when_overdue(lambda: engine.worker.fail(reason))
        server.run(stops.drain_s)
    except WorkerFailed as error:
        print(f"outrider: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        engine.shutdown()
    return 0


def _remove_endpoint(endpoint: str) -> None:
    """Remove the socket and the private folder it lay in, as a parent that was killed cannot."""
    path = Path(endpoint.removeprefix("ipc://"))
    if endpoint.startswith("ipc://") and path.parent.name.startswith("outrider-"):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            path.parent.rmdir()  # leaves a folder that holds anything else


def _refuse(status_out: BinaryIO, field: str, message: str) -> int:
    _answer(status_out, CoreStatus(status="error", field=field, message=message))
    return 1


def _answer(status_out: BinaryIO, status: CoreStatus) -> None:
    with status_out:
        status_out.write(encode_line(status))


if __name__ == "__main__":
    exit_status = main()
    sys.stderr.flush()
    # All is closed: what a device or a rank still holds must not hold the process.
    os._exit(exit_status)
