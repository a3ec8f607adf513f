"""Stop strings over real tokenizers, byte pieces and long windows."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from outrider.engine_core.tail_decoder import StopTail, TokenizersTail

from .byte_tail import PIECES, ByteTail, whole_text

PYCODER = Path(__file__).parents[2] / "models" / "pycoder-11m" / "tokenizer.json"


def first_match(tail: StopTail, tokens: list[int]) -> tuple[int, str] | None:
    for i, token in enumerate(tokens):
        if (found := tail.push(token, True)) is not None:
            return i, found
    return None


@pytest.fixture(scope="module")
def byte_level() -> TokenizersTail:
    return TokenizersTail(str(PYCODER))


@pytest.mark.parametrize("stop", ["é", "日本", "\n\n", "return x", "x)", "  # 日"])
def test_a_stop_is_found_with_the_token_that_completes_it(
    byte_level: TokenizersTail, stop: str
) -> None:
    text = "def é(x):\n    return x)  # 日本\n\nmore text after it"
    tokenizer = Tokenizer.from_file(str(PYCODER))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    found = first_match(StopTail(byte_level, [stop], True), ids)
    assert found is not None
    at, matched = found
    assert matched == stop
    assert stop in tokenizer.decode(ids[: at + 1])
    assert stop not in tokenizer.decode(ids[:at])


def test_special_tokens_are_text_only_when_they_are_shown(byte_level: TokenizersTail) -> None:
    tokenizer = Tokenizer.from_file(str(PYCODER))
    special = next(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
    name = str(tokenizer.id_to_token(special))
    ids: list[int] = tokenizer.encode("ab cd", add_special_tokens=False).ids
    with_special = [*ids[:1], special, *ids[1:]]
    assert first_match(StopTail(byte_level, [name], True), with_special) is None
    assert first_match(StopTail(byte_level, [name], False), with_special) == (1, name)
    assert byte_level.visible(special, False)
    assert not byte_level.visible(special, True)
    assert not byte_level.visible(10**9, False)


def sentence_piece(path: Path) -> None:
    vocab = {"<unk>": 0, "▁a": 1, "▁foo": 2, "foo": 3, "a": 4, "b": 5, "▁": 6}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.save(str(path))


def test_the_first_generated_word_keeps_its_space(tmp_path: Path) -> None:
    sentence_piece(tmp_path / "tokenizer.json")
    tail = TokenizersTail(str(tmp_path / "tokenizer.json"))
    assert tail.decode([2, 5], True) == " foob"
    assert first_match(StopTail(tail, [" foo"], True), [2, 5]) == (0, " foo")
    assert first_match(StopTail(tail, [" foo"], True), [5, 3, 5]) is None


def test_without_a_one_letter_token_there_is_no_anchor(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "foo": 1}, unk_token="<unk>"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TokenizersTail(str(tmp_path / "tokenizer.json")).decode([1], True) == "foo"


def test_files_that_are_no_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TokenizersTail(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"bad\.json"):
        TokenizersTail(str(tmp_path / "bad.json"))


def test_the_stop_that_starts_first_wins() -> None:
    tail = StopTail(ByteTail(), ["c", "bc", "abc"], True)
    assert first_match(tail, [8, 5]) == (1, "abc")


STOPS = ("\ufffd", "\ufffd\ufffd", "a\ufffd", "\ufffdb", "日", "é", "b日", "日é", "cab", "x\nx")
# Parts of characters are the rule, so that windows are cut in them.
tokens = st.sampled_from([*range(len(PIECES)), *[9, 10, 11, 12, 13] * 4])


def test_a_stop_ends_in_the_newest_tokens_text() -> None:
    """Also where it is or begins with a character that is no text, against the whole text."""
    reached = Counter[str]()

    @given(
        st.lists(tokens, min_size=45, max_size=60),
        st.lists(st.sampled_from(STOPS), min_size=1, max_size=3, unique=True),
        st.integers(0, 40),
    )
    def check(sequence: list[int], stops: list[str], closed: int) -> None:
        tail = StopTail(ByteTail(), stops, True)
        for i, token in enumerate(sequence):
            found = tail.push(token, i >= closed)
            text, before = (whole_text(sequence[:end], True) for end in (i + 1, i))
            ends = {stop: text.find(stop, max(0, len(before) - len(stop) + 1)) for stop in stops}
            begun = sorted((at, stops.index(stop)) for stop, at in ends.items() if at >= 0)
            if i < closed or not begun:
                reached["closed"] += bool(begun)
                assert found is None
                continue
            assert found == stops[begun[0][1]]
            reached["no text"] += "\ufffd" in found
            reached["text"] += "\ufffd" not in found
            reached["behind a cut window"] += i > 24
            return

    check()
    assert min(reached[name] for name in ("closed", "no text", "text", "behind a cut window")) > 5


def test_a_character_that_a_window_cuts_is_no_stop() -> None:
    """A character of three tokens, and then more one-byte tokens than a window holds."""
    for before in range(4):
        tail = StopTail(ByteTail(), ["\ufffd"], True)
        assert first_match(tail, [8] * before + [11, 12, 13] + [8] * 40) is None
        assert first_match(tail, [9, 8]) == (1, "\ufffd")


def test_a_stop_of_many_tiny_tokens_among_hidden_ones_is_found() -> None:
    hidden = PIECES.index(b"<end>")
    stop = "abc" * 60
    tokens = [8] * 500
    for letter in stop:
        tokens += [hidden, PIECES.index(letter.encode()), PIECES.index(b"")]
    found = first_match(StopTail(ByteTail(), [stop, "never"], True), tokens)
    assert found == (len(tokens) - 2, stop)


def test_a_long_stop_costs_a_short_window_until_its_end_is_in_sight() -> None:
    decoder = ByteTail()
    tail = StopTail(decoder, ["x" * 5000 + "abcabcabc"], True)
    for _ in range(100):
        tail.push(0, True)
    assert decoder.decoded < 100 * 20
