"""A draft that training goes on from, instead of from random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...engine_core.refusal import Refused, RefusedError
from .export import CONFIG, WEIGHTS
from .narrow_mlp import narrowed
from .recipe import Recipe

# Fields of config.json that say nothing of what the weights compute.
_FREE = ("outrider", "torch_dtype", "use_cache", "bos_token_id", "eos_token_id")
_WIDTH = "intermediate_size"
_MARKOV = ("markov_rank", "markov_head_type")
# What reads the Markov head's embedding, and so has its width, begins anew with it.
_BESIDE_MARKOV = ("markov_head.", "confidence_head.")


def start_from(folder: Path, recipe: Recipe) -> str | None:
    """Set the recipe's parameters to a draft's that ``outrider train`` wrote.

    The recipe's MLPs may be narrower: they keep the neurons that weigh most. A block draft may
    have further layers, which add nothing at first, and another Markov head, which begins anew
    beside the confidence head. Returns what of this there is, in words. Raises RefusedError for a
    draft that differs otherwise, naming what.
    """
    exported = recipe.export(torch.float32)
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        tensors = load_file(folder / WEIGHTS)
        fields = dict(config)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise _refused(f"{str(folder)!r} is no draft of outrider train ({error})") from None
    layers = _further_layers(fields, exported.config)
    if layers:
        fields |= {name: exported.config[name] for name in ("num_hidden_layers", "layer_types")}
    markov = _other_markov(fields, exported.config)
    if markov:
        _take(fields, exported.config, _MARKOV)
    width, kept = fields.get(_WIDTH), exported.config.get(_WIDTH)
    said = []
    if isinstance(width, int) and isinstance(kept, int) and width > kept:
        fields[_WIDTH] = kept
        tensors = narrowed(tensors, width, kept)
        said.append(f"MLPs keep {kept} of {width} neurons")
    for name, value in exported.config.items():
        if name not in _FREE and fields.get(name) != value:
            raise _refused(
                f"{str(folder)!r} has {name} {fields.get(name)!r}, this run {value!r}; give flags "
                "that agree, or another draft"
            )
    heads = _BESIDE_MARKOV if markov else ()
    anew = tuple(f"layers.{index}." for index in layers) + heads
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(heads)}
    wanted = {n: tensor for n, tensor in exported.tensors.items() if not n.startswith(anew)}
    if tensors.keys() != wanted.keys():
        name = min(tensors.keys() ^ wanted.keys())
        where = "has a tensor" if name in tensors else "lacks the tensor"
        raise _refused(f"{str(folder)!r} {where} {name}, unlike a draft of this run")
    for name, tensor in wanted.items():
        if tensors[name].shape != tensor.shape:
            there, here = tuple(tensors[name].shape), tuple(tensor.shape)
            raise _refused(f"{str(folder)!r}: {name} is {there}, in this run {here}")
        if name not in recipe.parameters and not torch.equal(tensors[name], tensor.cpu()):
            raise _refused(f"{str(folder)!r} has another draft vocabulary ({name}) than this run")
    recipe.adopt({**exported.tensors, **tensors})
    new = [f"layers.{index}" for index in layers] + ["the Markov and confidence heads"] * markov
    if new:
        said.insert(0, f"new are {', '.join(new)}")
    return "; ".join(said) or None


def _further_layers(there: dict[str, Any], here: dict[str, Any]) -> range:
    """Layers of this run's block draft behind those of the other one."""
    types, own = there.get("layer_types"), here.get("layer_types")
    if not isinstance(types, list) or not isinstance(own, list) or own[: len(types)] != types:
        return range(0)
    same = there.get("num_hidden_layers") == len(types)
    return range(len(types), len(own)) if same else range(0)


def _other_markov(there: dict[str, Any], here: dict[str, Any]) -> bool:
    """Whether both have a Markov head, of another kind or rank."""
    both = all(name in here and there.get(name) is not None for name in _MARKOV)
    return both and any(there[name] != here[name] for name in _MARKOV)


def _take(fields: dict[str, Any], others: dict[str, Any], names: tuple[str, ...]) -> None:
    """Make these fields those of ``others``, and under dflash_config where they are the same."""
    nested = fields.get("dflash_config")
    if isinstance(nested, dict) and all(nested.get(name) == fields[name] for name in names):
        fields["dflash_config"] = {**nested, **{name: others[name] for name in names}}
    for name in names:
        fields[name] = others[name]


def _refused(reason: str) -> RefusedError:
    return RefusedError(Refused("initial_draft", reason))
