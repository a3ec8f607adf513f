"""Detokenization against whole-text decoding, with the embedded model's real tokenizer."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine_core.messages import FinishReason
from outrider.frontend.detokenizer import CharacterStream, Detokenizer
from outrider.frontend.tokenizer import Tokenizer

MODEL = Path(__file__).parents[2] / "models" / "pycoder-11m"
TOKENIZER = Tokenizer(MODEL)
COMMON = settings(derandomize=True, deadline=None, max_examples=300)
STOP = FinishReason("stop")
LENGTH = FinishReason("length")

# Single-byte tokens make every kind of broken and split character likely.
BYTES = [t for t in range(TOKENIZER.max_id + 1) if len(TOKENIZER.token_bytes(t)) == 1]
TEXTS = st.text(alphabet=st.sampled_from("ab \n你好é🙂👩‍👩‍👧\ufffd<|im_end|>"), max_size=40)
IDS = st.one_of(
    st.lists(st.integers(0, TOKENIZER.max_id), max_size=40),
    st.lists(st.sampled_from(BYTES), max_size=80),
    TEXTS.map(lambda text: TOKENIZER.encode(text)),
)
CUTS = st.lists(st.integers(1, 7), max_size=80)


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    parts, at = [], 0
    for cut in cuts:
        parts.append(ids[at : at + cut])
        at += cut
    return [*parts, ids[at:]]


@pytest.mark.parametrize("skip_special", [True, False])
def test_any_split_gives_the_whole_text(skip_special: bool) -> None:
    reached: Counter[str] = Counter()

    @COMMON
    @given(ids=IDS, cuts=CUTS, prompt=TEXTS)
    def check(ids: list[int], cuts: list[int], prompt: str) -> None:
        prompt_ids = TOKENIZER.encode(prompt)
        detokenizer = Detokenizer(TOKENIZER, prompt_ids, skip_special=skip_special)
        *parts, last = split(ids, cuts)
        text = ""
        for part in parts:
            text += detokenizer.push(part)
            expected = TOKENIZER.decode(ids, skip_special)
            assert expected.startswith(text)
            reached["character held"] += len(text) < len(expected)
        text += detokenizer.push(last, LENGTH)
        assert text == TOKENIZER.decode(ids, skip_special)
        reached["real U+FFFD at the end"] += text.endswith("\ufffd")

    check()
    assert reached["character held"] >= 50
    assert reached["real U+FFFD at the end"] >= 20


def test_long_invalid_run_stays_short_and_is_released() -> None:
    ids = [t for t in BYTES if TOKENIZER.token_bytes(t) >= b"\x80"] * 20
    stream = CharacterStream(TOKENIZER, [], skip_special=True)
    text = ""
    for token in ids:
        text += stream.push(token)
        assert len(stream._window) <= 32
    assert len(text) > 1000
    assert text + stream.flush() == TOKENIZER.decode(ids)


def test_emoji_split_over_tokens_never_shows_a_replacement_character() -> None:
    ids = TOKENIZER.encode("say 🙂🙂")
    assert len(ids) > 6
    detokenizer = Detokenizer(TOKENIZER, [])
    parts = [detokenizer.push([t]) for t in ids]
    assert "".join(parts) == "say 🙂🙂"
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("kept", ["token", "stop", "nothing"])
def test_stop_strings_under_any_split(kept: str) -> None:
    reached: Counter[str] = Counter()
    alphabet = st.text(alphabet="ab\n", max_size=30)
    stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=3)

    @COMMON
    @given(text=alphabet, stops=stops, cuts=CUTS, least=st.integers(0, 12))
    def check(text: str, stops: list[str], cuts: list[int], least: int) -> None:
        ids, matched, start = stopped(TOKENIZER.encode(text), stops, least)
        expected = TOKENIZER.decode(ids)
        if matched is not None:
            reached["same stop earlier"] += expected.index(matched) < start
            ends = {"token": len(expected), "stop": start + len(matched), "nothing": start}
            reached["cut"] += ends["stop"] < len(expected)
            expected = expected[: ends[kept]]
        detokenizer = Detokenizer(
            TOKENIZER, [], stops=stops, no_stop_trim=kept == "token", include_stop=kept == "stop"
        )
        *parts, last = [p for p in split(ids, cuts) if p] or [[]]
        got, pushed = "", 0
        for part in parts:
            got += detokenizer.push(part)
            pushed += len(part)
            assert expected.startswith(got)
            reached["held"] += len(got) < len(TOKENIZER.decode(ids[:pushed]))
        got += detokenizer.push(last, FinishReason("stop", matched) if matched else LENGTH)
        assert got == expected
        reached["matched"] += matched is not None
        reached["released"] += matched is None

    check()
    assert min(reached["matched"], reached["released"]) >= 40
    assert reached["held"] >= 15
    assert min(reached["same stop earlier"], reached["cut"]) >= 5


def stopped(ids: list[int], stops: list[str], least: int) -> tuple[list[int], str | None, int]:
    """End ``ids`` as the core does: at the first token after ``least`` whose text completes a
    stop string; also the stop that starts first, and where.
    """
    for end in range(least + 1, len(ids) + 1):
        text, before = TOKENIZER.decode(ids[:end]), len(TOKENIZER.decode(ids[: end - 1]))
        found = [
            (at, stop)
            for stop in stops
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > before
        ]
        if found:
            at, stop = min(found)
            return ids[:end], stop, at
    return ids, None, 0


def test_a_stop_string_within_min_new_tokens_is_text_and_freezes_no_stream() -> None:
    a, b, end = (TOKENIZER.encode(c)[0] for c in "ab;")
    detokenizer = Detokenizer(TOKENIZER, [], stops=[";"])  # the core keeps the first ";"
    assert [detokenizer.push([t]) for t in (a, end, b)] == ["a", ";", "b"]
    assert detokenizer.push([b, end], FinishReason("stop", ";")) == "b"


def test_prefix_of_a_stop_string_is_held_and_then_released() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], stops=["xyz!"])
    x, y, a = (TOKENIZER.encode(c)[0] for c in "xya")
    assert detokenizer.push([a, x]) == "a"
    assert detokenizer.push([y]) == ""
    assert detokenizer.push([a]) == "xya"


def test_stop_tokens_are_trimmed_and_kept_on_request() -> None:
    a, b = (TOKENIZER.encode(c)[0] for c in "ab")
    finish = FinishReason("stop", b)
    assert Detokenizer(TOKENIZER, []).push([a, b], finish) == "a"
    assert Detokenizer(TOKENIZER, [], no_stop_trim=True).push([a, b], finish) == "ab"
    assert Detokenizer(TOKENIZER, [], include_stop=True).push([a, b], finish) == "ab"
    eos = TOKENIZER.encode("<|endoftext|>")[0]
    shown = Detokenizer(TOKENIZER, [], skip_special=False, no_stop_trim=True)
    assert shown.push([a, eos], FinishReason("stop", eos)) == "a<|endoftext|>"


def test_only_a_bounded_window_is_decoded() -> None:
    lengths: list[int] = []

    class Counting:
        special_ids = TOKENIZER.special_ids

        def decode(self, ids: list[int], skip_special: bool = True) -> str:
            lengths.append(len(ids))
            return TOKENIZER.decode(ids, skip_special)

    ids = TOKENIZER.encode("def f(x):\n    return x + 1\n" * 200)
    detokenizer = Detokenizer(Counting(), ids[:50])  # type: ignore[arg-type]
    for token in ids:
        detokenizer.push([token])
    assert max(lengths) <= 32
    assert len(lengths) <= 2 * len(ids) + 1
