"""A block draft's weights on Triton kernels are those that a plan counts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.engine.models.block_checkpoint import read_block_weights
from outrider.engine.models.gpu_block import GpuBlock
from outrider.engine_core.device_config import Placement
from outrider.engine_core.draft_config import SpecShape
from outrider.engine_core.draft_config_json import load_draft_config
from outrider.engine_core.draft_sizes import draft_sizes
from outrider.engine_core.draft_source import DraftSource
from outrider.engine_core.model_config import load_model_config

from ..block_checkpoints import BLOCKS
from ..block_nets import Tables
from ..tiny import write_checkpoint
from .gpu_driver import DEVICE


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), 48, layers=4)


@pytest.mark.parametrize("name", BLOCKS)
def test_weights_in_memory_are_those_planned(tmp_path: Path, target: Path, name: str) -> None:
    kind = BLOCKS[name]
    kind.write(tmp_path, target)
    config = load_draft_config(tmp_path, load_model_config(target), kind.algorithm)
    weights = read_block_weights(tmp_path, config)
    tables = Tables(torch.float32, DEVICE)
    stored = load_file(target / "model.safetensors")
    tables.embedding = stored["model.embed_tokens.weight"].to(DEVICE)
    tables.output_head = stored["lm_head.weight"].to(DEVICE)
    net = GpuBlock(weights, config, tables, torch.float32, DEVICE)
    shape = SpecShape(kind.drafts, 1, kind.drafts + 1)
    source = DraftSource(tmp_path, config, shape, "auto", {}, "float32", None)
    placement = Placement("cuda", "float32", 0.9)
    assert net.weight_bytes == draft_sizes(source, placement).weight_bytes
