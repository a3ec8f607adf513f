"""A draft that training goes on from, instead of from random weights."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...engine_core.refusal import Refused, RefusedError
from .export import CONFIG, WEIGHTS
from .recipe import Recipe

# Fields of config.json that say nothing of what the weights compute.
_FREE = ("outrider", "torch_dtype", "use_cache", "bos_token_id", "eos_token_id")


def start_from(folder: Path, recipe: Recipe) -> None:
    """Set the recipe's parameters to a draft's that ``outrider train`` wrote.

    Raises RefusedError for a draft that is not of the recipe's form, naming what differs.
    """
    exported = recipe.export(torch.float32)
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        tensors = load_file(folder / WEIGHTS)
        fields = dict(config)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise _refused(f"{str(folder)!r} is no draft of outrider train ({error})") from None
    for name, value in exported.config.items():
        if name not in _FREE and fields.get(name) != value:
            raise _refused(
                f"{str(folder)!r} has {name} {fields.get(name)!r}, this run {value!r}; give flags "
                "that agree, or another draft"
            )
    if tensors.keys() != exported.tensors.keys():
        name = min(tensors.keys() ^ exported.tensors.keys())
        where = "has a tensor" if name in tensors else "lacks the tensor"
        raise _refused(f"{str(folder)!r} {where} {name}, unlike a draft of this run")
    for name, wanted in exported.tensors.items():
        if tensors[name].shape != wanted.shape:
            there, here = tuple(tensors[name].shape), tuple(wanted.shape)
            raise _refused(f"{str(folder)!r}: {name} is {there}, in this run {here}")
        if name not in recipe.parameters and not torch.equal(tensors[name], wanted.cpu()):
            raise _refused(f"{str(folder)!r} has another draft vocabulary ({name}) than this run")
    recipe.adopt(tensors)


def _refused(reason: str) -> RefusedError:
    return RefusedError(Refused("initial_draft", reason))
