"""A training run on disk: everything that its next command needs to go on."""

import os
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from ...engine_core.refusal import Refused, RefusedError
from ...engine_core.train_spec import TrainSpec
from .optimizer import Optimizer

FILE = "training.pt"
# What may change between the commands of one run: how long it goes on, and what is reported.
_FREE = (
    "resume",
    "output",
    "data",
    "selection_data",
    "on_policy_cache",
    "device",
    "compile",
    "steps",
    "minutes",
    "max_minutes",
    "checkpoint_minutes",
    "log_every",
    "selection_every",
    "draft_steps",
    "topk",
    "num_draft_tokens",
    "matrix_lr",
    "adam_lr",
    "warmup",
    "decay",
    "schedule",
    "weight_decay",
)


class Position(NamedTuple):
    """Where a run stands: steps done (which say what data comes next) and seconds trained."""

    step: int
    seconds: float


def save_checkpoint(
    folder: Path,
    spec: TrainSpec,
    position: Position,
    parameters: dict[str, torch.Tensor],
    average: dict[str, torch.Tensor],
    optimizer: Optimizer,
) -> None:
    """Write it beside the old one and then in its place."""
    state = {
        "spec": msgspec.json.encode(spec).decode(),
        "step": position.step,
        "seconds": position.seconds,
        "parameters": {name: p.detach() for name, p in parameters.items()},
        "average": average,
        "optimizer": optimizer.state(),
        "random": torch.get_rng_state(),
    }
    partial = folder / f"{FILE}.part"
    torch.save(state, partial)
    os.replace(partial, folder / FILE)


def load_checkpoint(
    folder: Path,
    spec: TrainSpec,
    parameters: dict[str, torch.Tensor],
    average: dict[str, torch.Tensor],
    optimizer: Optimizer,
) -> Position:
    """Set everything to what was saved. Raises RefusedError for a run of another kind."""
    path = folder / FILE
    if not path.is_file():
        raise RefusedError(Refused("resume", f"{str(path)!r} is not there; start without --resume"))
    state = torch.load(path, map_location="cpu", weights_only=True)
    then = msgspec.json.decode(state["spec"], type=TrainSpec)
    for name in TrainSpec.__struct_fields__:
        if name not in _FREE and getattr(then, name) != getattr(spec, name):
            raise RefusedError(
                Refused(
                    name,
                    f"is {getattr(spec, name)!r}, but the run in {str(folder)!r} was begun with "
                    f"{getattr(then, name)!r}; give the same or another --output",
                )
            )
    with torch.no_grad():
        for name, leaf in parameters.items():
            leaf.copy_(state["parameters"][name])
        for name, tensor in average.items():
            tensor.copy_(state["average"][name])
    optimizer.load(state["optimizer"])
    torch.set_rng_state(state["random"])
    return Position(state["step"], state["seconds"])
