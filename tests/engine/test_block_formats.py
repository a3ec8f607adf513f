"""Networks of block drafts loaded from each exporter's folder, held against the equations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.engine.forward_batch import ForwardBatch, RowGroup
from outrider.engine.kv_pool import KVPool
from outrider.engine.models.block_loader import load_block_draft
from outrider.engine.models.loader import load_model
from outrider.engine_core.draft_config_json import load_draft_config
from outrider.engine_core.model_config import load_model_config

from ..reference.block_draft import BlockReference, Equations
from .block_checkpoints import BLOCKS, random_features
from .tiny import write_checkpoint

CPU = torch.device("cpu")
VOCAB, HIDDEN, BEFORE, PAGE = 48, 16, 13, 4
# What each format means, in the equations' words; by default two layers that see everything.
SLIDING: dict[str, Any] = {"windows": [6, 0], "causal": [True, False]}
MEANS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash-bias": {"windows": [0], "causal": [False]},
    "dflash-shuffled": {},
    "dflash-repeated": {},
    "dflash-sliding": SLIDING,
    "dflash-gemma": {},
    "dflash-speculators": {"whole_block": True},
    "dspark": {"first_row": 0, "markov": "vanilla", "confidence_with_markov": True},
    "dspark-specforge": {"first_row": 0, "markov": "gated"},
    "dspark-prefixed": {"first_row": 0, "markov": "vanilla", "confidence_with_markov": True},
    "dspark-no-confidence": {"first_row": 0, "markov": "vanilla"},
    "dspark-rnn": {"first_row": 0, "markov": "rnn", "confidence_with_markov": True, **SLIDING},
    "dspark-filled": {"markov": "vanilla", "confidence_with_markov": True},
    "dspark-speculators": {
        "first_row": 0, "markov": "rnn", "confidence_with_markov": True, "whole_block": True,
    },
    "dspark-speculators-filled": {
        "markov": "gated", "confidence_with_markov": True, "whole_block": True,
    },
}  # fmt: skip
OUTPUTS = {"dflash-shuffled": (2, 0, 1), "dflash-repeated": (1, 1)}  # else of layers 0, 1, 2


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), VOCAB, layers=4)


def trained(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors as its trainer's equations have them."""
    tensors = load_file(folder / "model.safetensors")
    named = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}
    if name != "dflash-gemma":
        return named
    for key, tensor in named.items():
        if key.endswith("v_proj.weight"):
            named[key] = tensor * 0.3
        elif "norm" in key:
            named[key] = tensor + 1
    return named


@pytest.mark.parametrize("name", BLOCKS)
@torch.inference_mode()
def test_a_loaded_draft_is_the_trainers(tmp_path: Path, target: Path, name: str) -> None:
    kind, model = BLOCKS[name], load_model_config(target)
    kind.write(tmp_path, target)
    config = load_draft_config(tmp_path, model, kind.algorithm)
    assert config.block is not None
    whole = load_model(target, model, torch.float32, CPU, native=False)
    net = load_block_draft(tmp_path, config, whole, torch.float32, CPU)
    tables = load_file(target / "model.safetensors")
    given: dict[str, Any] = {"windows": [0, 0], "causal": [False, False], **MEANS[name]}
    equations = Equations(heads=4, kv_heads=2, head_dim=8, eps=1e-5, theta=10000.0, **given)
    reference = BlockReference(
        equations, trained(tmp_path, name),
        tables["model.embed_tokens.weight"], tables["lm_head.weight"],
    )  # fmt: skip
    # Streams behind each of the target's layers, of which trainer and engine take theirs.
    streams = random_features(BEFORE, 4 * HIDDEN).view(BEFORE, 4, HIDDEN)
    outputs = OUTPUTS.get(name, (0, 1, 2))
    captured = [layer - 1 for layer in config.feature_layers]
    kv = KVPool(8, PAGE, config.model, torch.float32, CPU)
    slots = torch.arange(PAGE, PAGE + BEFORE + 8)
    net.inject(streams[:, captured].flatten(1), torch.arange(BEFORE), slots[:BEFORE], kv)
    context = reference.inject(streams[:, list(outputs)].flatten(1))
    rows = kind.drafts + kind.first_row
    ids = torch.tensor([5, *[VOCAB - 1] * (rows - 1)])
    batch = ForwardBatch(
        input_ids=ids,
        positions=torch.arange(BEFORE, BEFORE + rows),
        kv_slots=slots[BEFORE : BEFORE + rows],
        cu_q=torch.tensor([0, rows], dtype=torch.int32),
        kv_lens=torch.tensor([BEFORE + rows], dtype=torch.int32),
        page_table=torch.arange(1, 9, dtype=torch.int32)[None],
        tree_bits=torch.zeros(rows, dtype=torch.int64),
        is_tree=torch.zeros(1, dtype=torch.uint8),
        logits_index=torch.arange(rows),
        groups=(RowGroup(0, 1, rows),),
    )
    hidden = net.forward(batch, kv)
    wanted = reference.forward(context, ids)
    torch.testing.assert_close(hidden.double(), wanted, atol=1e-4, rtol=0)
    tokens = torch.empty(kind.drafts, 1, dtype=torch.int64)
    picked, bonus = hidden[kind.first_row :, None], torch.tensor([5])
    net.choose(picked, bonus, tokens)
    confidence = net.confidence(picked, bonus, tokens)
    chosen, sure = reference.choose(wanted, 5)
    assert tokens[:, 0].tolist() == chosen
    assert (confidence is not None) == bool(sure)
    if confidence is not None:
        found = confidence.flatten().double()
        torch.testing.assert_close(found, torch.tensor(sure).double(), atol=1e-4, rtol=0)
