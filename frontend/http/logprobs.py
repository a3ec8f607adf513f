"""Log-probabilities in the shapes of completions, chat and the native endpoint."""

from collections.abc import Sequence

import msgspec

from ...engine_core.ids import f32, i32
from ...engine_core.plan import TokenLogprobs
from ..tokenizer import Tokenizer


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's completion log-probabilities; ``text_offset``: characters before each token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
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


def completion_logprobs(
    entries: Sequence[TokenLogprobs], tokenizer: Tokenizer, offset: int
) -> CompletionLogprobs:
    """OpenAI completion form of consecutive tokens; ``offset``: characters before the first."""
    tokens = [tokenizer.token_text(entry.token) for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[entry.value for entry in entries],
        top_logprobs=[_top_by_text(entry, tokenizer) for entry in entries],
        text_offset=offsets,
    )


def _top_by_text(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """Best tokens by text; of tokens with equal text (parts of characters) the best one stays."""
    found: dict[str, float] = {}
    for token, value in top_of(entry):
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


NativeLogprob = tuple[float, int, str | None]


def native_logprob(
    token: int, value: float, tokenizer: Tokenizer, with_text: bool
) -> NativeLogprob:
    """SGLang's triple: log-probability, token id, text or null."""
    return value, token, tokenizer.token_text(token) if with_text else None
