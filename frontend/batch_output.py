"""The output file of a batch run: one writer, whole lines only, and what is finished already.

A file holds the results of simulated runs (--simulate-accept-length) or of others, never of both.
A killed run can leave at most one partial line, the last; ``open_output`` cuts it off. Lines that
report a bad input line carry its number as ``line``: two of them may share an id.
"""

import fcntl
import os
from pathlib import Path
from types import TracebackType

import msgspec

from .batch_input import ItemId
from .errors import OutriderError
from .flags import UsageError

_BEGIN = b'{"id":'  # of every line that a run writes


class _Answer(msgspec.Struct):
    """A result, or the HTTP body of one: ``simulated`` is left out where it is false."""

    simulated: bool = False


class _Choice(msgspec.Struct):
    meta_info: _Answer


class _Response(msgspec.Struct):
    status_code: int
    body: _Answer


class _Line(msgspec.Struct):
    id: int | str | None = None
    custom_id: str | None = None
    line: int | None = None
    meta_info: _Answer | None = None
    choices: tuple[_Choice, ...] = ()
    response: _Response | None = None

    def simulated(self) -> bool | None:
        """Whether its result is of a simulated run; None for an error, which is of neither."""
        if self.meta_info is not None:
            return self.meta_info.simulated
        if self.choices:
            return self.choices[0].meta_info.simulated
        if self.response is not None and self.response.status_code == 200:
            return self.response.body.simulated
        return None


class FinishedIds:
    """What an output file holds already. Memory grows with its number of lines, ids only."""

    def __init__(self) -> None:
        self._ids: set[ItemId] = set()
        self._lines: set[int] = set()

    def __len__(self) -> int:
        return len(self._ids) + len(self._lines)

    def add(self, line: _Line) -> None:
        """Remember one output line."""
        known = line.custom_id if line.custom_id is not None else line.id
        if line.line is not None:
            self._lines.add(line.line)
        elif known is not None:
            self._ids.add(known)

    def has_id(self, item_id: ItemId) -> bool:
        """Whether the result of ``item_id`` is there."""
        return item_id in self._ids

    def has_line(self, number: int) -> bool:
        """Whether the error of input line ``number`` is there."""
        return number in self._lines


class OutputFile:
    """An output file open for appending, locked against a second run."""

    def __init__(self, path: Path, descriptor: int, finished: FinishedIds, repaired: int) -> None:
        self.path = path
        self.finished = finished
        self.repaired_bytes = repaired
        self._descriptor = descriptor

    def write(self, record: bytes) -> None:
        """Append one JSON record as a line, in one piece."""
        data = memoryview(record + b"\n")
        while data:
            data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        """Close and unlock; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_output(path: Path, simulated: bool = False) -> OutputFile:
    """Open ``path`` to append results: read what it holds, cut a partial last line.

    ``simulated``: this run's accept lengths are forced. Raises OutriderError when another run holds
    the file or when it is not a batch output, UsageError when it holds results of a run that was
    simulated and this one is not, or the other way round; it is then left as it is.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OutriderError(f"another run is writing {str(path)!r}") from None
        finished, end = _scan(path, simulated)
        size = os.fstat(descriptor).st_size
        if size > end:
            os.ftruncate(descriptor, end)
        return OutputFile(path, descriptor, finished, size - end)
    except BaseException:
        os.close(descriptor)
        raise


def _scan(path: Path, simulated: bool) -> tuple[FinishedIds, int]:
    """Finished ids, and the end of the last whole line in bytes."""
    finished, end = FinishedIds(), 0
    decoder = msgspec.json.Decoder(_Line)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                if _BEGIN.startswith(line) or line.startswith(_BEGIN):
                    break
                raise OutriderError(
                    f"{str(path)!r} is not an output of outrider run: line {number} has no end "
                    "and was not begun by a run; give another --output"
                )
            try:
                record = decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise OutriderError(
                    f"{str(path)!r} is not an output of outrider run: line {number}: {error}; "
                    "give another --output"
                ) from None
            if record.id is None and record.custom_id is None:
                raise OutriderError(
                    f"{str(path)!r} is not an output of outrider run: line {number} has no id; "
                    "give another --output"
                )
            if record.simulated() is not None and record.simulated() != simulated:
                raise UsageError(_mixes(path, number, simulated))
            finished.add(record)
            end += len(line)
    return finished, end


def _mixes(path: Path, number: int, simulated: bool) -> str:
    theirs, ours = "is a real result", "is simulated (--simulate-accept-length)"
    if not simulated:
        theirs, ours = "was simulated (--simulate-accept-length)", "is not"
    return (
        f"--output: line {number} of {str(path)!r} {theirs} and this run {ours}; give another "
        "--output, or delete that file to do its lines again"
    )
