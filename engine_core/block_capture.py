"""Which layers of the target a block draft takes (block_drafts.md 1.5)."""

from collections.abc import Sequence
from typing import NamedTuple

from .block_fields import BlockFields


class Capture(NamedTuple):
    """``layers``: those whose entering streams are captured, ascending, each once. ``fc_order``:
    see BlockConfig.
    """

    layers: tuple[int, ...]
    fc_order: tuple[int, ...]


def block_capture(fields: BlockFields, target_layers: int, draft_layers: int) -> Capture:
    """What the config names, else the rule of all trainers. Raises ValueError.

    ``target_layer_ids`` are layers whose output is taken, counted from 0. speculators'
    ``aux_hidden_state_layer_ids`` are streams: i is what enters layer i.
    """
    if fields.speculators is not None:
        name = "aux_hidden_state_layer_ids"
        given = fields.find(name, tuple[int, ...])
        if given is None:
            raise ValueError(f"{name}: missing; write the streams that the draft was trained on")
        return _capture(name, given, given, target_layers + 1, "streams, the embedding's first,")
    name = "target_layer_ids"
    given = fields.find(name, tuple[int, ...])
    if given is None:
        given = spread_layers(target_layers, draft_layers)
    if given is None:
        raise ValueError(
            f"{name}: missing, and there is no rule for a target of {target_layers} layers; write "
            "those that the draft was trained on"
        )
    return _capture(name, given, [i + 1 for i in given], target_layers, "layers")


def spread_layers(target_layers: int, draft_layers: int) -> tuple[int, ...] | None:
    """Layers whose output is taken where nothing names any: as many as the draft has, spread
    evenly. None for a target of too few, of which there is no rule.
    """
    if draft_layers == 1:
        return (target_layers // 2,)
    first, last = 1, target_layers - 3
    if last < first:
        return None
    # round() goes to the even neighbour, as the trainers' does.
    step = (last - first) / (draft_layers - 1)
    return tuple(round(first + i * step) for i in range(draft_layers))


def _capture(
    name: str, given: Sequence[int], streams: Sequence[int], count: int, what: str
) -> Capture:
    outside = [i for i in given if not 0 <= i < count]
    if not given or outside:
        wrong = f"{outside[0]} is none of" if given else "is empty; there are"
        raise ValueError(
            f"{name}: {wrong} the {count} {what} of the target; name those that the draft was "
            "trained on"
        )
    layers = tuple(sorted(set(streams)))
    return Capture(layers, tuple(layers.index(stream) for stream in streams))
