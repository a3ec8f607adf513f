"""What an answer repeats of its prompt: token ids and their log-probabilities."""

from collections.abc import Sequence

import msgspec

from ...engine_core.plan import TokenLogprobs
from ..expand import GenerateItem
from ..service import AsyncService
from ..tokenizer import Tokenizer
from .logprobs import ScoredToken, top_of


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's entry of one token at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


async def with_ids(items: Sequence[GenerateItem], service: AsyncService) -> list[GenerateItem]:
    """The items with their prompts as token ids. Raises RefusedError."""
    return [
        msgspec.structs.replace(item, prompt=await service.tokens_of(item.prompt)) for item in items
    ]


def ids_of(item: GenerateItem) -> list[int]:
    """The prompt of an item of :func:`with_ids`."""
    assert isinstance(item.prompt, list)
    return item.prompt


def scored_prompt(item: GenerateItem, entries: Sequence[TokenLogprobs]) -> list[ScoredToken]:
    """The prompt's tokens from ``logprob_start_len`` on, the first of them without a score.

    So SGLang answers, wherever they start. ``item``: with token ids. Empty where the request
    ended before the scores were there.
    """
    start = item.params.logprob_start_len
    ids = ids_of(item)[start:]
    if not ids or len(entries) != len(ids) - (start == 0):
        return []
    first: list[ScoredToken] = [(ids[0], None)]
    return first + [(entry.token, entry) for entry in entries[start > 0 :]]


def prompt_logprobs(
    tokens: Sequence[ScoredToken], tokenizer: Tokenizer, top: int
) -> PromptLogprobs:
    """vLLM's form: at each position the prompt's token and the ``top`` best, by token id."""
    return [None if entry is None else _by_id(entry, tokenizer, top) for _, entry in tokens]


def _by_id(entry: TokenLogprobs, tokenizer: Tokenizer, top: int) -> dict[str, PromptLogprob]:
    own = (entry.token, entry.value, entry.rank)
    best = ((token, value, rank) for rank, (token, value) in enumerate(top_of(entry)[:top], 1))
    return {
        str(token): PromptLogprob(
            logprob=value, rank=rank, decoded_token=tokenizer.token_text(token)
        )
        for token, value, rank in (own, *(one for one in best if one[0] != entry.token))
    }
