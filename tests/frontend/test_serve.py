"""``outrider serve`` as a process: readiness, drain, a core that dies, restart, both doors."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from outrider import Client
from outrider.engine_core.refusal import RefusedError

from .server_process import FAKE_CLI, fake_server, streamed


def eventually(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def test_http_and_sdk_serve_the_same_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_server("--speculative-algorithm", "NGRAM") as server:
        assert server.health() == 200
        assert "outrider configuration: model=pycoder" in server.text()
        body = {"model": "pycoder", "prompt": "def f(", "max_tokens": 7, "temperature": 0}
        by_http = httpx.post(server.url + "/v1/completions", json=body).json()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(server.log.parent))
        port = int(server.url.rpartition(":")[2])
        for client in (Client(), Client(port=port), Client(server.endpoint)):
            with client:
                result = client.generate("def f(", max_new_tokens=7, temperature=0)
            assert result.text == by_http["choices"][0]["text"]
        with Client() as client:
            info = client.server_info()
        assert info["drafter"] == "NGRAM"
        assert httpx.get(server.url + "/server_info").json().keys() == info.keys()
        server.terminate()
        assert server.wait(10) == 0
        with pytest.raises(Exception, match="no running"):
            Client().connect()


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones() -> None:
    with fake_server("--drain-timeout", "20") as server, Client(server.endpoint) as client:
        lines = streamed(server.url, 600)
        stream = client.stream("def f(", max_new_tokens=600)
        next(lines)
        next(stream)
        server.terminate()
        eventually(lambda: server.health() == 503, 2)
        with pytest.raises(RefusedError, match="shutting down"):
            client.generate("x", max_new_tokens=1)
        assert list(stream)[-1].finish_reason == "length"
        assert list(lines)[-1] == "[DONE]"
        assert server.wait(10) == 0


def test_the_drain_ends_in_time() -> None:
    with fake_server("--drain-timeout", "0.5", step_ms=20) as server:
        lines = streamed(server.url, 4000)
        next(lines)
        started = time.monotonic()
        server.terminate()
        assert any("abort" in line for line in lines)
        server.wait(10)
        assert 0.4 < time.monotonic() - started < 5


def test_what_the_drain_cuts_off_is_told_that_the_server_shut_down() -> None:
    with (
        fake_server("--drain-timeout", "0.3", step_ms=20) as server,
        Client(server.endpoint) as client,
        httpx.Client(base_url=server.url, timeout=20, verify=False) as http,
    ):
        stream = client.stream("def f(", max_new_tokens=4000)
        next(stream)
        body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 4000}}
        with http.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.terminate()
            [last] = [line for line in lines if '"abort"' in line]
        assert "the server shut down before" in last
        assert "client" not in last
        meta = list(stream)[-1].meta_info
        assert meta is not None
        assert "the server shut down before" in str(meta["finish_reason"])
        assert server.wait(10) == 0


def test_a_core_that_does_not_answer_leaves_no_request_without_an_end() -> None:
    with fake_server("--drain-timeout", "0.2", step_ms=20) as server:
        lines = streamed(server.url, 4000)
        next(lines)
        core = server.core_pid()
        os.kill(core, signal.SIGSTOP)
        server.terminate()
        assert any("the server shut down before" in line for line in lines)
        os.kill(core, signal.SIGKILL)
        server.wait(20)
        assert "Traceback" not in server.text()


def test_folders_of_killed_servers_are_removed_and_live_ones_are_not() -> None:
    def folders() -> set[Path]:
        return set(base.glob("outrider-ipc-*"))

    with fake_server() as first:
        base = first.log.parent
        mine = folders()
        assert len(mine) == 2  # the core's and the clients'
        foreign = base / "outrider-ipc-notes"
        foreign.mkdir()
        (foreign / "text").touch()
        with fake_server(folder=base):
            theirs = folders() - mine - {foreign}
            assert mine < folders()
            first.process.kill()
            first.wait(5)
            with fake_server(folder=base) as third:
                assert not mine & folders()
                assert theirs < folders()
                third.process.kill()
                third.wait(5)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("XDG_RUNTIME_DIR", str(base))
                with Client() as client:
                    assert client.generate("def f(", max_new_tokens=3).completion_tokens == 3
            assert folders() == {*theirs, foreign}


def test_a_killed_core_fails_open_requests_and_ends_the_server() -> None:
    with fake_server() as server, Client(server.endpoint) as client:
        lines = streamed(server.url, 4000)
        stream = client.stream("def f(", max_new_tokens=4000)
        next(lines)
        next(stream)
        killed = time.monotonic()
        os.kill(server.core_pid(), signal.SIGKILL)
        assert any('"error"' in line for line in lines)
        assert time.monotonic() - killed < 1.0
        with pytest.raises(Exception, match="core"):
            list(stream)
        assert time.monotonic() - killed < 1.0
        assert server.health() in (503, 0)
        assert server.wait(10) == 1
        assert "Traceback" not in server.text()


def test_a_killed_core_is_restarted_when_asked() -> None:
    with fake_server("--restart-engine") as server, Client(server.endpoint) as client:
        for _ in range(2):
            first = server.core_pid()
            lines = streamed(server.url, 4000)
            next(lines)
            os.kill(first, signal.SIGKILL)
            assert any('"error"' in line for line in lines)
            assert server.health() in (200, 503)
            eventually(lambda: server.health() == 200, 15)
            assert server.core_pid() != first
            assert client.generate("def f(", max_new_tokens=3).completion_tokens == 3
        server.terminate()
        assert server.wait(10) == 0


def test_a_core_whose_server_is_killed_ends_too() -> None:
    with fake_server() as server:
        core = server.core_pid()
        server.process.kill()
        server.wait(5)

        def gone() -> bool:
            try:
                os.kill(core, 0)
            except ProcessLookupError:
                return True
            return False

        eventually(gone, 3)


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--model", "pycoder", "--port", "TAKEN"], 1, "cannot listen on 127.0.0.1"),
        (["--model", "nothing/here-at-all", "--port", "0"], 2, "was not found"),
        (["--port", "0"], 2, "--model is required"),
        (["--model", "pycoder", "--zmq-endpoint", "tcp://0.0.0.0:1"], 2, "zmq_endpoint"),
        (["--model", "pycoder", "--no-such-flag"], 2, "unrecognized arguments"),
        (
            ["--model", "pycoder", "--port", "0", "--zmq-endpoint", "ipc:///no/such/dir/x"],
            2,
            "cannot bind",
        ),
        (
            ["--model", "pycoder", "--port", "0", "--dtype", "float32", "--random-seed", "13"],
            2,
            "random_seed: 13 is unlucky",
        ),
    ],
)
def test_what_cannot_start_says_why(flags: list[str], status: int, message: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        args = [port if flag == "TAKEN" else flag for flag in flags]
        done = subprocess.run(
            [sys.executable, str(FAKE_CLI), "2", "1", "serve", *args],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    assert (done.returncode, message in done.stderr) == (status, True), done.stderr
    assert "Traceback" not in done.stderr
