"""Stop strings over real tokenizers, byte pieces and long windows."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from outrider.engine_core.tail_decoder import StopTail, TokenizersTail

from .byte_tail import PIECES, ByteTail

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
