"""The engine-core process itself: its one line of output, and every way in which it ends."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from outrider.engine_core.config import EngineConfig
from outrider.engine_core.core_launch import CoreLaunch, CoreStatus, decode_status, encode_line
from outrider.engine_core.messages import (
    PROTOCOL_VERSION,
    FromCore,
    GenerateRequest,
    Hello,
    Outputs,
    Ready,
    decode_from_core,
    encode,
)
from outrider.engine_core.sampling_params import SamplingParams

from .cores import tiny_config
from .tiny import write_checkpoint

VOCAB = 40


class Child:
    """A core process; its whole standard output is read at the end."""

    def __init__(self, launch: bytes) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "outrider.engine.core_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(launch)
        self.process.stdin.flush()

    def status(self) -> CoreStatus:
        assert self.process.stdout is not None
        return decode_status(self.process.stdout.readline())

    def end(self, timeout_s: float = 20.0) -> tuple[int, bytes, str]:
        """Exit status, what else it printed, and its messages."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err.decode()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", VOCAB)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    folder = tmp_path / "outrider-x"  # as a frontend names it
    folder.mkdir()
    return f"ipc://{folder}/core"


@pytest.fixture
def ready(folder: Path, endpoint: str) -> Iterator[Child]:
    launch = CoreLaunch(config=tiny_config(folder), endpoint=endpoint, token="t")
    child = Child(encode_line(launch))
    status = child.status()
    assert status.status == "ready", status
    assert status.info is not None
    assert status.info.pid == child.process.pid
    yield child
    child.close()


@pytest.fixture
def client(ready: Child, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send(encode(Hello(PROTOCOL_VERSION, "t")))
    assert isinstance(take(socket), Ready)
    params = SamplingParams(temperature=0.0, max_new_tokens=480, ignore_eos=True)
    prompt = np.array([1, 2], np.int32).tobytes()
    socket.send(encode(GenerateRequest("r", prompt, params)))
    assert isinstance(take(socket), Outputs)
    yield socket
    context.destroy(linger=0)


def take(socket: zmq.Socket[bytes]) -> FromCore:
    assert socket.poll(20_000), "no message from the core"
    return decode_from_core(socket.recv())


def finish_of(socket: zmq.Socket[bytes]) -> tuple[str, int]:
    while True:
        message = take(socket)
        assert isinstance(message, Outputs)
        for output in message.outputs:
            if output.finish is not None:
                return output.finish.kind, output.finish.status


def test_ctrl_c_is_left_to_the_parent_and_sigterm_drains(
    ready: Child, client: zmq.Socket[bytes]
) -> None:
    ready.process.send_signal(signal.SIGINT)
    assert isinstance(take(client), Outputs)
    ready.process.send_signal(signal.SIGTERM)
    assert finish_of(client) in [("length", 200), ("abort", 503)]
    assert ready.end() == (0, b"", "")


def test_the_end_of_its_input_ends_it_at_once(
    ready: Child, client: zmq.Socket[bytes], tmp_path: Path
) -> None:
    assert ready.process.stdin is not None
    began = time.monotonic()
    ready.process.stdin.close()
    ready.process.stdin = None
    assert finish_of(client) == ("abort", 503)
    assert ready.end() == (0, b"", "")
    assert time.monotonic() - began < 5.0
    assert list(tmp_path.iterdir()) == [], "the private folder of its socket was left behind"


def refusal(launch: bytes) -> CoreStatus:
    child = Child(launch)
    try:
        status = child.status()
        code, out, _ = child.end()
        assert (code, out) == (1, b"")
        return status
    finally:
        child.close()


def test_a_model_that_is_missing_is_named(endpoint: str, tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path / "nothing"))
    status = refusal(encode_line(CoreLaunch(config=config, endpoint=endpoint, token="t")))
    assert (status.status, status.field) == ("error", "model")
    assert "nothing" in status.message


def test_an_endpoint_that_cannot_be_bound_is_named(folder: Path) -> None:
    launch = CoreLaunch(config=tiny_config(folder), endpoint="ipc:///no/such/place", token="t")
    status = refusal(encode_line(launch))
    assert (status.status, status.field) == ("error", "endpoint")


def test_a_broken_launch_line_is_refused() -> None:
    assert "launch line" in refusal(b'{"config": 3}\n').message
