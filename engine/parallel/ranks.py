"""The processes of ranks 1 and up, seen from rank 0: start, talk, notice a death, end."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from ...engine_core.config import EngineConfig
from ...engine_core.private_dir import make_private_dir
from ...engine_core.refusal import RefusedError
from ...engine_core.worker import WorkerFailed
from .messages import (
    FromRank,
    RankFailed,
    RankLaunch,
    RankRefused,
    Stop,
    ToRank,
    decode_from_rank,
    encode,
    encode_launch,
)

START_TIMEOUT_S = 600.0
_POLL_MS = 50
_LAST_WORDS_MS = 200  # what a rank said before it ended may still be on its way
_KILL_AFTER_S = 5.0

Answer = TypeVar("Answer")


def rank_command() -> list[str]:
    """How a rank is started. ``-P`` keeps the working folder off its import path."""
    return [sys.executable, "-P", "-m", "outrider.engine.parallel.rank_process"]


class Ranks:
    """Ranks 1..size-1 of one engine, one process each, each with a ZeroMQ PAIR of its own.

    A rank's standard input stays open: its end means that rank 0 is gone, and the rank ends. All
    calls come from one thread at a time, but for ``on_lost``'s callback.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Start them; ``config`` as it holds for all of them."""
        self._folder = make_private_dir()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []
        self._ending = False
        self._lost: str | None = None
        self._losing = threading.Lock()
        self._known = threading.Event()
        self._callback: Callable[[str], None] | None = None
        try:
            for rank in range(1, config.tp_size):
                self._start(config, rank)
        except BaseException:
            self.end(0.0)
            raise

    @property
    def store(self) -> Path:
        """The file through which the ranks meet."""
        return self._folder / "store"

    @property
    def pids(self) -> list[int]:
        """Process ids, rank 1 first."""
        return [child.pid for child in self._children]

    def lost(self, wait_s: float = 0.0) -> str | None:
        """Which rank ended before it was told to, and how; waits that long to learn of one."""
        self._known.wait(wait_s)
        return self._lost

    def explain(self, wait_s: float = 0.0) -> str | None:
        """``lost``, with what the rank said last."""
        reason = self.lost(wait_s)
        if reason is None:
            return None
        for socket in self._sockets:
            while socket.poll(0):
                message = decode_from_rank(socket.recv())
                match message:
                    case RankFailed(message=text):
                        reason = f"{reason}: {text}"
                    case RankRefused(refused=refused):
                        reason = f"{reason}: {refused.field}: {refused.reason}"
                    case _:
                        pass
        return reason

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(reason)`` once, from another thread, when a rank is lost."""
        with self._losing:
            self._callback = callback
            reason = self._lost
        if reason is not None:
            callback(reason)

    def send(self, message: ToRank) -> None:
        """Give every rank a message; what a dead one does not take is dropped."""
        frame = encode(message)
        for socket in self._sockets:
            with contextlib.suppress(zmq.Again):
                socket.send(frame, zmq.NOBLOCK)

    def gather(self, kind: type[Answer]) -> list[Answer]:
        """The next answer of every rank. Raises RefusedError or WorkerFailed for another one."""
        return [self._answer(number, kind) for number in range(len(self._sockets))]

    def stop(self) -> None:
        """Tell them to end after what they were told before; ``end`` waits for it."""
        self._ending = True
        self.send(Stop())

    def end(self, wait_s: float) -> None:
        """End them: let them stop within ``wait_s``, then SIGTERM, then SIGKILL. Idempotent."""
        self._ending = True
        deadline = time.monotonic() + wait_s
        for child in self._children:
            _await(child, deadline - time.monotonic())
        for child in self._children:
            if child.poll() is None:
                child.terminate()
        deadline = time.monotonic() + min(wait_s, _KILL_AFTER_S)
        for child in self._children:
            _await(child, deadline - time.monotonic())
            if child.poll() is None:
                child.kill()
            child.wait()
            if child.stdin is not None:
                with contextlib.suppress(OSError):
                    child.stdin.close()
        for watcher in self._watchers:
            if watcher is not threading.current_thread():
                watcher.join(1.0)  # one may be busy with what its rank left behind
        if not self._context.closed:
            self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, config: EngineConfig, rank: int) -> None:
        endpoint = f"ipc://{self._folder}/rank{rank}"
        socket = self._context.socket(zmq.PAIR)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(endpoint)
        self._sockets.append(socket)
        child = subprocess.Popen(
            rank_command(),
            stdin=subprocess.PIPE,
            stdout=2,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        self._children.append(child)
        launch = RankLaunch(config=config, rank=rank, endpoint=endpoint, store=str(self.store))
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is reported with its status
            child.stdin.write(encode_launch(launch))
            child.stdin.flush()
        watcher = threading.Thread(
            target=self._watch, args=(rank, child), name=f"outrider-rank{rank}", daemon=True
        )
        self._watchers.append(watcher)
        watcher.start()

    def _watch(self, rank: int, child: "subprocess.Popen[bytes]") -> None:
        status = child.wait()
        with self._losing:
            if self._ending or self._lost is not None:
                return
            self._lost = f"rank {rank} (process {child.pid}) ended early: {_describe(status)}"
            callback = self._callback
        self._known.set()
        if callback is not None:
            callback(self._lost)

    def _answer(self, number: int, kind: type[Answer]) -> Answer:
        deadline = time.monotonic() + START_TIMEOUT_S
        socket = self._sockets[number]
        while not socket.poll(_POLL_MS):
            if self._lost is not None and not socket.poll(_LAST_WORDS_MS):
                raise WorkerFailed(self._lost)
            if time.monotonic() > deadline:
                raise WorkerFailed(f"rank {number + 1} did not answer in {START_TIMEOUT_S:g} s")
        message: FromRank = decode_from_rank(socket.recv())
        if isinstance(message, kind):
            return message
        match message:
            case RankRefused(refused=refused):
                raise RefusedError(
                    msgspec.structs.replace(refused, reason=f"{refused.reason} (rank {number + 1})")
                )
            case RankFailed(message=text):
                raise WorkerFailed(f"rank {number + 1} failed: {text}")
            case _:
                raise WorkerFailed(f"rank {number + 1} answered {type(message).__name__}")


def _await(child: "subprocess.Popen[bytes]", seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(max(0.0, seconds))


def _describe(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
