"""The plan's bytes are the engine's: weights and KV exactly, and the numbers worked by hand."""

import re
from pathlib import Path

import msgspec
import pytest
import torch

from outrider.engine.build import build_worker
from outrider.engine.kv_pool import KVPool
from outrider.engine.models import load_model
from outrider.engine.weights import RandomTensors
from outrider.engine_core.config import EngineConfig
from outrider.engine_core.device_config import Placement
from outrider.engine_core.memory_plan import (
    MemoryPlan,
    memory_parts,
    plan_memory,
)
from outrider.engine_core.model_config import ModelConfig, load_model_config
from outrider.engine_core.model_sizes import weight_bytes
from outrider.engine_core.refusal import Refused
from outrider.engine_core.safetensors_header import HeaderError, tensor_dtypes

from .checkpoints import KINDS, save

ROOT = Path(__file__).parents[2]
PYCODER = ROOT / "models" / "pycoder-11m"
QWEN = ROOT / "benchmarks" / "configs" / "qwen3-8b"
GIB = 1 << 30
CPU = torch.device("cpu")
ON_CPU = Placement("cpu", "float32", 0.5)
ON_CUDA = Placement("cuda", "bfloat16", 0.9)


def planned(
    folder: Path, placement: Placement, free: int, **fields: object
) -> MemoryPlan | Refused:
    config = EngineConfig(model=str(folder), **fields)  # type: ignore[arg-type]
    model = load_model_config(folder)
    stored = {} if config.load_format == "dummy" else tensor_dtypes(folder)
    return plan_memory(config, model, stored, placement, free)


def fits(folder: Path, placement: Placement, free: int, **fields: object) -> MemoryPlan:
    plan = planned(folder, placement, free, **fields)
    assert isinstance(plan, MemoryPlan), plan
    return plan


def test_pycoder_by_hand() -> None:
    plan = fits(PYCODER, ON_CPU, 8 * GIB)
    layer = (256 + 2 * 128) * 256 + 256 * 256 + 2 * 768 * 256 + 256 * 768
    assert plan.weight_bytes == 2 * (12 * layer + 8192 * 256) == 23_068_672
    assert plan.kv_bytes_per_token == 2 * 12 * 2 * 64 * 4 == 12_288
    assert (plan.num_tokens, plan.num_pages) == (48 * 1024, 3072)
    assert plan.kv_bytes == 3073 * 16 * 12_288
    assert (plan.draft_weight_bytes, plan.graph_bytes) == (0, 0)
    # The widest layer: 560 tokens of 512 stream and 3 * 768 elements.
    assert plan.activation_bytes == 560 * (2 * 256 + 3 * 768) * 4
    assert plan.total_bytes == (
        plan.weight_bytes + plan.kv_bytes + plan.activation_bytes + plan.state_bytes
    )


def test_qwen3_8b_by_hand() -> None:
    # Hugging Face counts 8,190,735,360 parameters.
    plan = fits(QWEN, ON_CUDA, 139 * GIB, speculative_algorithm="NGRAM")
    assert plan.weight_bytes == 2 * 8_190_735_360
    assert plan.kv_bytes_per_token == 2 * 36 * 8 * 128 * 2 == 147_456
    assert plan.num_tokens == 2 * 40_960  # two contexts are more than 48 * 1,024
    nodes, splits = 48 * 12, 264 * 128 * (128 + 1) * 4
    # A token: stream and norm; qkv, query and context; gate_up and their product; ids and slots.
    token = 2 * (2 * 4096 + (6144 + 2 * 4096) + 3 * 12_288) + 64
    logits = nodes * (151_936 * 2 + 52 * 2048 + 4096)
    # Twice, for what smaller steps leave behind.
    assert plan.activation_bytes == 2 * ((512 + nodes) * token + logits) + splits
    # 9 sizes of up to 48 rows with 1 + 6 sizes of up to 12 tokens, and beside prompts 15 with
    # drafts and 12 without; greedy and sampling, 380 kernels each.
    kernels = 2 * (9 * 7 + 15 + 12) * 380 * 4096
    # A whole chunk beside all rows; 32 prompts may end in it.
    largest = (512 + nodes) * token + (nodes + 32) * logits // nodes
    assert plan.graph_bytes == largest + splits + (20 << 20) + kernels
    assert plan.workspace_bytes == 2 * (32 << 20) + 65_536 * 128 * 4
    assert plan.loading_bytes == 2 * 12_288 * 4096 * 2
    assert plan.total_bytes == sum(size for _, size in memory_parts(plan))
    assert fits(QWEN, ON_CUDA, 139 * GIB, disable_cuda_graph=True).graph_bytes == 0
    small = fits(QWEN, ON_CUDA, 139 * GIB, speculative_algorithm="NGRAM", cuda_graph_max_bs=4)
    assert small.graph_bytes < plan.graph_bytes / 2.5
    fields: dict[str, object] = {"speculative_algorithm": "NGRAM"}
    texts = fits(QWEN, ON_CUDA, 139 * GIB, speculative_ngram_source="both", **fields)
    pages = -(-(40_960 + 130) // 16)
    assert texts.state_bytes - plan.state_bytes == 97 * pages * 16 * 4
    # Edits: the logits three times in float32, counts and lists of the slots, graphs of their own.
    bans = 97 * (151_936 // 8 + 4 * (512 + 65 + 33))
    edits = 3 * 4 * (nodes + 32) * 151_936 + 97 * 4 * (151_936 + 1024) + bans
    assert plan.edit_bytes == edits + kernels


def test_the_static_fraction_is_of_what_the_context_leaves() -> None:
    plan = fits(QWEN, ON_CUDA, 139 * GIB, max_running_requests=1024)
    assert plan.num_tokens < 1024 * 1024
    left = 139 * GIB - plan.context_bytes
    assert plan.context_bytes == 665 << 20
    share = (plan.weight_bytes + plan.kv_bytes) / left
    assert 0.9 - 16 * 147_456 / left < share <= 0.9
    assert plan.total_bytes + plan.edit_bytes <= 139 * GIB


def test_a_chunk_is_no_longer_than_the_pool() -> None:
    whole = fits(QWEN, ON_CUDA, 139 * GIB, chunked_prefill_size=-1, max_total_tokens=4096)
    chunked = fits(QWEN, ON_CUDA, 139 * GIB, chunked_prefill_size=8192, max_total_tokens=4096)
    assert whole.activation_bytes == chunked.activation_bytes


def test_loading_can_be_the_peak() -> None:
    wide = msgspec.structs.replace(load_model_config(QWEN), num_hidden_layers=1, vocab_size=64)
    config = EngineConfig(
        model="wide", load_format="dummy", max_total_tokens=16, chunked_prefill_size=1,
        max_running_requests=1, disable_cuda_graph=True,
    )  # fmt: skip
    plan = plan_memory(config, wide, {}, ON_CUDA, 139 * GIB)
    assert isinstance(plan, MemoryPlan)
    assert plan.total_bytes == plan.context_bytes + plan.weight_bytes + plan.loading_bytes


def test_a_rank_of_qwen3_8b_by_hand() -> None:
    one = fits(QWEN, ON_CUDA, 139 * GIB)
    two = fits(QWEN, ON_CUDA, 139 * GIB, tp_size=2)
    layer = 6144 * 4096 + 4096 * 4096 + 3 * 12288 * 4096
    assert one.weight_bytes - two.weight_bytes == 2 * 36 * layer // 2
    assert two.kv_bytes_per_token * 2 == one.kv_bytes_per_token
    assert (two.tp_size, two.num_pages) == (2, one.num_pages)
    assert two.context_bytes - one.context_bytes == 1 << 30  # NCCL's
    # Dummies: parts before they are joined, and the whole matrix that a part is cut out of.
    first, both = (
        fits(QWEN, ON_CUDA, 139 * GIB, load_format="dummy", tp_size=ranks) for ranks in (1, 2)
    )
    assert first.loading_bytes == (4 * 12_288 + 6144) * 4096 * 2
    assert both.loading_bytes == (4 * 6144 + 3072 + 12_288) * 4096 * 2
    assert two.loading_bytes * 2 == one.loading_bytes
    sixteen = fits(QWEN, ON_CUDA, 139 * GIB, tp_size=16)
    assert sixteen.kv_bytes_per_token * 8 == one.kv_bytes_per_token, "there are 8 heads"
    refused = planned(QWEN, ON_CUDA, 139 * GIB, tp_size=5)
    assert isinstance(refused, Refused)
    assert refused.field == "tp_size"


@pytest.mark.parametrize(
    ("fields", "free", "field", "words"),
    [
        ({}, 16, "mem_fraction_static", "leaves no room for KV beside 15.256 GiB of weights"),
        (
            {"max_total_tokens": 900_000},
            139,
            "max_total_tokens",
            "allows 795584; ask for less or raise --mem-fraction-static",
        ),
        ({"context_length": 50_000}, 139, "context_length", "exceeds the model's 40960"),
        (
            {"max_running_requests": 4096, "speculative_algorithm": "NGRAM"},
            139,
            "mem_fraction_static",
            r"need 288\.\d+ GiB, but 139\.000 GiB are free: .*weights 15\.256 GiB.*"
            r"CUDA graphs 24\..*; lower it, --max-total-tokens, --max-running-requests, "
            "--chunked-prefill-size or --cuda-graph-max-bs",
        ),
        (
            {"max_total_tokens": 40_000, "chunked_prefill_size": -1},
            24,
            "mem_fraction_static",
            r"need 31\.\d+ GiB, but 24\.000 GiB are free: .*activations 8\.\d+ GiB",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(
    fields: dict[str, object], free: int, field: str, words: str
) -> None:
    refused = planned(QWEN, ON_CUDA, free * GIB, **fields)
    assert isinstance(refused, Refused)
    assert refused.field == field
    assert re.search(words, refused.reason), refused.reason


@pytest.mark.parametrize(
    ("free", "fraction", "field", "words"),
    [
        (
            139,
            0.05,
            "mem_fraction_static",
            "0.05 of the 138.351 GiB that are free beside a CUDA context of 0.649 GiB leaves no "
            "room",
        ),
        (0.25, 0.9, "device", "kernels take 0.649 GiB, but 0.250 GiB are free"),
    ],
)
def test_a_model_that_cannot_fit_is_refused(
    free: float, fraction: float, field: str, words: str
) -> None:
    placement = ON_CUDA._replace(mem_fraction=fraction)
    refused = planned(QWEN, placement, int(free * GIB))
    assert isinstance(refused, Refused)
    assert refused.field == field
    assert words in refused.reason


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"page_size": 64, "max_total_tokens": 5000, "speculative_algorithm": "NGRAM"},
        {"load_format": "dummy", "mem_fraction_static": 0.01, "max_running_requests": 4096},
    ],
    ids=["default", "asked", "filled"],
)
def test_an_engine_takes_what_was_planned(
    fields: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engine.rank_worker.free_memory", lambda: 8 * GIB)
    config = EngineConfig(model="pycoder", device="cpu", num_threads=1, **fields)  # type: ignore[arg-type]
    placement = ON_CPU._replace(mem_fraction=config.mem_fraction_static or 0.5)
    plan = fits(PYCODER, placement, 8 * GIB, **fields)
    worker = build_worker(config)
    try:
        info = worker.info()
    finally:
        worker.shutdown()
    assert info.weight_bytes == plan.weight_bytes
    assert (info.num_pages, info.kv_bytes_per_token) == (plan.num_pages, plan.kv_bytes_per_token)
    model = load_model_config(PYCODER)
    pool = KVPool(plan.num_pages, plan.page_size, model, torch.float32, CPU)
    assert pool.data.nbytes == plan.kv_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_every_family(tmp_path: Path, kind: str) -> None:
    made = save(kind, tmp_path, shard_size="60KB")
    model = load_model_config(tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made.to(dtype).save_pretrained(tmp_path, max_shard_size="60KB")
        model = load_model_config(tmp_path)
        stored = tensor_dtypes(tmp_path)
        assert set(stored.values()) == {str(dtype).removeprefix("torch.")}
        assert weight_bytes(model, stored, ON_CPU) == (
            load_model(tmp_path, model, torch.float32, CPU).weight_bytes
        )
        assert weight_bytes(model, {}, ON_CUDA) == (
            load_model(tmp_path, model, torch.bfloat16, CPU, native=False).weight_bytes
        )


def test_mixed_types_are_read_from_the_headers(tmp_path: Path) -> None:
    made = save("qwen3", tmp_path)
    made.model.layers[1].self_attn.k_proj.bfloat16()
    made.model.layers[2].mlp.down_proj.bfloat16()
    made.save_pretrained(tmp_path)
    model, stored = load_model_config(tmp_path), tensor_dtypes(tmp_path)
    assert set(stored.values()) == {"bfloat16", "float32"}
    assert weight_bytes(model, stored, ON_CPU) == (
        load_model(tmp_path, model, torch.float32, CPU).weight_bytes
    )


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, b"\x04" + bytes(7) + b"nope"])
def test_damaged_headers_are_named(tmp_path: Path, damage: bytes) -> None:
    assert tensor_dtypes(tmp_path) == {}
    (tmp_path / "model.safetensors").write_bytes(damage)
    with pytest.raises(HeaderError, match=r"model\.safetensors"):
        tensor_dtypes(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{", '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": "none"}}'):
        index.write_text(text)
        with pytest.raises(HeaderError):
            tensor_dtypes(tmp_path)


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_tensors_are_drawn_in_place(dtype: torch.dtype) -> None:
    first, second = (RandomTensors(dtype, DEVICE) for _ in range(2))
    norm = first.take("model.layers.0.self_attn.q_norm.weight", (32,))
    matrix = first.take("model.layers.0.mlp.up_proj.weight", (300, 200))
    assert (norm == 1).all()
    assert {(t.dtype, t.device.type) for t in (norm, matrix)} == {(dtype, DEVICE.type)}
    assert abs(float(matrix.float().std()) - 0.02) < 5e-4
    assert abs(float(matrix.float().mean())) < 5e-4
    second.take("model.layers.0.self_attn.q_norm.weight", (32,))
    assert torch.equal(matrix, second.take("model.layers.0.mlp.up_proj.weight", (300, 200)))


def test_dummy_weights_are_as_large_as_the_checkpoints() -> None:
    model: ModelConfig = msgspec.structs.replace(load_model_config(PYCODER), num_hidden_layers=2)
    made = load_model(Path("/nowhere"), model, torch.float32, CPU, "dummy")
    assert made.weight_bytes == weight_bytes(model, {}, ON_CPU)
