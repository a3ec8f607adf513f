"""A toy tokenizer whose tokens are byte strings, as a tail decoder."""

from collections.abc import Sequence

from outrider.engine_core.tail_decoder import REPLACEMENT

PIECES: tuple[bytes, ...] = (
    b"a", b"b", b"c", b"ab", b"bc", b"abc", b" ", b"\n", b"x",
    b"\xc3", b"\xa9", b"\xe6", b"\x97", b"\xa5", "日".encode(), b"<end>", b"",
)  # fmt: skip
SPECIAL = frozenset({15})
EOS = frozenset({8})


class ByteTail:
    """Counts the tokens it decodes, to show that the windows stay short."""

    def __init__(self) -> None:
        self.decoded = 0

    def visible(self, token: int, skip_special_tokens: bool) -> bool:
        return bool(PIECES[token]) and not (skip_special_tokens and token in SPECIAL)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        self.decoded += len(tokens)
        kept = (t for t in tokens if not (skip_special_tokens and t in SPECIAL))
        return b"".join(PIECES[t] for t in kept).decode(errors="replace")


def whole_text(tokens: Sequence[int], skip_special_tokens: bool) -> str:
    return ByteTail().decode(tokens, skip_special_tokens).rstrip(REPLACEMENT)
