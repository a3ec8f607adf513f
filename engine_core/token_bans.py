"""Tokens that a request rules out: sequences at every position, and all that it does not allow."""

from collections.abc import Collection, Sequence

from .refusal import Refused

MAX_BANS = 1024
MAX_BAN_TOKENS = 32
_DEAD_END = "a position could be left without any token to choose; forbid fewer tokens"


def refuse_bans(
    bad_words: Sequence[str],
    bans: Sequence[Sequence[int]],
    allowed: Sequence[int] | None,
    vocab_size: int,
) -> Refused | None:
    """Why these bans and this list of allowed tokens cannot be served, or None."""
    if any(not word.strip() for word in bad_words):
        return Refused("bad_words", "a word must have more than spaces; leave it out instead")
    for field, count in (("bad_words", len(bad_words)), ("bad_words_ids", len(bans))):
        if count > MAX_BANS:
            return Refused(field, f"at most {MAX_BANS} sequences, got {count}")
    for ban in bans:
        if not 1 <= len(ban) <= MAX_BAN_TOKENS:
            reason = (
                f"a sequence has between 1 and {MAX_BAN_TOKENS} tokens, got {len(ban)}; shorten "
                "it, or leave it out"
            )
            return Refused("bad_words_ids", reason)
        outside = _outside(ban, vocab_size)
        if outside is not None:
            return Refused("bad_words_ids", outside)
    if allowed is None:
        return None
    if not allowed:
        return Refused("allowed_token_ids", "must name at least one token; leave it out for all")
    outside = _outside(allowed, vocab_size)
    return None if outside is None else Refused("allowed_token_ids", outside)


def refuse_dead_end(
    bans: Sequence[Sequence[int]],
    allowed: Sequence[int] | None,
    ends: Collection[int],
    vocab_size: int,
) -> Refused | None:
    """Refuse what might forbid every token at some position. ``ends``: tokens masked besides."""
    if not bans and allowed is None:
        return None
    masked = {ban[-1] for ban in bans}.union(ends)
    if allowed is not None:
        return None if set(allowed) - masked else Refused("allowed_token_ids", _DEAD_END)
    return Refused("bad_words_ids", _DEAD_END) if len(masked) >= vocab_size else None


def _outside(tokens: Sequence[int], vocab_size: int) -> str | None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            return f"{token} is outside the vocabulary of {vocab_size} tokens"
    return None
