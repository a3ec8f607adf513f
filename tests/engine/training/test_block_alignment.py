"""A trained block draft does in the engine what it did in training, behind every token."""

from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.engine.kv_pool import KVPool
from outrider.engine.models.block_loader import load_block_draft
from outrider.engine.models.loader import load_model
from outrider.engine.training.batches import Batch
from outrider.engine.training.block_recipe import BlockRecipe
from outrider.engine.training.dense import DenseTarget
from outrider.engine.training.export import write_draft
from outrider.engine.training.recipe import Setting
from outrider.engine.training.registry import default_recipes
from outrider.engine.weights import Checkpoint
from outrider.engine_core.draft_config import DraftAlgorithm
from outrider.engine_core.draft_config_json import load_draft_config
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.train_spec import TrainSpec

from ..steps import Pages, Query, Sequence, make_batch
from ..tiny import write_checkpoint

CPU = torch.device("cpu")
VOCAB, LENGTH, MASK = 61, 16, 7
CASES: dict[str, dict[str, object]] = {
    "DFLASH": {"block_size": 4, "feature_layers": (1, 3, 5)},
    "DFLASH-window": {"block_size": 5, "sliding_window": 6, "sliding_layers": (1,)},
    "DSPARK": {"block_size": 3},
    "DSPARK-gated": {"block_size": 4, "markov_head": "gated", "num_attention_heads": 4},
    "DSPARK-rnn": {"block_size": 4, "markov_head": "rnn", "sliding_window": 3},
}


@pytest.mark.parametrize("name", CASES)
def test_a_block_of_training_is_a_block_of_serving(name: str, tmp_path: Path) -> None:
    algorithm: DraftAlgorithm = name.partition("-")[0]  # type: ignore[assignment]
    folder = write_checkpoint(tmp_path / "target", VOCAB, layers=5)
    spec = TrainSpec(
        algorithm=algorithm, model=str(folder), data=(), output="o", steps=1, num_hidden_layers=2,
        mask_token_id=MASK, **CASES[name],  # type: ignore[arg-type]
    )  # fmt: skip
    model = load_model_config(folder)
    dense = DenseTarget(Checkpoint(folder), model, torch.float32, CPU)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, VOCAB, (1, LENGTH), generator=generator)
    setting = Setting(spec, dense, np.ones(VOCAB, dtype=np.int64), ids, False)
    recipe = default_recipes().make(setting)
    assert isinstance(recipe, BlockRecipe)
    with torch.no_grad():
        for leaf in recipe.parameters.values():
            leaf += 0.3 * torch.randn(leaf.shape, generator=generator)
    write_draft(tmp_path, recipe.export(torch.float32), "")
    config = load_draft_config(tmp_path, model, algorithm)
    target = load_model(folder, model, torch.float32, CPU)
    net = load_block_draft(tmp_path, config, target, torch.float32, CPU, native=False)
    proposed = recipe.propose(Batch(ids, torch.zeros_like(ids, dtype=torch.bool)))
    features = recipe.features(ids)[1][0]
    block = config.block
    assert block is not None
    for anchor in range(1, LENGTH - block.drafts):
        kv = KVPool(20, 4, config.model, torch.float32, CPU)
        pages, sequence = Pages(20, 4, anchor), Sequence()
        context = make_batch([Query(sequence, ids[0, :anchor].tolist())], pages)
        net.inject(features[:anchor], context.positions, context.kv_slots, kv)
        sequence.length = anchor
        bonus = ids[0, anchor : anchor + 1]
        rows = [int(bonus), *[MASK] * (block.rows - 1)]
        hidden = net.forward(make_batch([Query(sequence, rows)], pages), kv)
        tokens = torch.zeros(block.drafts, 1, dtype=torch.int64)
        picked = hidden[block.first_row :, None]
        net.choose(picked, bonus, tokens)
        assert tokens[:, 0].tolist() == proposed.tokens[0, anchor].tolist()
        if proposed.confidence is not None:
            confidence = net.confidence(picked, bonus, tokens)
            assert confidence is not None
            mine = proposed.confidence[0, anchor]
            torch.testing.assert_close(confidence[0], mine, atol=1e-4, rtol=1e-4)
