"""A rank's share of a model, and the refusal of ranks that cannot share it."""

from pathlib import Path

import msgspec
import pytest

from outrider.engine_core.config import EngineConfig, refuse_config
from outrider.engine_core.model_config import ModelConfig, load_model_config
from outrider.engine_core.refusal import Refused
from outrider.engine_core.tensor_parallel import refuse_devices, shard_model

QWEN = Path(__file__).parents[2] / "benchmarks" / "configs" / "qwen3-8b"


@pytest.fixture(scope="module")
def qwen() -> ModelConfig:
    return load_model_config(QWEN)


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "inner"),
    [(1, 32, 8, 12288), (2, 16, 4, 6144), (8, 4, 1, 1536), (16, 2, 1, 768), (32, 1, 1, 384)],
)
def test_heads_and_width_are_shared(
    qwen: ModelConfig, ranks: int, heads: int, kv_heads: int, inner: int
) -> None:
    share = shard_model(qwen, ranks)
    assert isinstance(share, ModelConfig)
    assert share.num_attention_heads == heads
    assert share.num_key_value_heads == kv_heads
    assert share.intermediate_size == inner
    whole = msgspec.structs.replace(
        share, num_attention_heads=32, num_key_value_heads=8, intermediate_size=12288
    )
    assert whole == qwen


@pytest.mark.parametrize(
    ("fields", "ranks", "reason"),
    [
        ({}, 3, "does not divide the model's 32 attention heads"),
        ({"num_attention_heads": 36, "num_key_value_heads": 6}, 4, "6 key/value heads"),
        ({"intermediate_size": 1001}, 2, "intermediate size 1001"),
    ],
)
def test_uneven_shares_are_refused(
    qwen: ModelConfig, fields: dict[str, int], ranks: int, reason: str
) -> None:
    model = msgspec.structs.replace(qwen, **fields)
    refused = shard_model(model, ranks)
    assert isinstance(refused, Refused)
    assert refused.field == "tp_size"
    assert reason in refused.reason


def test_there_must_be_a_gpu_a_rank() -> None:
    assert refuse_devices(2, 2) is None
    refused = refuse_devices(4, 2)
    assert refused is not None
    assert (refused.field, "torch finds 2" in refused.reason) == ("tp_size", True)


@pytest.mark.parametrize("ranks", [0, -1, 65])
def test_the_number_of_ranks_has_bounds(ranks: int) -> None:
    refused = refuse_config(EngineConfig(model="m", tp_size=ranks))
    assert refused is not None
    assert refused.field == "tp_size"
