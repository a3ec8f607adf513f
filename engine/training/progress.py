"""What a run shows and writes down: a progress bar, and JSON lines."""

import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec


class Progress:
    """A bar on standard error (lines where tqdm is missing) and ``log.jsonl`` in the output.

    ``fresh``: the log begins anew. The bar is drawn by a thread of its own, so that its clock goes
    on through a step of minutes, every half second on a terminal. Without a ``folder`` all of it
    is silent.
    """

    def __init__(
        self,
        folder: Path | None,
        title: str,
        total: float,
        done: float,
        unit: str,
        fresh: bool,
    ) -> None:
        how = "wb" if fresh else "ab"
        self._log = None if folder is None else (folder / "log.jsonl").open(how)
        self._title = title
        self._bar = None if folder is None else _bar(title, total, min(done, total), unit)
        self._figures = ""
        self._done = done
        self._total = total
        self._by_clock = unit == "min"
        self._moved: float | None = None
        self._ended = threading.Event()
        # A log file is not filled with bars.
        self._every = 0.5 if self._bar is not None and sys.stderr.isatty() else 15.0
        self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)
        if folder is not None:
            self._thread.start()

    def move(self, done: float) -> None:
        """So much is done, in the unit of ``total``."""
        self._done, self._moved = done, time.monotonic()
        if self._bar is not None:
            self._bar.n = min(done, self._total)

    def show(self, figures: dict[str, str]) -> None:
        """A few figures beside the bar."""
        self._figures = " ".join(f"{name} {value}" for name, value in figures.items())
        if self._bar is not None:
            self._bar.set_postfix(figures, refresh=False)

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
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._bar is not None:
            self._bar.n = min(self._done, self._total)
            self._bar.close()
        if self._log is not None:
            self._log.close()

    def _draw(self) -> None:
        while not self._ended.wait(self._every):
            if self._bar is not None:
                # Training time goes on within a step, from the end of the first one.
                if self._by_clock and self._moved is not None:
                    since = (time.monotonic() - self._moved) / 60.0
                    self._bar.n = min(self._done + since, self._total)
                self._bar.refresh()
            else:
                self.say(f"{self._title}: {self._done:.4g}/{self._total:.4g} {self._figures}")


def _bar(title: str, total: float, done: float, unit: str) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    layout = "{l_bar}{bar}| {n:.4g}/{total:.4g} {unit} [{elapsed}{postfix}]"
    return tqdm(desc=title, total=total, initial=done, unit=unit, bar_format=layout)
