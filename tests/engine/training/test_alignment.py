"""A trained draft does in the engine what it did in training: position by position."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from outrider.engine.kv_pool import KVPool
from outrider.engine.models.draft_loader import load_draft
from outrider.engine.models.draft_net import DraftNet
from outrider.engine.models.loader import load_model
from outrider.engine.models.torch_decoder import TorchDecoder
from outrider.engine.training import eagle_recipe
from outrider.engine.training.batches import Batch
from outrider.engine.training.chain_loss import ChainLoss
from outrider.engine.training.dense import DenseTarget
from outrider.engine.training.eagle_recipe import EagleRecipe
from outrider.engine.training.export import write_draft
from outrider.engine.training.recipe import Recipe, Setting
from outrider.engine.training.registry import default_recipes
from outrider.engine.weights import Checkpoint
from outrider.engine_core.draft_config import DraftAlgorithm
from outrider.engine_core.draft_config_json import load_draft_config
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.train_spec import TrainSpec

from ..checkpoints import KINDS, save
from ..steps import Pages, Query, Sequence, make_batch
from ..tiny import write_checkpoint

CPU = torch.device("cpu")
VOCAB, LENGTH, UNROLL = 61, 14, 4
CASES: dict[str, dict[str, object]] = {
    "EAGLE": {},
    "EAGLE3": {},
    "EAGLE3-reduced": {"draft_vocab_size": 40, "feature_layers": (1, 3)},
    "EAGLE3-own-head": {
        "own_head": True,
        "head_dim": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
    "STANDALONE": {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1},
}


def made(folder: Path, target: Path, algorithm: str, **fields: object) -> tuple[Recipe, TrainSpec]:
    """A recipe whose parameters are all random, zeros included."""
    spec = TrainSpec(
        algorithm=algorithm,
        model=str(target),
        data=(),
        output=str(folder),
        steps=1,
        unroll=UNROLL,
        **fields,  # type: ignore[arg-type]
    )
    config = load_model_config(target)
    dense = DenseTarget(Checkpoint(target), config, torch.float32, CPU)
    sample = torch.randint(1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    counts = np.random.default_rng(1).integers(0, 100, VOCAB)
    recipe = default_recipes().make(Setting(spec, dense, counts, sample, False))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for leaf in recipe.parameters.values():
            leaf += 0.3 * torch.randn(leaf.shape, generator=generator)
    return recipe, spec


def exported(folder: Path, target: Path, name: str) -> tuple[Recipe, DraftNet]:
    """The recipe, and the engine's network of what it exports."""
    algorithm: DraftAlgorithm = name.partition("-")[0]  # type: ignore[assignment]
    recipe, _ = made(folder, target, algorithm, **CASES[name])
    write_draft(folder, recipe.export(torch.float32), "")
    model = load_model_config(target)
    config = load_draft_config(folder, model, algorithm)
    loaded = load_model(target, model, torch.float32, CPU)
    return recipe, load_draft(folder, config, loaded, torch.float32, CPU, native=False)


def rows() -> Batch:
    ids = torch.randint(1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(9))
    return Batch(ids, torch.zeros_like(ids, dtype=torch.bool))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), VOCAB, layers=3)


@pytest.mark.parametrize("name", [n for n in CASES if n != "STANDALONE"])
@pytest.mark.parametrize("with_own", [True, False])
def test_a_row_weighs_by_the_token_it_drafts_behind(
    name: str, with_own: bool, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the draft's vocabulary; text beside the target's own counts alike."""
    recipe, _ = exported(tmp_path, target, name)
    assert isinstance(recipe, EagleRecipe)
    ids, own = rows()
    own[0, 7:] = with_own
    found: list[torch.Tensor] = []

    def note(*given: Any) -> ChainLoss:
        found.append(given[-1])
        return ChainLoss(*given)

    monkeypatch.setattr(eagle_recipe, "ChainLoss", note)
    recipe.step(Batch(ids, own))
    (starts,) = found
    dense = DenseTarget(Checkpoint(target), load_model_config(target), torch.float32, CPU)
    laws = (dense.forward(ids).hidden @ dense.lm_head.t()).softmax(-1)
    for row, first in ((0, 7 if with_own else 0), (1, 0)):
        places = range(max(0, first - 2), LENGTH - UNROLL)
        left = {r: 1 - float(laws[row, r, ids[row, r + 1]]) for r in places}
        mean = sum(left.values()) / len(left)
        for place in range(LENGTH - UNROLL):
            wanted = 0.4 + 0.6 * left[place] / mean if place in left else 1.0
            assert float(starts[row, place]) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("name", [n for n in CASES if n != "STANDALONE"])
def test_a_step_of_the_unroll_is_a_step_of_serving(name: str, target: Path, tmp_path: Path) -> None:
    recipe, net = exported(tmp_path, target, name)
    assert isinstance(recipe, EagleRecipe)
    batch = rows()
    unrolled = recipe.unrolled(batch)
    features = recipe.features(batch)[1]
    config = load_model_config(target)
    paged = paged_features(target, batch.ids, net)
    torch.testing.assert_close(features.flatten(0, 1), paged, atol=1e-4, rtol=1e-4)
    for row in range(2):
        ids = batch.ids[row].tolist()
        for start in range(LENGTH - UNROLL):
            kv = KVPool(20, 4, net.config.model, torch.float32, CPU)
            pages, sequence = Pages(20, 4, start), Sequence()
            # The extend over positions 0..start takes the tokens of 1..start + 1.
            hidden = net.fuse(features[row, : start + 1])
            query = Query(sequence, ids[1 : start + 2])
            out = net.forward(make_batch([query], pages), hidden, kv)
            for step in range(UNROLL):
                expected = unrolled[step]
                torch.testing.assert_close(
                    out.recurrent[-1], expected.recurrent[row, start], atol=1e-4, rtol=1e-4
                )
                torch.testing.assert_close(
                    out.head_input[-1], expected.head_input[row, start], atol=1e-4, rtol=1e-4
                )
                sequence.length = start + 1 + step
                query = Query(sequence, [ids[start + 2 + step]] if step + 1 < UNROLL else [0])
                hidden = out.recurrent[-1:].clone()
                out = net.forward(make_batch([query], pages), hidden, kv)
    assert config.vocab_size == VOCAB


def paged_features(target: Path, ids: torch.Tensor, net: DraftNet) -> torch.Tensor:
    """What the engine's target hands to a draft: [B * T, W]."""
    config = load_model_config(target)
    model = TorchDecoder(Checkpoint(target), config, torch.float32, CPU)
    kv, pages = KVPool(40, 4, config, torch.float32, CPU), Pages(40, 4, 1)
    batch = make_batch([Query(Sequence(), row.tolist()) for row in ids], pages)
    hidden, streams = model.forward_capture(batch, kv, net.config.feature_layers)
    return streams if net.config.feature_layers else hidden


@pytest.mark.parametrize("name", list(CASES))
def test_the_loss_compares_what_verify_compares(name: str, target: Path, tmp_path: Path) -> None:
    """Agreement, step by step, of the engine's draft with the engine's target."""
    recipe, net = exported(tmp_path, target, name)
    batch = rows()
    found = recipe.step(batch)
    assert torch.equal(found.agree, recipe.agreement(batch).agree)
    config = load_model_config(target)
    model = TorchDecoder(Checkpoint(target), config, torch.float32, CPU)
    kv, pages = KVPool(40, 4, config, torch.float32, CPU), Pages(40, 4, 1)
    steps = make_batch([Query(Sequence(), row.tolist()) for row in batch.ids], pages)
    choices = model.logits(model.forward(steps, kv)).argmax(-1).view(batch.ids.shape)
    ids_of = net.token_ids
    if isinstance(recipe, EagleRecipe):
        for step, passed in enumerate(recipe.unrolled(batch)):
            drafted = net.logits(passed.head_input.flatten(0, 1)).argmax(-1)
            drafted = drafted if ids_of is None else ids_of[drafted]
            drafted = drafted.view(2, -1)
            # Row p drafts token p + 2 + step, which position p + 1 + step of the target chooses.
            here = choices[:, 1 + step : 1 + step + drafted.shape[1]]
            assert torch.equal(found.agree[..., step], drafted == here)
    else:
        draft_kv = KVPool(40, 4, net.config.model, torch.float32, CPU)
        out = net.forward(steps, None, draft_kv)
        drafted = net.logits(out.head_input).argmax(-1).view(batch.ids.shape)
        for step in range(UNROLL):
            rows_ = found.agree.shape[1]
            window = slice(step, step + rows_)
            assert torch.equal(found.agree[..., step], (drafted == choices)[:, window])


@pytest.mark.parametrize("kind", KINDS)
def test_the_dense_target_is_the_paged_one(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path)
    config = load_model_config(tmp_path)
    ids = torch.randint(1, config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    dense = DenseTarget(Checkpoint(tmp_path), config, torch.float32, CPU)
    layers = tuple(range(config.num_hidden_layers + 1))
    output = dense.forward(ids, layers)
    model = TorchDecoder(Checkpoint(tmp_path), config, torch.float32, CPU)
    kv, pages = KVPool(40, 4, config, torch.float32, CPU), Pages(40, 4, 1)
    batch = make_batch([Query(Sequence(), row.tolist()) for row in ids], pages)
    hidden, streams = model.forward_capture(batch, kv, layers)
    torch.testing.assert_close(output.hidden.flatten(0, 1), hidden, atol=1e-4, rtol=1e-4)
    mine = torch.cat(output.streams, dim=-1).flatten(0, 1)
    torch.testing.assert_close(mine, streams, atol=1e-4, rtol=1e-4)
    # Greedy text by the cache is what whole passes choose.
    text = dense.generate(ids[:, :9], 12)
    whole = dense.forward(torch.cat([ids[:, :9], text], dim=1)).hidden @ dense.lm_head.t()
    assert torch.equal(whole[:, 8:-1].argmax(-1), text)


def test_a_spec_travels_as_json() -> None:
    spec = TrainSpec(algorithm="EAGLE3", model="m", data=("d",), output="o", steps=3)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=TrainSpec) == spec
