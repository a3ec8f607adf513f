"""The token sequences that stand for words which may not be generated."""

import msgspec

from ..engine_core.refusal import Refused, RefusedError
from ..engine_core.sampling_params import SamplingParams
from ..engine_core.token_bans import MAX_BAN_TOKENS
from .tokenizer import Tokenizer


def ban_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """``params`` with ``bad_words`` as sequences of ``bad_words_ids``.

    A word is banned as it is tokenized at the start of a text and after a space, as in vLLM.
    Raises RefusedError for a word without tokens or with too many.
    """
    if not params.bad_words:
        return params
    found = list(params.bad_words_ids)
    for word in params.bad_words:
        bare = tuple(_tokens(word.lstrip(), tokenizer))
        spaced = tuple(_tokens(" " + word.lstrip(), tokenizer))
        found.append(bare)
        if spaced[-len(bare) :] != bare:  # else banning the bare one bans both
            found.append(spaced)
    unique = tuple(dict.fromkeys(found))
    return msgspec.structs.replace(params, bad_words=(), bad_words_ids=unique)


def _tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    try:
        tokens = tokenizer.encode(text, add_special_tokens=False)
    except RefusedError as error:
        refused = msgspec.structs.replace(error.refused, field="bad_words")
        raise RefusedError(refused) from None
    if not tokens:
        raise RefusedError(Refused("bad_words", f"{text!r} has no tokens; leave it out"))
    if len(tokens) > MAX_BAN_TOKENS:
        size = f"{len(tokens)} tokens, more than {MAX_BAN_TOKENS}"
        raise RefusedError(Refused("bad_words", f"{text[:40]!r} has {size}; ban a part of it"))
    return tokens
