"""What an algorithm's training is to the trainer, and where algorithms are found."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from ...engine_core.model_config import ModelConfig
from ...engine_core.refusal import Refused, RefusedError
from ...engine_core.train_spec import TrainSpec
from .batches import Batch
from .dense import DenseTarget


class StepResult(NamedTuple):
    """``loss``: a scalar to go backward from. ``agree`` bool[B, R, S]: whether step i of the draft
    that begins at row r chooses as the target does. ``origin``: the row at which the draft begins
    that follows the target's own first token, relative to that token's position. ``drafted``
    bool[B, R]: the rows of which ``agree`` speaks; None for all.
    """

    loss: torch.Tensor
    agree: torch.Tensor
    origin: int
    drafted: torch.Tensor | None = None


class Confidences(NamedTuple):
    """Of every draft of a batch: raw confidence ``logits`` float32[B, R, S]; the others as those of
    StepResult.
    """

    logits: torch.Tensor
    agree: torch.Tensor
    origin: int


class Exported(NamedTuple):
    """A draft as a checkpoint: config.json's fields and named tensors."""

    config: dict[str, object]
    tensors: dict[str, torch.Tensor]


class Recipe(Protocol):
    """One draft in training."""

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """What is learnt: float32 leaves by the names of the checkpoint."""
        ...

    @property
    def matrices(self) -> frozenset[str]:
        """Those of ``parameters`` that Muon may update: matrices between hidden states."""
        ...

    def step(self, batch: Batch) -> StepResult:
        """The loss of a batch, forward only."""
        ...

    def agreement(self, batch: Batch) -> StepResult:
        """``step`` for measuring: under no_grad; ``loss`` may be anything."""
        ...

    def adopt(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take on the weights of a draft of the same form, named as ``export`` names them."""
        ...

    def export(self, dtype: torch.dtype) -> Exported:
        """The draft in the format that serving engines load."""
        ...


@runtime_checkable
class Confident(Protocol):
    """A recipe whose draft has a confidence head."""

    def confidences(self, batch: Batch) -> Confidences:
        """What it says of greedy drafts, under no_grad."""
        ...


class Setting(NamedTuple):
    """What a recipe is made from. ``counts`` int64[V]: how often the data has each token;
    ``sample`` int64[B, T]: a few rows of it.
    """

    spec: TrainSpec
    target: DenseTarget
    counts: NDArray[np.int64]
    sample: torch.Tensor
    compiled: bool


RecipeFactory = Callable[[Setting], Recipe]
# Raises RefusedError for flags that do not suit the recipe or its target, whatever the data are.
Check = Callable[[TrainSpec, ModelConfig], None]


class RecipeRegistry:
    """Algorithms that can be trained, by name."""

    def __init__(self) -> None:
        self._factories: dict[str, RecipeFactory] = {}
        self._checks: dict[str, Check] = {}

    def add(self, name: str, factory: RecipeFactory, check: Check) -> None:
        """``check`` runs before any data are made. Raises ValueError for a name that is taken."""
        if name in self._factories:
            raise ValueError(f"algorithm {name!r} has a recipe already")
        self._factories[name] = factory
        self._checks[name] = check

    def check(self, spec: TrainSpec, target: ModelConfig) -> None:
        """Raises RefusedError for what can be told from the spec and its target alone."""
        refused = self.refuse(spec.algorithm)
        if refused is not None:
            raise RefusedError(refused)
        self._checks[spec.algorithm](spec, target)

    def make(self, setting: Setting) -> Recipe:
        """The recipe of ``setting.spec.algorithm``. Raises RefusedError."""
        self.check(setting.spec, setting.target.config)
        return self._factories[setting.spec.algorithm](setting)

    def refuse(self, name: str) -> Refused | None:
        """Why ``name`` cannot be made, whatever its setting is."""
        if name in self._factories:
            return None
        known = ", ".join(sorted(self._factories))
        return Refused("algorithm", f"{name!r} cannot be trained; use one of {known}")
