"""Requests wait for their grammars outside the engine's loop, and can be given up meanwhile."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from outrider.engine.build import build_engine
from outrider.engine.core_server import CoreServer
from outrider.engine.grammar_loader import GrammarLoader
from outrider.engine.wakeup import Wakeup
from outrider.engine_core.grammar_compiler import GrammarCompiler
from outrider.engine_core.grammar_spec import GrammarSpec
from outrider.engine_core.grammar_text import llguidance_grammar
from outrider.engine_core.messages import AbortRequest, CoreError, GenerateRequest
from outrider.engine_core.model_path import resolve_model
from outrider.engine_core.refusal import Refused
from outrider.engine_core.sampling_params import SamplingParams

from .cores import tiny_config
from .test_core_server import TOKEN, Peer

TOKENIZER = resolve_model("pycoder") / "tokenizer.json"


def ask(rid: str, text: str | None) -> GenerateRequest:
    grammar = None if text is None else GrammarSpec("regex", text, "regex")
    params = SamplingParams(temperature=0.0, max_new_tokens=6, grammar=grammar)
    return GenerateRequest(rid, np.array([5, 2, 3], np.int32).tobytes(), params)


class Gate:
    """Holds compilation of texts that begin with "wait" until it opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

        def slow(spec: GrammarSpec) -> str | Refused:
            if spec.text.startswith("wait"):
                self.entered.set()
                assert self.opened.wait(20)
            return llguidance_grammar(spec)

        monkeypatch.setattr(f"{GrammarCompiler.__module__}.llguidance_grammar", slow)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_only_what_is_not_known_waits(gate: Gate) -> None:
    compiler = GrammarCompiler(TOKENIZER, 8192, (0,))
    woken = threading.Event()
    loader = GrammarLoader(compiler, woken.set)
    assert not loader.waits(ask("plain", None))
    assert compiler.refuse(GrammarSpec("regex", "a+")) is None
    assert not loader.waits(ask("known", "a+"))
    assert loader.waits(ask("one", "wait+"))
    loader.hold(b"c", ask("one", "wait+"))
    loader.hold(b"d", ask("two", "("))
    loader.hold(b"d", ask("three", "b+"))
    loader.hold(b"d", ask("again", "c+"))
    assert len(loader) == 4
    assert gate.entered.wait(20)
    assert list(loader.finished()) == []
    assert loader.drop("three")
    assert not loader.drop("three")
    assert loader.drop("again")
    loader.hold(b"e", ask("again", "d+"))
    gate.opened.set()
    found: list[str] = []

    def all_three() -> bool:
        found.extend(waiting.message.rid for waiting in loader.finished())
        return len(found) == 3

    wait_until(all_three)
    assert found == ["one", "two", "again"]
    assert compiler.knows(GrammarSpec("regex", "d+"))
    for dropped in ("b+", "c+"):
        assert not compiler.knows(GrammarSpec("regex", dropped))
    assert not loader
    assert woken.is_set()


def test_the_loop_goes_on_meanwhile(gate: Gate, tmp_path: Path) -> None:
    engine = build_engine(tiny_config(Path("pycoder")))
    wakeup, endpoint = Wakeup(), f"ipc://{tmp_path}/core"
    drain: list[float] = []
    server = CoreServer(engine, endpoint, TOKEN, wakeup)
    thread = threading.Thread(target=lambda: server.run(lambda: drain[0] if drain else None))
    thread.start()
    peer, other = Peer(endpoint), Peer(endpoint)
    try:
        peer.send(ask("waits", "wait+"))
        peer.send(ask("given-up", "waited"))
        other.send(ask("vanishes", "wait{3}"))
        assert gate.entered.wait(20)
        peer.send(ask("plain", None))
        (plain,) = peer.finish("plain").values()
        assert plain[-1].finish is not None
        assert plain[-1].finish.kind in ("stop", "length")
        peer.send(ask("waits", "c+"))
        answer = peer.take()
        assert isinstance(answer, CoreError)
        assert "in flight" in answer.refused.reason
        peer.send(AbortRequest("given-up"))
        (ended,) = peer.finish("given-up").values()
        assert ended[-1].finish is not None
        assert ended[-1].finish.kind == "abort"
        assert ended[-1].stats is not None
        other.close()
        gate.opened.set()
        (waited,) = peer.finish("waits").values()
        assert waited[-1].finish is not None
        assert waited[-1].finish.kind in ("stop", "length")
        peer.send(ask("wrong", "("))
        answer = peer.take()
        assert isinstance(answer, CoreError)
        assert (answer.refused.field, answer.rid) == ("regex", "wrong")
        peer.send(ask("wrong", None))  # its id is free again
        assert peer.finish("wrong")
    finally:
        peer.close()
        drain.append(0.0)
        wakeup.wake()
        thread.join(20)
        engine.shutdown()
    assert not thread.is_alive()
