"""Bad words become the sequences that a model could write them with."""

import pytest

from outrider.engine_core.refusal import RefusedError
from outrider.engine_core.sampling_params import SamplingParams
from outrider.frontend.bad_words import ban_words
from outrider.frontend.no_tokenizer import NoTokenizer
from outrider.frontend.tokenizer import Tokenizer

from .fake_core import MODEL, TOKENIZER


def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def test_a_word_is_banned_alone_and_after_a_space() -> None:
    params = SamplingParams(bad_words=("return", " self"), bad_words_ids=((1, 2),))
    made = ban_words(params, TOKENIZER)
    assert made.bad_words == ()
    assert made.bad_words_ids == (
        (1, 2), encode("return"), encode(" return"), encode("self"), encode(" self")
    )  # fmt: skip


class Words(Tokenizer):
    """One token a word, and one for a space in front of everything."""

    def __init__(self) -> None:
        pass

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [0] * text.startswith(" ") + [len(word) for word in text.split()]


def test_a_spaced_form_that_ends_in_the_bare_one_adds_nothing() -> None:
    made = ban_words(SamplingParams(bad_words=("one three",)), Words())
    assert made.bad_words_ids == ((3, 5),)


def test_words_named_twice_are_one_and_none_change_nothing() -> None:
    once = ban_words(SamplingParams(bad_words=("def",)), TOKENIZER)
    twice = ban_words(SamplingParams(bad_words=("def", " def")), TOKENIZER)
    assert twice.bad_words_ids == once.bad_words_ids
    params = SamplingParams()
    assert ban_words(params, TOKENIZER) is params


def test_words_need_a_tokenizer() -> None:
    with pytest.raises(RefusedError) as caught:
        ban_words(SamplingParams(bad_words=("x",)), NoTokenizer(MODEL))
    assert caught.value.refused.field == "bad_words"
