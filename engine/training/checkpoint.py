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

    def amount(self, spec: TrainSpec) -> float:
        """In the schedule's unit: steps or minutes."""
        return self.step if spec.steps else self.seconds / 60.0

    def part(self, spec: TrainSpec) -> float:
        """The part of the schedule that is done; 1 or more at its end."""
        return self.amount(spec) / (spec.steps or spec.minutes or 1)


def save_checkpoint(
    folder: Path,
    spec: TrainSpec,
    data: dict[str, str],
    position: Position,
    parameters: dict[str, torch.Tensor],
    average: dict[str, torch.Tensor],
    optimizer: Optimizer,
) -> None:
    """Write it beside the old one and then in its place. ``data``: see SavedRun."""
    state = {
        "spec": msgspec.json.encode(spec).decode(),
        "data": data,
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


class SavedRun:
    """A run's state as it was read. ``spec``: of the command that saved it; ``data``: by field of
    the spec, a fingerprint of the data it was trained on.
    """

    def __init__(self, path: Path) -> None:
        """Raises RefusedError for a file that is no state."""
        self._path = path
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            self.spec = msgspec.json.decode(state["spec"], type=TrainSpec)
            self.data = msgspec.convert(state["data"], dict[str, str])
            self.position = Position(int(state["step"]), float(state["seconds"]))
        except Exception as error:  # reading arbitrary bytes raises almost anything
            raise self._damaged(error) from None
        self._state = state

    def check_spec(self, spec: TrainSpec) -> None:
        """Raises RefusedError for a run of another kind."""
        for name in TrainSpec.__struct_fields__:
            then, now = getattr(self.spec, name), getattr(spec, name)
            if name not in _FREE and then != now:
                reason = (
                    f"is {now!r}, but the run in {str(self._path.parent)!r} was begun with "
                    f"{then!r}; give the same or another --output"
                )
                raise RefusedError(Refused(name, reason))

    def check_data(self, data: dict[str, str]) -> None:
        """Raises RefusedError, naming the field, for other data than the run was begun with."""
        # With or without a selection of its own, the data differs too: that one is named first.
        for name in sorted({*self.data, *data}, reverse=True):
            if self.data.get(name) != data.get(name):
                reason = (
                    f"is not what the run in {str(self._path.parent)!r} was begun with; give the "
                    "same or another --output"
                )
                raise RefusedError(Refused(name, reason))

    def restore(
        self,
        parameters: dict[str, torch.Tensor],
        average: dict[str, torch.Tensor],
        optimizer: Optimizer,
    ) -> None:
        """Set everything to what was saved. Raises RefusedError."""
        state = self._state
        try:
            with torch.no_grad():
                for name, leaf in parameters.items():
                    leaf.copy_(state["parameters"][name])
                for name, tensor in average.items():
                    tensor.copy_(state["average"][name])
            optimizer.load(state["optimizer"])
            torch.set_rng_state(state["random"])
        except Exception as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> RefusedError:
        what = (str(error).splitlines() or [""])[0][:120]
        reason = (
            f"{str(self._path)!r} is damaged or no state of this run ({type(error).__name__}: "
            f"{what}); restore it, or start again in another --output"
        )
        return RefusedError(Refused("resume", reason))
