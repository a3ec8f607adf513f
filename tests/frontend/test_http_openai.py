"""The OpenAI endpoints: the official client, and what the client hides."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from outrider.frontend.http import ServerState

from .fake_core import TOKENIZER, expected_text
from .live_server import LiveServer, eventually, live_server, post


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def chat_client(chat_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="pycoder", prompt="def f(x):", max_tokens=9)
    assert answer.choices[0].text == expected_text("def f(x):", 9)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode("def f(x):"))
    assert answer.usage.completion_tokens == 9
    assert answer.object == "text_completion"


def test_streamed_completion_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="pycoder",
            prompt="print('🙂你好')",
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = [c.choices[0].text for c in chunks if c.choices]
    assert "".join(texts) == expected_text("print('🙂你好')", 40)
    assert not any("\ufffd" in text for text in texts[:-1])
    assert len(texts) > 3
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 40
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_batch_with_n_is_prompt_major(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="pycoder", prompt=["a b", "c d"], max_tokens=4, n=2)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert texts == [expected_text(p, 4) for p in ("a b", "a b", "c d", "c d")]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(TOKENIZER.encode(p)) for p in ("a b", "c d"))


def test_token_prompts(client: openai.OpenAI) -> None:
    ids = TOKENIZER.encode("x = 1")
    single = client.completions.create(model="pycoder", prompt=ids, max_tokens=3)
    batch = client.completions.create(model="pycoder", prompt=[ids, ids], max_tokens=3)
    assert single.choices[0].text == expected_text("x = 1", 3)
    assert [c.text for c in batch.choices] == [expected_text("x = 1", 3)] * 2


def test_stop_string_is_cut_and_named(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="pycoder", prompt="one two three", max_tokens=50, stop=["thr"]
    )
    assert answer.choices[0].text == "one two "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_dump()["matched_stop"] == "thr"


def test_streamed_stop_string_never_shows(client: openai.OpenAI) -> None:
    chunks = client.completions.create(
        model="pycoder", prompt="one two three", max_tokens=50, stop="two th", stream=True
    )
    assert "".join(c.choices[0].text for c in chunks) == "one "


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="pycoder", prompt="a b c", max_tokens=5, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs == [-0.5] * 5
    assert [len(top) for top in logprobs.top_logprobs or []] == [2] * 5
    assert logprobs.text_offset[-1] == len("".join(logprobs.tokens[:-1]))


def test_extras_reach_the_core(server: LiveServer, client: openai.OpenAI) -> None:
    client.completions.create(
        model="pycoder",
        prompt="extras",
        max_tokens=4,
        temperature=0.5,
        seed=7,
        logit_bias={"5": -15},
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "min_tokens": 2,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "stop_token_ids": [3],
            "bad_words": ["total"],
            "bad_words_ids": [[4, 5]],
            "allowed_token_ids": [6, 7],
            "priority": 4,
            "cache_salt": "tenant",
            "rid": "my-id",
            "speculative": False,
        },
    )
    request = server.core.requests[-1]
    params = request.params
    assert (params.top_k, params.min_p, params.min_new_tokens) == (5, 0.1, 2)
    assert (params.repetition_penalty, params.ignore_eos) == (1.1, True)
    assert (params.stop_token_ids, params.logit_bias) == ((3,), {5: -15.0})
    assert (params.temperature, params.seed) == (0.5, 7)
    assert (params.bad_words, params.allowed_token_ids) == ((), (6, 7))
    assert params.bad_words_ids[0] == (4, 5)
    assert len(params.bad_words_ids) > 1
    assert (request.priority, request.cache_salt) == (4, "tenant")
    assert not request.speculative


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["pycoder"]
    assert client.models.retrieve("pycoder").model_dump()["max_model_len"] == 512
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-5")
    assert caught.value.code == "model_not_found"


def test_unknown_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


def test_base_model_refuses_chat_with_the_remedy(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"without a chat template.*completions"):
        client.chat.completions.create(
            model="pycoder", messages=[{"role": "user", "content": "hi"}]
        )


def test_chat(chat_server: LiveServer, chat_client: openai.OpenAI) -> None:
    answer = chat_client.chat.completions.create(
        model="pycoder", messages=[{"role": "user", "content": "hi there"}]
    )
    rendered = "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n"
    prompt = TOKENIZER.encode(rendered)
    assert chat_server.core.requests[-1].params.max_new_tokens == 512 - len(prompt)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content is not None
    assert answer.choices[0].message.content.startswith("user\nhi there\nassistant\n")


def test_streamed_chat(chat_client: openai.OpenAI) -> None:
    chunks = list(
        chat_client.chat.completions.create(
            model="pycoder",
            messages=[{"role": "user", "content": [{"type": "text", "text": "hi there"}]}],
            max_completion_tokens=12,
            n=2,
            logprobs=True,
            top_logprobs=1,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    for index in (0, 1):
        of_index = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        text = "".join(choice.delta.content or "" for choice in of_index)
        assert text.startswith("user\nhi there\n")
        assert of_index[-1].finish_reason == "length"
        entries = [e for c in of_index if c.logprobs for e in c.logprobs.content or []]
        assert len(entries) == 12
        assert [len(entry.top_logprobs) for entry in entries] == [1] * 12
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


def test_continuous_usage(server: LiveServer) -> None:
    body = {
        "prompt": "a b c",
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    usages = [json.loads(line[6:])["usage"]["completion_tokens"] for line in lines[:-1]]
    assert usages == [3, 6, 9, 9]


def test_seeds_of_samples_are_derived_and_repeat(server: LiveServer) -> None:
    for _ in range(2):
        post(server, "/v1/completions", {"prompt": "seeded", "n": 3, "seed": 5, "max_tokens": 1})
    seeds = [request.params.seed for request in server.core.requests[-6:]]
    assert seeds[:3] == seeds[3:]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3


def test_model_defaults_stand_in(short_folder: Path) -> None:
    state = ServerState("pycoder", sampling_defaults={"temperature": 0.25, "top_k": 9})
    with live_server(short_folder, state=state) as live:
        post(live, "/v1/completions", {"prompt": "a", "top_k": 3})
        params = live.core.requests[-1].params
        assert (params.temperature, params.top_k) == (0.25, 3)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_disconnect_aborts_within_a_second(short_folder: Path, path: str, stream: bool) -> None:
    with live_server(short_folder) as live:
        live.core.slow = 0.2
        body = (
            {"text": "a b c", "sampling_params": {"max_new_tokens": 400}, "stream": stream}
            if path == "/generate"
            else {"prompt": "a b c", "max_tokens": 400, "stream": stream}
        )
        if stream:
            with live.http.stream("POST", path, json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                live.http.post(path, json=body, timeout=0.5)
        assert eventually(lambda: len(live.core.aborted) == 1)
        assert eventually(lambda: live.service.open_requests == 0)
        assert "outrider:num_aborted_requests_total 1.0" in live.http.get("/metrics").text


def test_error_after_the_headers_is_an_event(short_folder: Path) -> None:
    with live_server(short_folder) as live:
        live.core.fail_after = 5
        body = {"prompt": "a b c", "max_tokens": 40, "stream": True}
        with live.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            lines = [line for line in answer.iter_lines() if line]
        assert json.loads(lines[-2][6:])["error"]["message"] == "the numbers broke"
        assert lines[-1] == "data: [DONE]"
        failed = post(live, "/v1/completions", {"prompt": "a b c", "max_tokens": 40})
        assert failed.status_code == 500
        assert failed.json()["error"]["message"] == "the numbers broke"


@pytest.mark.parametrize("stream", [True, False])
def test_refusal_of_the_core_keeps_its_status_and_field(short_folder: Path, stream: bool) -> None:
    with live_server(short_folder) as live:
        live.core.priorities = False
        refused = post(live, "/v1/completions", {"prompt": "a", "priority": 3, "stream": stream})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "priority"
        assert live.service.core.open_requests == 0


def test_dead_core_fails_open_requests_within_a_second(short_folder: Path) -> None:
    with live_server(short_folder) as live:
        live.core.slow = 0.2
        begin: list[float] = []

        async def kill() -> None:
            begin.append(time.monotonic())
            await live.core.close()

        body = {"prompt": "a b c", "max_tokens": 400, "stream": True}
        with live.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            live.run(kill())
            rest = [line for line in lines if line]
        assert time.monotonic() - begin[0] < 1.0
        assert json.loads(rest[-2][6:])["error"]["code"] == "service_unavailable"
        assert rest[-1] == "data: [DONE]"
        assert live.http.get("/health").status_code == 503
        assert post(live, "/v1/completions", {"prompt": "a"}).status_code == 503


def test_drain_answers_503_and_lets_requests_finish(short_folder: Path) -> None:
    with live_server(short_folder) as live:
        live.core.slow = 0.05
        body = {"prompt": "a b c", "max_tokens": 20, "stream": True}
        with live.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            live.begin_stop()
            assert eventually(lambda: live.http.get("/health").status_code == 503)
            refused = post(live, "/v1/completions", {"prompt": "a"})
            assert refused.status_code == 503
            assert "shutting down" in refused.json()["error"]["message"]
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        live.join()
        assert live.core.aborted == []


def test_many_concurrent_requests(server: LiveServer) -> None:
    async def all_of_them() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=20) as client:
            return await asyncio.gather(
                *(
                    client.post(
                        server.url + "/v1/completions",
                        json={"prompt": f"number {i}", "max_tokens": 8},
                    )
                    for i in range(64)
                )
            )

    for i, answer in enumerate(asyncio.run(all_of_them())):
        assert answer.json()["choices"][0]["text"] == expected_text(f"number {i}", 8)
