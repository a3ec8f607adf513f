"""The token that stands for those that a block is to propose (block_drafts.md 1.7)."""

from pathlib import Path

import msgspec

from .block_fields import BlockFields
from .tokenizer_ids import find_mask, own_mask, read_tokenizer

_WRITE = "write the id that the draft was trained with as mask_token_id"


def mask_token_id(fields: BlockFields, vocab_size: int, tokenizer: Path | None) -> int:
    """Its id in the target's vocabulary of ``vocab_size`` tokens, whose embedding it is.

    ``tokenizer``: folder of the target's tokenizer, for drafts that name the token only. Raises
    ValueError for a token that cannot be resolved or has no row in the embedding.
    """
    given = fields.find("mask_token_id", int)
    if given is None:
        if fields.algorithm == "DSPARK" or fields.speculators is not None:
            raise ValueError(f"mask_token_id: missing; {_WRITE}")
        return _named(fields, vocab_size, tokenizer)
    if not 0 <= given < vocab_size:
        raise ValueError(
            f"mask_token_id: {given} is outside the target's vocabulary of {vocab_size}, whose "
            "embedding is not extended; use a draft that was trained for this target"
        )
    if fields.algorithm == "DFLASH" and tokenizer is not None:
        _refuse_another(given, tokenizer)
    return given


def _refuse_another(given: int, tokenizer: Path) -> None:
    """Raise if the tokenizer has a mask token and it is not ``given``."""
    try:
        own = own_mask(tokenizer)
    except (OSError, msgspec.MsgspecError):
        return  # without a tokenizer the explicit id stands
    if own is not None and own.id not in (None, given):
        raise ValueError(
            f"mask_token_id: {given}, but the target's tokenizer has the mask token {own.text!r} = "
            f"{own.id}; use a draft that was trained with this tokenizer"
        )


def _named(fields: BlockFields, vocab_size: int, tokenizer: Path | None) -> int:
    name = fields.find("mask_token", str)
    if name == "":
        raise ValueError(f"mask_token: must not be empty; {_WRITE}")
    if tokenizer is None:
        raise ValueError(
            f"mask_token_id: missing, and finding it by name needs the target's tokenizer; {_WRITE}"
        )
    try:
        known = read_tokenizer(tokenizer)
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(
            f"mask_token_id: missing, and it cannot be looked up in {tokenizer}: {error}; {_WRITE}"
        ) from None
    # A token that the tokenizer lacks was added to it in training, behind all others.
    mask = find_mask(known, name)
    found = known.next_id() if mask.id is None else mask.id
    if found >= vocab_size:
        raise ValueError(
            f"mask_token: {mask.text!r} would be token {found}, outside the target's vocabulary of "
            f"{vocab_size}, whose embedding is not extended; {_WRITE}"
        )
    return found
