"""DSPARK's heads by config.json (block_drafts.md 2.4): the Markov head and the confidence head."""

from collections.abc import Mapping

from .block_fields import BlockFields
from .draft_config import MarkovConfig, MarkovKind
from .safetensors_header import StoredTensor

_KINDS: dict[str, MarkovKind] = {"vanilla": "vanilla", "gated": "gated", "rnn": "rnn"}
CONFIDENCE = "model.confidence_head.proj.weight"


def markov_head(fields: BlockFields) -> MarkovConfig:
    """The head between a block's tokens, without which no DSPARK draft is served.

    Raises ValueError.
    """
    rank = fields.agreed("markov_rank", int)
    if rank is None or rank < 1:
        shown = "missing" if rank is None else f"must be 1 or more, is {rank}"
        raise ValueError(
            f"markov_rank: {shown}; DSPARK drafts have a Markov head: use one that was trained "
            "with it"
        )
    kind = fields.agreed("markov_head_type", str)
    if kind is None:
        if not fields.prefixed:
            raise ValueError(f"markov_head_type: missing; write one of {', '.join(_KINDS)}")
        kind = "vanilla"
    found = _KINDS.get(kind.lower())
    if found is None:
        raise ValueError(f"markov_head_type: {kind!r} is unknown; it is one of {', '.join(_KINDS)}")
    return MarkovConfig(found, rank)


def confidence_head(fields: BlockFields) -> bool:
    """Whether the draft says of its tokens how likely they are accepted; so it does where nothing
    is said. Raises ValueError.
    """
    given = fields.agreed("enable_confidence_head", bool)
    return given is None or given


def confidence_with_markov(
    fields: BlockFields, markov: MarkovConfig, hidden: int, stored: Mapping[str, StoredTensor]
) -> bool:
    """Whether the confidence head reads the Markov embedding beside the ``hidden`` channels.

    Trainers' defaults differ, so that the weight's width decides where there is one. ``stored``:
    the checkpoint's tensors by our names. Raises ValueError where config.json says otherwise.
    """
    given = fields.agreed("confidence_head_with_markov", bool)
    weight = stored.get(CONFIDENCE)
    widths = {(1, hidden): False, (1, hidden + markov.rank): True}
    if weight is None or weight.shape not in widths:  # loading names a wrong shape
        return True if given is None else given
    found = widths[weight.shape]
    if given is not None and given != found:
        raise ValueError(
            f"confidence_head_with_markov: {str(given).lower()}, but the head's weight is "
            f"{list(weight.shape)} beside a hidden size of {hidden} and a rank of {markov.rank}; "
            "correct the field"
        )
    return found
