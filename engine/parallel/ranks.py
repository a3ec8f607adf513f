"""The processes of ranks 1 and up, seen from rank 0: start, talk, notice a death, end."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from ...engine_core.config import EngineConfig
from ...engine_core.private_dir import make_private_dir, remove_private_dir
from ...engine_core.refusal import RefusedError
from ...engine_core.worker import WorkerFailed
from .child import RankChild, silent
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

Answer = TypeVar("Answer")


def rank_command() -> list[str]:
    """How a rank is started. ``-P`` keeps the working folder off its import path."""
    return [sys.executable, "-P", "-m", "outrider.engine.parallel.rank_process"]


class Ranks:
    """Ranks 1..size-1 of one engine, one process each, each with a ZeroMQ PAIR of its own.

    All calls come from one thread at a time, but for ``find_hung`` and ``on_lost``'s callback.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Start them; ``config`` as it holds for all of them."""
        self._folder = make_private_dir()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._children: list[RankChild] = []
        self._watchers: list[threading.Thread] = []
        self._ending = False
        self._ended = False
        self._asking = threading.Lock()
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

    def names(self) -> str:
        """All of them, rank 0 too, with their process ids."""
        return ", ".join([f"rank 0 (process {os.getpid()})", *map(str, self._children)])

    def lost(self, wait_s: float = 0.0) -> str | None:
        """Which rank ended before it was told to, how, or hangs; waits so long to learn of one."""
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

    def find_hung(self, wait_s: float) -> str | None:
        """``lost``, after each rank was asked for a sign of life: who gives none within ``wait_s``
        hangs, counts as lost and is killed. Any thread.
        """
        with self._asking:
            if self._lost is None and not self._ended:
                hung = silent(self._children, wait_s)
                if hung:
                    names = " and ".join(map(str, hung))
                    verb = "hangs" if len(hung) == 1 else "hang"
                    self._lose(f"{names} {verb}: no sign of life within {wait_s:g} s")
                for child in hung:
                    child.kill()
        return self._lost

    def stop(self) -> None:
        """Tell them to end after what they were told before; ``end`` waits for it."""
        self._ending = True
        self.send(Stop())

    def end(self, wait_s: float) -> list[str]:
        """End them: let them stop within ``wait_s``, then SIGKILL. Idempotent.

        The ranks that had to be killed.
        """
        self._ending = True
        killed: list[str] = []
        deadline = time.monotonic() + wait_s
        for child in self._children:
            if child.wait(deadline - time.monotonic()) is None:
                child.kill()
                killed.append(str(child))
        for child in self._children:
            child.wait()
        with self._asking:
            self._ended = True
            for child in self._children:
                child.close()
        for watcher in self._watchers:
            if watcher is not threading.current_thread():
                watcher.join(1.0)  # one may be busy with what its rank left behind
        if not self._context.closed:
            self._context.destroy(linger=0)
        remove_private_dir(self._folder)
        return killed

    def _start(self, config: EngineConfig, rank: int) -> None:
        endpoint = f"ipc://{self._folder}/rank{rank}"
        socket = self._context.socket(zmq.PAIR)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(endpoint)
        self._sockets.append(socket)
        launch = RankLaunch(config=config, rank=rank, endpoint=endpoint, store=str(self.store))
        child = RankChild(rank, rank_command(), encode_launch(launch))
        self._children.append(child)
        watcher = threading.Thread(
            target=self._watch, args=(child,), name=f"outrider-rank{rank}", daemon=True
        )
        self._watchers.append(watcher)
        watcher.start()

    def _watch(self, child: RankChild) -> None:
        status = child.wait()
        assert status is not None, "it was waited for without a bound"
        if not self._ending:
            self._lose(f"{child} ended early: {_describe(status)}")

    def _lose(self, reason: str) -> None:
        with self._losing:
            if self._lost is not None:
                return
            self._lost = reason
            callback = self._callback
        self._known.set()
        if callback is not None:
            callback(reason)

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


def _describe(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
