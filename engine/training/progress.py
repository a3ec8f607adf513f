"""What a run shows and writes down: a progress bar, and JSON lines."""

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec


class Progress:
    """A bar on standard error (lines where tqdm is missing) and ``log.jsonl`` in the output.

    Without a ``folder`` it is silent.
    """

    def __init__(
        self, folder: Path | None, title: str, total: float, done: float, unit: str
    ) -> None:
        self._log = None if folder is None else (folder / "log.jsonl").open("ab")
        self._title = title
        self._bar = None if folder is None else _bar(title, total, done, unit)
        self._done = done
        self._total = total
        self._shown = time.monotonic()

    def update(self, done: float, shown: dict[str, str]) -> None:
        """Move the bar to ``done``; ``shown``: a few figures beside it."""
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(max(0.0, min(done, self._total) - self._done))
        elif time.monotonic() - self._shown > 10.0:
            self._shown = time.monotonic()
            figures = " ".join(f"{name} {value}" for name, value in shown.items())
            self.say(f"{self._title}: {done:.4g}/{self._total:.4g} {figures}")
        self._done = max(self._done, done)

    def log(self, record: dict[str, object]) -> None:
        """One line of log.jsonl."""
        if self._log is not None:
            self._log.write(msgspec.json.encode(record) + b"\n")
            self._log.flush()

    def say(self, text: str) -> None:
        """A line on standard error, above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        elif self._log is not None:
            print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._log is not None:
            self._log.close()


def _bar(title: str, total: float, done: float, unit: str) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    layout = "{l_bar}{bar}| {n:.4g}/{total:.4g} {unit} [{elapsed}{postfix}]"
    # A log file is not filled with bars.
    every = 1.0 if sys.stderr.isatty() else 15.0
    return tqdm(
        desc=title, total=total, initial=done, unit=unit, bar_format=layout, mininterval=every
    )
