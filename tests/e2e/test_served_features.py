"""Request features through the served APIs, with drafters of each kind: the same answers."""

from collections.abc import Iterator
from typing import Any

import pytest

from ..frontend.fake_core import TOKENIZER
from .served import DRAFTERS, PROMPT, Served, served

pytestmark = pytest.mark.serial
KNOWN: dict[str, object] = {}


@pytest.fixture(scope="module", params=DRAFTERS)
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    with served(request.param, KNOWN) as made:
        yield made


def holds(tokens: list[int], sequence: list[int]) -> bool:
    return any(
        tokens[at : at + len(sequence)] == sequence for at in range(len(tokens) - len(sequence) + 1)
    )


def test_a_banned_sequence_is_never_generated(server: Served) -> None:
    free = server.generate()
    tokens = list(free["output_ids"])
    bans = [tokens[3:6], tokens[8:10], tokens[12:13]]
    for seed, temperature in ((0, 0), (7, 0.8)):
        answer = server.generate(
            bad_words_ids=bans, ignore_eos=True, temperature=temperature, seed=seed
        )
        found = list(answer["output_ids"])
        assert len(found) == 40
        assert not any(holds(found, ban) for ban in bans)
        server.same(f"bans {seed}", found)
    body = {"model": "pycoder", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    by_openai = server.post("/v1/completions", **body, bad_words_ids=bans, ignore_eos=True)
    server.same("bans, text", by_openai["choices"][0]["text"])
    by_sdk = server.sdk.generate(
        PROMPT, bad_words_ids=bans, ignore_eos=True, temperature=0, max_new_tokens=40
    )
    server.same("bans 0", list(by_sdk.token_ids))


def test_a_bad_word_is_missing_from_the_text(server: Served) -> None:
    free = str(server.generate()["text"])
    words = sorted({word for word in free.replace("(", " ").split() if word.isalpha()})
    assert words
    answer = server.generate(bad_words=words, ignore_eos=True)
    found = list(answer["output_ids"])
    for word in words:
        for text in (word, " " + word):
            assert not holds(found, TOKENIZER.encode(text, add_special_tokens=False))
    server.same("words", found)
    by_sdk = server.sdk.generate(
        PROMPT, bad_words=words, ignore_eos=True, temperature=0, max_new_tokens=40
    )
    server.same("words", list(by_sdk.token_ids))
    chat = server.refused("/v1/completions", model="pycoder", prompt="a", bad_words=[" "])
    assert "bad_words" in chat


def test_only_allowed_tokens_are_generated(server: Served) -> None:
    allowed = [17, 40, 99, 250, 1023, 8191]
    for seed, temperature in ((0, 0), (3, 1.0)):
        answer = server.generate(allowed_token_ids=allowed, temperature=temperature, seed=seed)
        found = list(answer["output_ids"])
        assert len(found) == 40
        assert set(found) <= set(allowed)
        server.same(f"allowed {seed}", found)
    assert "allowed_token_ids" in server.refused(
        "/generate", text="a", sampling_params={"allowed_token_ids": []}
    )
    dead_end = {"allowed_token_ids": [17], "bad_words_ids": [[3, 17]]}
    assert "allowed_token_ids: a position" in server.refused(
        "/generate", text="a", sampling_params=dead_end
    )
    assert "allowed_token_ids: a position" in server.refused(
        "/v1/completions", model="pycoder", prompt="a", **dead_end
    )


def scores_of(answer: Any) -> list[tuple[int, float | None]]:
    return [(token, value) for value, token, _ in answer["meta_info"]["input_token_logprobs"]]


def test_prompts_are_scored_as_their_texts_were_generated(server: Served) -> None:
    body = {"sampling_params": {"temperature": 0, "max_new_tokens": 40}, "return_logprob": True}
    first = server.post("/generate", text=PROMPT, **body)
    made = first["meta_info"]["output_token_logprobs"]
    text = [*TOKENIZER.encode(PROMPT), *first["output_ids"]]
    for start in (0, len(text) - 30):
        again = server.post("/generate", input_ids=text, logprob_start_len=start, **body)
        found = scores_of(again)
        assert [token for token, _ in found] == text[start:]
        assert found[0][1] is None
        for (_, value), (expected, _, _) in zip(found[-29:], made[-29:], strict=True):
            assert value == pytest.approx(expected, abs=1e-4)
        cached = again["meta_info"]["cached_tokens"]
        assert cached <= max(0, start - 1)
        assert cached >= start // 2
        server.same(f"scored {start}", again["output_ids"])
    rounded = [None if value is None else round(value, 3) for _, value in scores_of(
        server.post("/generate", input_ids=text, logprob_start_len=0, **body)
    )]  # fmt: skip
    by_openai = server.post(
        "/v1/completions", model="pycoder", prompt=text, max_tokens=0, echo=True, logprobs=1
    )["choices"][0]
    given = by_openai["logprobs"]["token_logprobs"]
    assert given[0] is None
    assert given[1:] == pytest.approx(rounded[1:], abs=2e-3)
    by_sdk = server.sdk.generate(text, temperature=0, max_new_tokens=1, prompt_logprobs=2)
    entries = by_sdk.outputs[0].prompt_logprobs
    assert [entry.token for entry in entries] == text[1:]
    assert [entry.value for entry in entries] == pytest.approx(rounded[1:], abs=2e-3)
    [first_chunk, *others] = server.sdk.stream(text, max_new_tokens=4, prompt_logprobs=0)
    assert len(first_chunk.prompt_logprobs) == len(text) - 1
    assert not any(chunk.prompt_logprobs for chunk in others)


def test_echo_and_prompt_logprobs_of_a_completion(server: Served) -> None:
    body = {"model": "pycoder", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    plain = server.post("/v1/completions", **body)["choices"][0]
    echoed = server.post("/v1/completions", **body, echo=True, prompt_logprobs=2)
    [choice] = echoed["choices"]
    assert choice["text"] == PROMPT + plain["text"]
    assert len(choice["prompt_logprobs"]) == len(TOKENIZER.encode(PROMPT))
    assert "prompt_logprobs: " in server.refused(
        "/v1/completions", **body, prompt_logprobs=1, stream=True
    )


def test_text_ends_behind_a_stop_string_where_it_is_kept(server: Served) -> None:
    free = str(server.generate(ignore_eos=True)["text"])
    stop = free[9:14]
    at = free.index(stop)
    for keep, length in ((False, at), (True, at + len(stop))):
        answer = server.generate(stop=[stop], include_stop_str_in_output=keep)
        assert answer["text"] == free[:length]
        by_openai = server.post(
            "/v1/completions", model="pycoder", prompt=PROMPT, max_tokens=40, temperature=0,
            stop=stop, include_stop_str_in_output=keep,
        )  # fmt: skip
        assert by_openai["choices"][0]["text"] == free[:length]
        by_sdk = server.sdk.generate(
            PROMPT, temperature=0, max_new_tokens=40, stop=stop, include_stop_str_in_output=keep
        )
        assert by_sdk.text == free[:length]


def test_best_of_returns_the_likeliest_samples(server: Served) -> None:
    body = {"model": "pycoder", "prompt": PROMPT, "max_tokens": 12, "temperature": 1, "seed": 5}
    drawn = server.post("/v1/completions", **body, n=4, logprobs=0)["choices"]
    means = {
        choice["text"]: sum(choice["logprobs"]["token_logprobs"])
        / len(choice["logprobs"]["token_logprobs"])
        for choice in drawn
    }
    assert len(means) == 4
    best = server.post("/v1/completions", **body, n=2, best_of=4)["choices"]
    texts = [choice["text"] for choice in best]
    assert texts == sorted(means, key=lambda text: -means[text])[:2]
    server.same("best_of", texts)


def test_speculation_was_on(server: Served) -> None:
    if server.drafter == "none":
        return
    stats = server.sdk.stats()
    assert stats.spec_accepted_tokens > 20
