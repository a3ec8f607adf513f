"""Incremental detokenization: whole characters only, stop strings held back and trimmed."""

from collections.abc import Sequence
from typing import Protocol

from ..engine_core.messages import FinishReason

REPLACEMENT = "\ufffd"
_PROMPT_TAIL = 5  # tokens of context: decoders treat the first token of a text differently
_MAX_PENDING = 16  # tokens without a whole character after which the window moves anyway
_KEPT = 8  # tokens kept then; a character has at most 4 bytes, so 4 tokens


class Decoder(Protocol):
    """What detokenization needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens."""
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids."""
        ...


class CharacterStream:
    """Tokens in, whole characters out; the text does not depend on how tokens are grouped.

    Only a short window of tokens is ever decoded, so a token costs O(1). The end of the window
    that decodes to U+FFFD may be half a character and waits for the next token.
    """

    def __init__(self, tokenizer: Decoder, prompt: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._dropped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._window = [t for t in prompt[-_PROMPT_TAIL:] if t not in self._dropped]
        self._context = len(self._window)  # tokens of the window that are emitted already
        self._emitted = len(self._decode())  # characters of the window's text emitted already

    def push(self, token: int) -> str:
        """Take one token and return the characters that are certain now."""
        if token in self._dropped:
            return ""
        self._window.append(token)
        text = self._decode()
        if not text.endswith(REPLACEMENT):
            new = text[self._emitted :]
            if new:
                self._move(self._context, 0)
            return new
        certain = text.rstrip(REPLACEMENT)
        if len(self._window) - self._context >= _MAX_PENDING:
            certain = text[:-1]  # bytes this far back never form a character
        new = certain[self._emitted :]
        self._emitted = max(self._emitted, len(certain))
        if len(self._window) - self._context >= _MAX_PENDING:
            self._move(len(self._window) - _KEPT, len(text) - self._emitted)
        return new

    def flush(self) -> str:
        """Return what was held back: no token follows, so a U+FFFD at the end is real."""
        new = self._decode()[self._emitted :]
        self._emitted += len(new)
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special=False)

    def _move(self, start: int, held: int) -> None:
        """Drop the tokens before ``start``; the last ``held`` characters are not emitted yet."""
        self._window = self._window[start:]
        self._context = len(self._window)
        self._emitted = len(self._decode()) - held


class StopHold:
    """Holds text back while it may become one of the stop strings.

    Where a request ends is the core's decision: a whole stop string that did not end it (it lies
    within ``min_new_tokens``) is text. So only the one that the last token completes is cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> str:
        """Take text that ended nothing; return the part no later match can start in."""
        if not self._stops:
            return text
        held = self._held + text
        cut = len(held) - max(begun_length(held, stop) for stop in self._stops)
        self._held = held[cut:]
        return held[:cut]

    def finish(self, last: str, matched: str | None, keep: bool) -> str:
        """Return the rest, ``last`` being the last token's text, up to what it completed.

        ``keep``: up to the end of that.
        """
        rest, closed = self._held + last, len(self._held)
        self._held = ""
        if matched is not None:
            position = rest.find(matched, max(0, closed - len(matched) + 1))
            if position >= 0:
                return rest[: position + len(matched) * keep]
        return rest


def begun_length(text: str, word: str) -> int:
    """Length of the longest end of ``text`` that is a proper prefix of ``word``."""
    longest = min(len(word) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)


class Detokenizer:
    """Text of one request: characters, then the stop rules, then the trim at its finish.

    The core decides where a request ends; here only its text is cut. A stop token is left out of
    the text, a stop string and all after it too, unless ``no_stop_trim``; ``include_stop`` leaves
    out only what comes after it.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        prompt: Sequence[int],
        *,
        stops: Sequence[str] = (),
        skip_special: bool = True,
        no_stop_trim: bool = False,
        include_stop: bool = False,
    ) -> None:
        self._characters = CharacterStream(tokenizer, prompt, skip_special)
        self._stop = StopHold(stops)
        self._trim = not no_stop_trim
        self._include = include_stop

    def push(self, tokens: Sequence[int], finish: FinishReason | None = None) -> str:
        """Take the tokens after the last call and return the new text."""
        if finish is None:
            return self._stop.push("".join(map(self._characters.push, tokens)))
        matched = finish.matched if finish.kind == "stop" else None
        leave_out = self._trim and not self._include
        if leave_out and isinstance(matched, int) and tokens and tokens[-1] == matched:
            tokens = tokens[:-1]
        *earlier, last = [self._characters.push(token) for token in tokens] or [""]
        released = self._stop.push("".join(earlier))
        cut = matched if self._trim and isinstance(matched, str) else None
        return released + self._stop.finish(last + self._characters.flush(), cut, self._include)
