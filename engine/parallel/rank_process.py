"""The process of a rank other than 0: ``python -m outrider.engine.parallel.rank_process``.

Reads one ``RankLaunch`` line from standard input, loads its share and does what rank 0 says. What
else comes there it sends back, as a sign of life. The end of standard input means that rank 0 is
gone: it ends at once, wherever it is.
"""

import contextlib
import ctypes
import gc
import os
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import assert_never

import zmq

from ...engine_core.plan import HostDrafts, StepPlan
from ...engine_core.refusal import RefusedError
from ..device_memory import DeviceMemory
from ..rank_worker import find_site, load_rank, make_worker
from ..worker import EngineWorker, GraphWorker
from .group import Group
from .messages import (
    Collect,
    FromRank,
    Measure,
    OpenPool,
    Prepare,
    RankFailed,
    RankLaunch,
    RankLoaded,
    RankReady,
    RankRefused,
    Replay,
    Reset,
    Stop,
    ToRank,
    VerifyWidth,
    decode_launch,
    decode_to_rank,
    encode,
)
from .start import share_of

_LINGER_MS = 1000
_GONE_S = 0.5
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the process; returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the frontend's to decide on
    _go_on_without_rank_0()
    launch = decode_launch(sys.stdin.buffer.readline())
    watcher = _end_with_rank_0(launch)
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(launch.endpoint)
    status = 1
    try:
        _serve(launch, socket)
        status = 0
    except RefusedError as error:
        _say(socket, RankRefused(error.refused))
    except Exception as error:
        traceback.print_exc()
        _say(socket, RankFailed(str(error).strip().splitlines()[-1] if str(error) else repr(error)))
    socket.close()
    context.term()
    if status:
        # A collective may break off before it is known that rank 0 is gone; the watcher then ends
        # the process, once it has cleaned up.
        watcher.join(_GONE_S)
    return status


def _serve(launch: RankLaunch, socket: "zmq.Socket[bytes]") -> None:
    site = find_site(launch.config, launch.rank)
    group = Group(launch.rank, launch.config.tp_size, site.device)
    loaded = load_rank(site, share_of(site, group))
    _say(socket, RankLoaded(site.plan.num_pages))
    first = decode_to_rank(socket.recv())
    if isinstance(first, Stop):
        return
    if not isinstance(first, OpenPool):
        raise TypeError(f"expected the pool's size, got {type(first).__name__}")
    group.join(Path(launch.store))
    worker = make_worker(loaded, first.num_pages, group)
    gc.collect()
    gc.freeze()
    _say(socket, RankReady())
    while not isinstance(message := decode_to_rank(socket.recv()), Stop):
        _obey(worker, loaded.memory, message)
    worker.shutdown()
    group.leave()


def _obey(worker: EngineWorker, memory: DeviceMemory, message: ToRank) -> None:
    """Do here what rank 0 does to its own worker. Raises WorkerFailed, or RefusedError if the
    device runs out of memory.
    """
    match message:
        case StepPlan():
            worker.launch(message)
        case HostDrafts():
            worker.upload_drafts(message)
        case Collect():
            worker.collect()
        case Reset():
            worker.reset()
        case Prepare(config=config):
            with memory.guard("the capture of CUDA graphs"):
                worker.prepare(config)
        case Measure(sizes=sizes, drafting=False):
            worker.measure(sizes)
        case Measure(sizes=sizes):
            worker.measure_drafting(sizes)
        case VerifyWidth(width=width):
            _graphs(worker).set_verify_width(width)
        case Replay(rows=rows, tokens=tokens, steps=steps):
            _graphs(worker).replay_seconds(rows, tokens, steps)
        case OpenPool() | Stop():
            raise TypeError(f"{type(message).__name__} came too late")
        case _:
            assert_never(message)


def _graphs(worker: EngineWorker) -> GraphWorker:
    assert isinstance(worker, GraphWorker), "rank 0's worker has graphs"
    return worker


def _say(socket: "zmq.Socket[bytes]", message: FromRank) -> None:
    socket.send(encode(message))


def _go_on_without_rank_0() -> None:
    """Have a stopped process continued when rank 0 dies, so that it can end and clean up."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


def _end_with_rank_0(launch: RankLaunch) -> threading.Thread:
    """Watch standard input in a thread; a collective that waits for rank 0 must not hold us."""

    def read() -> None:
        stdin = sys.stdin.fileno()
        with contextlib.suppress(OSError):  # broken off is over, too
            while asked := os.read(stdin, 4096):
                os.write(stdin, asked)
        folder = Path(launch.store).parent
        if folder.name.startswith("outrider-"):  # as rank 0, which was killed, cannot
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    watcher = threading.Thread(target=read, name="outrider-stdin", daemon=True)
    watcher.start()
    return watcher


if __name__ == "__main__":
    status = main()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    # Whatever still waits for a device or another rank must not hold the process.
    os._exit(status)
