"""``outrider serve`` in a process of its own, over the scripted core or the real one."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

FAKE_CLI = Path(__file__).with_name("fake_cli.py")
_READY = re.compile(r"serves \S+ on (http://\S+) and, for SDK clients, (\S+)")


class ServerProcess:
    """A running server; ``url`` and ``endpoint`` are where it listens."""

    def __init__(self, command: list[str], folder: Path, logs: Path, timeout_s: float) -> None:
        self.log = logs / "server.log"
        self._file = self.log.open("wb")
        self.process = subprocess.Popen(
            command,
            stderr=self._file,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"XDG_RUNTIME_DIR": str(folder)},
        )
        deadline = time.monotonic() + timeout_s
        while (match := _READY.search(self.text())) is None:
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)
        self.url, self.endpoint = match.groups()

    def text(self) -> str:
        """What it has written to standard error."""
        return self.log.read_text()

    def core_pid(self) -> int:
        """Process id of its engine core."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for task in tasks for pid in task.read_text().split()]
        assert len(pids) == 1, pids
        return pids[0]

    def health(self) -> int:
        """Status code of /health; 0 when nothing listens any more."""
        try:
            return httpx.get(self.url + "/health", timeout=10).status_code
        except httpx.TransportError:
            return 0

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        """Its exit status."""
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """End it, if it still runs."""
        if self.process.poll() is None:
            self.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._file.close()


@contextlib.contextmanager
def fake_server(
    *flags: str, per_step: int = 2, step_ms: float = 5.0, folder: Path | None = None
) -> Iterator[ServerProcess]:
    """A server over the scripted core; ``folder``: its runtime folder, one of its own if None."""
    command = [sys.executable, str(FAKE_CLI), str(per_step), str(step_ms)]
    command += ["serve", "--model", "pycoder", "--port", "0", *flags]
    with _server(command, 30.0, folder) as server:
        yield server


@contextlib.contextmanager
def real_server(*flags: str) -> Iterator[ServerProcess]:
    """A server of the embedded model."""
    command = [sys.executable, "-P", "-m", "outrider", "serve", "--model", "pycoder"]
    with _server([*command, "--port", "0", "--num-threads", "1", *flags], 120.0) as server:
        yield server


@contextlib.contextmanager
def _server(
    command: list[str], timeout_s: float, folder: Path | None = None
) -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory(prefix="out-") as own:
        server = ServerProcess(command, folder or Path(own), Path(own), timeout_s)
        try:
            yield server
        finally:
            server.close()


def streamed(url: str, max_tokens: int) -> Iterator[str]:
    """Data lines of a streamed completion."""
    body = {"model": "pycoder", "prompt": "def f(", "max_tokens": max_tokens, "stream": True}
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")
