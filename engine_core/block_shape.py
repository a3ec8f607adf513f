"""How much a block draft drafts a round: by flags, or as its config.json says (1.8, 1.18, 2.4).

A block is a chain to the rest of the engine: as many steps as drafts, topk 1.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .draft_config import SpecShape
from .drafter_spec import MAX_DRAFT_TOKENS
from .refusal import Refused
from .spec_shape import refuse_simulation

if TYPE_CHECKING:
    from .config import EngineConfig

_NODES = "speculative_num_draft_tokens"
# The flag of an algorithm's block size, and how many of the block are no drafts.
BLOCK_FLAGS = {
    "DFLASH": ("speculative_dflash_block_size", 1),
    "DSPARK": ("speculative_dspark_block_size", 0),
}


def refuse_block(config: "EngineConfig", algorithm: str) -> Refused | None:
    """The flags of DFLASH's or DSPARK's block by themselves, before the draft is known."""
    drafts = _flagged(config, algorithm)
    if isinstance(drafts, Refused):
        return drafts
    most = MAX_DRAFT_TOKENS if drafts is None else drafts + 1
    return refuse_simulation(config, most)


def resolve_block(
    config: "EngineConfig", algorithm: str, drafts: int, own: SpecShape | None
) -> SpecShape | Refused:
    """The flags' block size first, then ``own``, config.json's, then ``drafts``, the default.

    DSPARK's number of draft tokens must be what the block size says, unless nothing says that.
    """
    flagged, nodes = _flagged(config, algorithm), config.speculative_num_draft_tokens
    if isinstance(flagged, Refused):
        return flagged
    if flagged is not None:
        drafts = flagged
    elif own is not None:
        drafts = own.steps
    elif nodes is not None:
        drafts = nodes - 1
    if nodes is not None and nodes != drafts + 1:
        return Refused(
            _NODES,
            f"{nodes} is not the draft's {drafts} tokens and the bonus token; leave it out, or ask "
            f"for other blocks by {_dashed(BLOCK_FLAGS[algorithm][0])}",
        )
    window = config.speculative_draft_window_size
    if window is not None and window < drafts + 1:
        return Refused(
            "speculative_draft_window_size",
            f"{window} is less than the {drafts + 1} tokens that a step verifies a request; ask "
            "for that or more",
        )
    return refuse_simulation(config, drafts + 1) or SpecShape(drafts, 1, drafts + 1)


def block_notes(
    config: "EngineConfig", algorithm: str, own: SpecShape | None, shape: SpecShape
) -> Iterator[str]:
    """What to tell the user of flags that have no say, or that contradict the draft's training."""
    for field, forced in (
        ("speculative_num_steps", shape.steps),
        ("speculative_eagle_topk", shape.topk),
    ):
        given = getattr(config, field)
        if given not in (None, forced):
            yield (
                f"{field}: {given} becomes {forced}: {algorithm} drafts a block of {shape.steps} "
                "tokens at once"
            )
    if own is not None and own != shape:
        yield (
            f"{BLOCK_FLAGS[algorithm][0]}: {shape.steps} tokens are drafted, the draft was trained "
            f"for {own.steps}"
        )


def _flagged(config: "EngineConfig", algorithm: str) -> int | Refused | None:
    """Drafts that flags ask for; None where they leave it to the draft."""
    field, anchors = BLOCK_FLAGS[algorithm]
    size, nodes = getattr(config, field), config.speculative_num_draft_tokens
    if size is None:
        return None if nodes is None or algorithm == "DSPARK" else nodes - 1
    drafts: int = size - anchors
    if not 1 <= drafts < MAX_DRAFT_TOKENS:
        low, high = 1 + anchors, MAX_DRAFT_TOKENS - 1 + anchors
        return Refused(field, f"must be between {low} and {high}, got {size}")
    if nodes is not None and nodes != drafts + 1:
        return Refused(
            _NODES,
            f"{nodes} contradicts {_dashed(field)} {size}, with which it is {drafts + 1}; leave "
            "one out",
        )
    return drafts


def _dashed(field: str) -> str:
    return "--" + field.replace("_", "-")
