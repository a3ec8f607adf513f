"""The offline engine over a scripted core process: usage, errors, ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from outrider import LLM, SamplingParams
from outrider.engine_core.plan import TokenLogprobs
from outrider.engine_core.refusal import RefusedError
from outrider.frontend import batch_run, launch
from outrider.frontend.errors import EngineClosed, EngineDead, LaunchError
from outrider.frontend.flags import UsageError
from outrider.frontend.results import Completion, GenerationResult

from .fake_cli import fake_command
from .fake_core_process import expected_tokens

PROMPTS = ["def f(", "class A:"]


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "core_command", fake_command)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "core_command", fake_command)
        with LLM("pycoder", speculative_algorithm="NGRAM") as running:
            yield running


def test_prompts_of_every_form(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=5)
    results = llm.generate(PROMPTS, params)
    assert [r.prompt for r in results] == PROMPTS
    assert all(len(r.token_ids) == 5 and r.finish_reason == "length" for r in results)
    assert results[0].output_ids == results[0].outputs[0].token_ids
    assert results[0].meta_info["completion_tokens"] == results[0].completion_tokens == 5
    ids = [5, 6, 7]
    expected = tuple(expected_tokens(ids, 5))
    for prompts in (ids, [ids], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]):
        assert [r.token_ids for r in llm.generate(prompts, params)] == [expected]
    assert llm.generate({"prompt": PROMPTS[0]}, params)[0].text == results[0].text
    assert llm.generate([], params) == []


def test_every_name_of_a_flag_is_a_keyword() -> None:
    with LLM(model_path="pycoder", tensor_parallel_size=1) as running:
        assert (running.config.model, running.config.tp_size) == ("pycoder", 1)
    with pytest.raises(UsageError, match="model and model_path are both set"):
        LLM("pycoder", model_path="other")
    with pytest.raises(UsageError, match="--model is required"):
        LLM()


def test_parameters_of_every_form(llm: LLM) -> None:
    each = llm.generate(PROMPTS, [SamplingParams(max_new_tokens=2), {"max_new_tokens": 3}])
    assert [r.completion_tokens for r in each] == [2, 3]
    [over] = llm.generate(PROMPTS[0], {"max_new_tokens": 3}, max_tokens=4)
    assert over.completion_tokens == 4
    [several, one] = llm.generate(
        PROMPTS, [{"n": 3, "max_new_tokens": 2}, {"max_new_tokens": 1}], cache_salt="t", priority=1
    )
    assert [len(o.token_ids) for o in several.outputs] == [2, 2, 2]
    assert [len(o.token_ids) for o in one.outputs] == [1]


def test_one_stop_string(llm: LLM) -> None:
    one = SamplingParams(stop="never", max_new_tokens=2)  # type: ignore[arg-type]
    [result] = llm.generate(PROMPTS[0], one)
    assert result.completion_tokens == 2


def test_logprobs_are_in_the_json_forms() -> None:
    ids, values = np.array([7, 8], np.int32).tobytes(), np.array([-0.5, -2], np.float32).tobytes()
    entry = TokenLogprobs(token=7, value=-0.5, top_ids=ids, top_values=values, rank=1)
    done = Completion(0, "a", (7,), "length", None, {}, (entry,), (entry, entry))
    best = [{"token": 7, "logprob": -0.5}, {"token": 8, "logprob": -2.0}]
    expected = [{"token": 7, "logprob": -0.5, "rank": 1, "top_logprobs": best}]
    assert GenerationResult("p", 1, (done,)).summary()["logprobs"] == expected
    assert GenerationResult("p", 1, (done,)).summary()["prompt_logprobs"] == 2 * expected
    assert batch_run._fields(done)["logprobs"] == expected
    assert batch_run._fields(done)["prompt_logprobs"] == 2 * expected
    bare = msgspec.structs.replace(done, logprobs=(), prompt_logprobs=())
    assert not {"logprobs", "prompt_logprobs"} & GenerationResult("p", 1, (bare,)).summary().keys()


def test_streaming_and_leaving_early(llm: LLM) -> None:
    chunks = list(llm.stream(PROMPTS[0], max_new_tokens=9))
    [whole] = llm.generate(PROMPTS[0], max_new_tokens=9)
    assert "".join(c.text for c in chunks) == whole.text
    assert [c.finish_reason for c in chunks][-1] == "length"
    before = llm.stats().aborts
    for _ in llm.stream(PROMPTS[0], max_new_tokens=4000):
        break
    deadline = time.monotonic() + 5
    while llm.stats().aborts == before:
        assert time.monotonic() < deadline
    llm.flush_cache()


def test_abort_from_another_thread(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], rid="mine", max_new_tokens=4000)
    next(stream)
    threading.Thread(target=llm.abort, args=("mine",)).start()
    assert list(stream)[-1].finish_reason == "abort"


def test_errors_name_the_field(llm: LLM) -> None:
    bad: list[tuple[object, dict[str, object], str]] = [
        ("x", {"foo": 1}, "foo"),
        ("x", {"temperature": -1}, "temperature"),
        ("x", {"grammar": "x"}, "grammar"),
        ("x", {"priority": "high"}, "priority"),
        ("x", {"cache_salt": 3}, "cache_salt"),
        ("x", {"speculative": 1}, "speculative"),
        ("", {}, "prompt"),
        ([99999], {}, "prompt"),
        ([2**40], {}, "prompt"),
        ({"text": "x"}, {}, "prompt"),
        ([5, "x"], {}, "prompts"),
    ]
    for prompt, sampling, field in bad:
        with pytest.raises(RefusedError) as caught:
            llm.generate(prompt, **sampling)  # type: ignore[arg-type]
        assert caught.value.refused.field == field
    with pytest.raises(RefusedError, match="1 given for 2"):
        llm.generate(PROMPTS, [SamplingParams()])
    assert llm.generate("x", max_new_tokens=1)[0].completion_tokens == 1


def test_a_core_that_dies_fails_the_request_within_a_second() -> None:
    with LLM("pycoder") as llm:
        stream = llm.stream(PROMPTS[0], max_new_tokens=4000)
        next(stream)
        os.kill(llm.info.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(EngineDead, match="core"):
            list(stream)
        assert time.monotonic() - started < 1.0
        with pytest.raises(RefusedError, match="core"):
            llm.generate("x")


def test_shutdown_is_final_and_idempotent() -> None:
    llm = LLM("pycoder")
    pid = llm.info.pid
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    for use in (lambda: llm.generate("x"), lambda: llm.stats(), lambda: list(llm.stream("x"))):
        with pytest.raises(EngineClosed, match="shut down"):
            use()


def test_what_cannot_start_says_why() -> None:
    with pytest.raises(UsageError, match="unknown engine option 'speculative_algoritm'"):
        LLM("pycoder", speculative_algoritm="NGRAM")
    with pytest.raises(LaunchError, match="unlucky"):
        LLM("pycoder", dtype="float32", random_seed=13)
    with pytest.raises(ValueError, match="was not found"):
        LLM("no such model")


def test_a_script_that_never_shuts_down_ends_cleanly(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from outrider.frontend import launch\n"
        f"launch.core_command = lambda: {fake_command()!r}\n"
        "from outrider import LLM\n"
        "llm = LLM('pycoder')\n"
        "stream = llm.stream('x', max_new_tokens=4000)\n"
        "next(stream)\n"
        "print(llm.info.pid)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
