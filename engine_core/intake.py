"""What a new request must satisfy before it may wait, and its seed."""

import numpy as np

from .config import CoreConfig
from .ids import i32
from .messages import GenerateRequest
from .refusal import Refused
from .token_bans import refuse_dead_end

_MASK = 2**64 - 1


def refuse_request(message: GenerateRequest, config: CoreConfig, has_tail: bool) -> Refused | None:
    """Return why this request can never be served, or None."""
    params = message.params
    if not message.rid:
        return Refused("rid", "must not be empty")
    refused = params.refuse(config.worker.vocab_size)
    if refused is not None:
        return refused
    if params.n != 1:
        return Refused("n", f"is {params.n} here; send one request for each sequence")
    if params.bad_words:
        return Refused("bad_words", "are words here; send their tokens as bad_words_ids")
    refused = _refuse_dead_end(message, config)
    if refused is not None:
        return refused
    if params.stop and not has_tail:
        return Refused("stop", "stop strings need the model's tokenizer; use stop_token_ids", 501)
    if message.priority != 0 and not config.engine.enable_priority_scheduling:
        return Refused("priority", "needs --enable-priority-scheduling; leave it out or at 0")
    return _refuse_prompt(message, config)


def request_cap(message: GenerateRequest, config: CoreConfig) -> int:
    """Prompt and output tokens at which a request ends: its wish, clipped to the context."""
    prompt_len = len(message.prompt) // 4
    return min(prompt_len + message.params.max_new_tokens, config.context_length)


def derive_seed(random_seed: int, count: int) -> int:
    """Signed 64-bit seed of the ``count``-th request without one (SplitMix64)."""
    z = (random_seed + (count + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z


def _refuse_dead_end(message: GenerateRequest, config: CoreConfig) -> Refused | None:
    params = message.params
    ends: set[int] = set()
    if params.min_new_tokens:
        ends.update(params.stop_token_ids, () if params.ignore_eos else config.worker.eos_ids)
    vocab_size = config.worker.vocab_size
    return refuse_dead_end(params.bad_words_ids, params.allowed_token_ids, ends, vocab_size)


def _refuse_prompt(message: GenerateRequest, config: CoreConfig) -> Refused | None:
    if len(message.prompt) % 4 or not message.prompt:
        return Refused("prompt", f"must be one or more int32 tokens, got {len(message.prompt)} B")
    tokens, start = i32(message.prompt), message.params.logprob_start_len
    if start > len(tokens):
        reason = f"is {start} of a prompt of {len(tokens)} tokens; must be no more than that"
        return Refused("logprob_start_len", reason)
    wrong = np.flatnonzero((tokens < 0) | (tokens >= config.worker.vocab_size))
    if len(wrong):
        return Refused(
            "prompt",
            f"token {tokens[wrong[0]]} at {wrong[0]} is outside the vocabulary of "
            f"{config.worker.vocab_size} tokens",
        )
    new = min(1, message.params.max_new_tokens)
    if len(tokens) + new > config.context_length:
        return Refused(
            "prompt",
            f"{len(tokens)} tokens leave no room in the context of {config.context_length}; "
            "shorten the prompt",
            413,
        )
    # The last token of a request never gets KV, unless only KV was asked for.
    stored = max(len(tokens), request_cap(message, config) - 1)
    capacity = config.worker.num_pages * config.worker.page_size
    if stored > capacity:
        return Refused(
            "max_new_tokens" if len(tokens) <= capacity else "prompt",
            f"prompt and new tokens need {stored} tokens of KV and the pool has {capacity}; "
            "ask for fewer or raise --max-total-tokens",
            413,
        )
    return None
