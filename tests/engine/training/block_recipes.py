"""Recipes of block drafts with random parameters, and the targets that they are for."""

from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from outrider.engine.training.block_recipe import BlockRecipe
from outrider.engine.training.dense import DenseTarget
from outrider.engine.training.recipe import Setting
from outrider.engine.training.registry import default_recipes
from outrider.engine.weights import Checkpoint
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.train_spec import TrainSpec

from ...reference import block_training_ref as ref
from ..tiny import write_checkpoint

CPU = torch.device("cpu")
VOCAB, LENGTH, MASK = 61, 20, 7
CASES: dict[str, dict[str, object]] = {
    "DFLASH": {"block_size": 4},
    "DFLASH-decay": {"block_weighting": "decay", "hard_weight": 0.0, "feature_layers": (1, 2, 4)},
    "DFLASH-window": {"block_size": 5, "sliding_window": 6, "sliding_layers": (1,)},
    "DFLASH-lk": {"block_size": 4, "loss": "lk", "num_attention_heads": 4},
    "DSPARK": {"block_size": 3, "confidence_greedy": 0.0},
    "DSPARK-gated": {"block_size": 4, "markov_head": "gated", "confidence_greedy": 0.3},
    "DSPARK-rnn": {"block_size": 4, "markov_head": "rnn", "hard_weight": 1.0, "sliding_window": 3},
    "DSPARK-dpace": {"block_size": 3, "block_weighting": "dpace", "markov_rank": 5},
}


class Made(NamedTuple):
    """A recipe with random parameters, its target and what it exports, in float64."""

    recipe: BlockRecipe
    spec: TrainSpec
    target: DenseTarget
    weights: ref.Named
    shape: ref.Shape


def write_target(folder: Path) -> Path:
    return write_checkpoint(folder, VOCAB, layers=5, scale=0.3)


def spec_of(folder: Path, name: str, **fields: object) -> TrainSpec:
    made = TrainSpec(
        algorithm=name.partition("-")[0],
        model=str(folder),
        data=("d",),
        output="o",
        steps=1,
        num_hidden_layers=2,
        mask_token_id=MASK,
        anchors=5,
    )
    return msgspec.structs.replace(made, **{**CASES.get(name, {}), **fields})


def make(folder: Path, name: str, **fields: object) -> Made:
    spec, config = spec_of(folder, name, **fields), load_model_config(folder)
    target = DenseTarget(Checkpoint(folder), config, torch.float32, CPU)
    setting = Setting(spec, target, np.ones(VOCAB, dtype=np.int64), text(), False)
    recipe = default_recipes().make(setting)
    assert isinstance(recipe, BlockRecipe)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for leaf in recipe.parameters.values():
            leaf += 0.3 * torch.randn(leaf.shape, generator=generator)
    weights = {n: t.double() for n, t in recipe.export(torch.float32).tensors.items()}
    model = recipe._model
    shape = ref.Shape(
        model.num_attention_heads,
        model.num_key_value_heads,
        model.head_dim,
        model.rope.theta,
        model.rms_norm_eps,
        model.sliding_windows,
    )
    return Made(recipe, spec, target, weights, shape)


def text() -> torch.Tensor:
    return torch.randint(1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(9))
