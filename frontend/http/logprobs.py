"""Log-probabilities in the shapes of completions, chat and the native endpoint."""

from collections.abc import Iterable, Sequence

import msgspec

from ...engine_core.ids import f32, i32
from ...engine_core.plan import TokenLogprobs
from ..detokenizer import CharacterStream
from ..tokenizer import Tokenizer


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's completion log-probabilities. A prompt's first token has none.

    ``text_offset``: characters of the answer's text before each token; a token that goes on with a
    character has that of the character, one that is not shown that of what comes next.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token and its log-probability; ``bytes``: its UTF-8 bytes, also of half a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One emitted token of a chat answer, and the best ones at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's chat log-probabilities."""

    content: list[ChatLogprob]


def top_of(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """The best tokens at a position, as (id, log-probability)."""
    ids: list[int] = i32(entry.top_ids).tolist()
    values: list[float] = f32(entry.top_values).tolist()
    return list(zip(ids, values, strict=True))


ScoredToken = tuple[int, TokenLogprobs | None]


class TextOffsets:
    """Where each of an answer's tokens begins in its text; a ``prompt`` before it is not in it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special: bool) -> None:
        self._stream = CharacterStream(tokenizer, prompt, skip_special)
        self._characters = 0

    def take(self, tokens: Iterable[int]) -> list[int]:
        """The characters before each of the next tokens."""
        found = []
        for token in tokens:
            found.append(self._characters)
            self._characters += len(self._stream.push(token))
        return found


def completion_logprobs(
    scored: Sequence[ScoredToken], tokenizer: Tokenizer, offsets: list[int], top: int
) -> CompletionLogprobs:
    """OpenAI completion form of consecutive tokens, with the ``top`` best at each position.

    ``offsets``: of each, see ``TextOffsets``.
    """
    tokens = [tokenizer.token_text(token) for token, _ in scored]
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[None if entry is None else entry.value for _, entry in scored],
        top_logprobs=[
            None if entry is None else _top_by_text(entry, tokenizer, top) for _, entry in scored
        ],
        text_offset=offsets,
    )


def _top_by_text(entry: TokenLogprobs, tokenizer: Tokenizer, top: int) -> dict[str, float]:
    """Best tokens by text; of tokens with equal text (parts of characters) the best one stays."""
    found: dict[str, float] = {}
    for token, value in top_of(entry)[:top]:
        found.setdefault(tokenizer.token_text(token), value)
    return found


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> ChatLogprobs:
    """OpenAI chat form of consecutive tokens."""
    return ChatLogprobs(content=[_chat_entry(entry, tokenizer) for entry in entries])


def _chat_entry(entry: TokenLogprobs, tokenizer: Tokenizer) -> ChatLogprob:
    return ChatLogprob(
        token=tokenizer.token_text(entry.token),
        logprob=entry.value,
        bytes=list(tokenizer.token_bytes(entry.token)),
        top_logprobs=[
            TopLogprob(
                token=tokenizer.token_text(token),
                logprob=value,
                bytes=list(tokenizer.token_bytes(token)),
            )
            for token, value in top_of(entry)
        ],
    )


NativeLogprob = tuple[float | None, int, str | None]


def native_logprob(
    token: int, value: float | None, tokenizer: Tokenizer, with_text: bool
) -> NativeLogprob:
    """SGLang's triple: log-probability, token id, text or null."""
    return value, token, tokenizer.token_text(token) if with_text else None
