"""Record of everything that decides a core's behaviour, and its replay.

A trace file is a magic line and then frames, each a little-endian uint32 length and one tagged
msgpack struct: a :class:`TraceHeader`, then in the order in which the core saw or made them

* ``GenerateRequest`` / ``AbortRequest`` that took effect, and controls (flushes, corpora),
* ``StepPlan``, ``HostDrafts``, ``StepResult``,
* :class:`StepDone` at the end of every ``EngineCore.step`` call, with what clients were told.

``EngineCore`` calls one method of :class:`TraceWriter` for each. Clock readings enter decisions
only through results and the header's step times, so a replay needs no clock.
"""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, final

import msgspec

from .config import CoreConfig
from .messages import (
    AbortRequest,
    AddCorpus,
    FlushCache,
    GenerateRequest,
    RemoveCorpus,
    RequestOutput,
)
from .plan import HostDrafts, StepPlan, StepResult

TRACE_VERSION = 4
TRACE_VARIABLE = "OUTRIDER_TRACE"  # names the file that an engine records its trace in
MAGIC = b"outrider trace\n"
MAX_FRAME = 256 * 1024 * 1024
_LENGTH = struct.Struct("<I")


class TraceError(ValueError):
    """A file that is no readable trace; the message says how much of it was read."""


class TraceHeader(msgspec.Struct, frozen=True, array_like=True, tag="trace"):
    """How to build the same core again.

    ``model``: path or name. ``step_times``: measured (batch tokens, seconds), the controller's
    start, empty without a drafter. ``draft_times``: (rows, seconds) of drafting, empty without a
    draft model.
    """

    version: int
    config: CoreConfig
    model: str
    step_times: tuple[tuple[int, float], ...] = ()
    draft_times: tuple[tuple[int, float], ...] = ()


class StepDone(msgspec.Struct, frozen=True, array_like=True, tag="step_done"):
    """One call of ``EngineCore.step`` ended with these outputs."""

    outputs: tuple[RequestOutput, ...]


Control = FlushCache | AddCorpus | RemoveCorpus
Event = GenerateRequest | AbortRequest | Control
Frame = Event | StepPlan | HostDrafts | StepResult | StepDone

_encoder = msgspec.msgpack.Encoder()
_header = msgspec.msgpack.Decoder(TraceHeader)
_frame = msgspec.msgpack.Decoder(Frame)


@final
class TraceWriter:
    """The core's hooks; every frame goes to ``write``."""

    def __init__(self, write: Callable[[Frame], None]) -> None:
        self._write = write

    def submit(self, message: GenerateRequest) -> None:
        """A request was accepted."""
        self._write(message)

    def abort(self, rid: str) -> None:
        """A request was ended by its client."""
        self._write(AbortRequest(rid))

    def control(self, message: Control) -> None:
        """A flush or a change of corpora took effect."""
        self._write(message)

    def plan(self, plan: StepPlan) -> None:
        """A step was planned."""
        self._write(plan)

    def drafts(self, drafts: HostDrafts) -> None:
        """Drafts were uploaded."""
        self._write(drafts)

    def result(self, result: StepResult) -> None:
        """A result came."""
        self._write(result)

    def commit(self, outputs: list[RequestOutput]) -> None:
        """A call of ``step`` ends with these outputs, be they none."""
        self._write(StepDone(tuple(outputs)))


@final
class TraceFile:
    """Writes frames to a file; complete up to the last finished step after any crash.

    Raises OSError when the file cannot be written.
    """

    def __init__(self, path: str | Path, header: TraceHeader) -> None:
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115 - open until close()
        self._file.write(MAGIC)
        self._put(header)
        self._file.flush()

    def write(self, frame: Frame) -> None:
        """Append a frame."""
        self._put(frame)
        if isinstance(frame, StepDone):
            self._file.flush()

    def _put(self, frame: Frame | TraceHeader) -> None:
        content = _encoder.encode(frame)
        self._file.write(_LENGTH.pack(len(content)))
        self._file.write(content)

    def close(self) -> None:
        """Flush and close; idempotent."""
        self._file.close()


@final
class TraceReader:
    """Reads a trace: ``header`` at once, frames by iteration (once).

    Raises TraceError, from the constructor or while iterating, for a file that is no trace, is
    damaged, cut short, or of another version; OSError if it cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        self._content = memoryview(Path(path).read_bytes())
        self._at = len(MAGIC)
        self.frames_read = 0
        self.steps_read = 0
        if bytes(self._content[: len(MAGIC)]) != MAGIC:
            raise TraceError(f"{self._path} is not an Outrider trace")
        content = self._next()
        if content is None:
            raise self._error("the header is missing")
        try:
            self.header = _header.decode(content)
        except msgspec.MsgspecError as error:
            raise self._error(f"the header is unreadable ({error})") from error
        if self.header.version != TRACE_VERSION:
            raise TraceError(
                f"{self._path} has trace version {self.header.version}; "
                f"this build reads version {TRACE_VERSION}"
            )

    def __iter__(self) -> Iterator[Frame]:
        while (content := self._next()) is not None:
            try:
                frame = _frame.decode(content)
            except msgspec.MsgspecError as error:
                raise self._error(f"the next frame is unreadable ({error})") from error
            self.frames_read += 1
            self.steps_read += isinstance(frame, StepDone)
            yield frame

    def _next(self) -> memoryview | None:
        left = len(self._content) - self._at
        if left == 0:
            return None
        if left < _LENGTH.size:
            raise self._error(f"cut short: {left} bytes where a frame's length should be")
        size = int(_LENGTH.unpack_from(self._content, self._at)[0])
        if size > MAX_FRAME:
            raise self._error(f"damaged: the next frame claims {size} bytes")
        start = self._at + _LENGTH.size
        if size > len(self._content) - start:
            raise self._error(
                f"cut short: the next frame needs {size} bytes, {left - _LENGTH.size} are there"
            )
        self._at = start + size
        return self._content[start : self._at]

    def _error(self, what: str) -> TraceError:
        return TraceError(
            f"{self._path}: {what}; read {self.frames_read} frames, {self.steps_read} steps, "
            f"up to byte {self._at} of {len(self._content)}"
        )
