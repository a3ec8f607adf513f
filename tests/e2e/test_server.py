"""A server of the embedded model: both doors give the same tokens, and its core may be killed."""

import os
import signal
import time

import httpx
import pytest

from outrider import Client

from ..frontend.server_process import real_server, streamed

pytestmark = pytest.mark.serial
PROMPT = "x = [1, 2, 3]\ny = [1, 2, 3]\nx = [1, 2, 3]\ny = ["


def test_both_doors_agree_and_a_killed_core_is_noticed() -> None:
    flags = ("--speculative-algorithm", "NGRAM", "--max-running-requests", "4")
    with real_server(*flags) as server, Client(server.endpoint) as client:
        body = {"model": "pycoder", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        by_http = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
        by_sdk = client.generate(PROMPT, max_new_tokens=24, temperature=0)
        plain = client.generate(PROMPT, max_new_tokens=24, temperature=0, speculative=False)
        assert by_sdk.text == by_http["choices"][0]["text"]
        assert plain.token_ids == by_sdk.token_ids
        assert client.stats().finished == 3
        assert server.health() == 200
        lines = streamed(server.url, 4000)
        stream = client.stream(PROMPT, max_new_tokens=4000, ignore_eos=True)
        next(lines)
        next(stream)
        killed = time.monotonic()
        os.kill(server.core_pid(), signal.SIGKILL)
        with pytest.raises(Exception, match="core"):
            list(stream)
        assert any('"error"' in line for line in lines)
        assert time.monotonic() - killed < 1.0
        assert server.wait(10) == 1


def test_sigterm_drains_the_real_engine() -> None:
    with real_server("--max-running-requests", "2") as server, Client(server.endpoint) as client:
        stream = client.stream(PROMPT, max_new_tokens=100, ignore_eos=True, temperature=0)
        next(stream)
        server.terminate()
        chunks = list(stream)
        assert chunks[-1].finish_reason == "length"
        assert server.wait(20) == 0
