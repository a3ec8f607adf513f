"""Request features through the served APIs, with drafters of each kind: the same answers."""

from collections.abc import Iterator

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
    tokens = list(free["output_ids"])  # type: ignore[call-overload]
    bans = [tokens[3:6], tokens[8:10], tokens[12:13]]
    for seed, temperature in ((0, 0), (7, 0.8)):
        answer = server.generate(
            bad_words_ids=bans, ignore_eos=True, temperature=temperature, seed=seed
        )
        found = list(answer["output_ids"])  # type: ignore[call-overload]
        assert len(found) == 40
        assert not any(holds(found, ban) for ban in bans)
        server.same(f"bans {seed}", found)
    body = {"model": "pycoder", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    by_openai = server.post("/v1/completions", **body, bad_words_ids=bans, ignore_eos=True)
    server.same("bans, text", by_openai["choices"][0]["text"])  # type: ignore[index]
    by_sdk = server.sdk.generate(
        PROMPT, bad_words_ids=bans, ignore_eos=True, temperature=0, max_new_tokens=40
    )
    server.same("bans 0", list(by_sdk.token_ids))


def test_a_bad_word_is_missing_from_the_text(server: Served) -> None:
    free = str(server.generate()["text"])
    words = sorted({word for word in free.replace("(", " ").split() if word.isalpha()})
    assert words
    answer = server.generate(bad_words=words, ignore_eos=True)
    found = list(answer["output_ids"])  # type: ignore[call-overload]
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
        found = list(answer["output_ids"])  # type: ignore[call-overload]
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


def test_speculation_was_on(server: Served) -> None:
    if server.drafter == "none":
        return
    stats = server.sdk.stats()
    assert stats.spec_accepted_tokens > 20
