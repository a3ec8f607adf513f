"""The floor of a step against numbers worked out by hand."""

from pathlib import Path

import msgspec
import pytest

from outrider.engine_core.draft_config import DraftConfig, MarkovConfig, SpecShape
from outrider.engine_core.draft_config_json import load_draft_config
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.round_floor import draft_work
from outrider.engine_core.step_floor import (
    Rates,
    StepWork,
    matmul_elements,
    prefill_operations,
    step_work,
    streamed_bytes,
)

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
QWEN = load_model_config(CONFIGS / "qwen3-8b")
EAGLE3 = load_draft_config(CONFIGS / "qwen3-8b-eagle3", QWEN, "EAGLE3")
WEIGHTS = 16_381_470_720
H200 = Rates(copy=4.27e12, matmul=700e12)


def test_weights_of_an_8b_model() -> None:
    streamed = streamed_bytes(QWEN, WEIGHTS, "cuda", "bfloat16")
    assert streamed == WEIGHTS - 151_936 * 4096 * 2 == 15_136_811_008
    # A layer: q, o 4096 x 4096; k, v 4096 x 1024; gate, up, down 4096 x 12288.
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288
    assert matmul_elements(QWEN) == 36 * layer + 151_936 * 4096
    # What is left are norms: two of 4096 and two of 128 a layer, and the last.
    assert streamed - 2 * matmul_elements(QWEN) == 2 * (36 * (2 * 4096 + 2 * 128) + 4096)


def test_floor_of_an_8b_step() -> None:
    streamed = streamed_bytes(QWEN, WEIGHTS, "cuda", "bfloat16")
    one = step_work(QWEN, streamed, 147_456, rows=1, tokens=1, length=0)
    assert one.floor(H200) == pytest.approx(3.545e-3, rel=1e-3)
    batch = step_work(QWEN, streamed, 147_456, rows=64, tokens=64, length=576)
    assert batch.kv_bytes == 64 * 576 * 147_456
    assert batch.floor(H200) == pytest.approx(3.545e-3 + 5.436e9 / 4.27e12, rel=1e-3)
    verify = step_work(QWEN, streamed, 147_456, rows=64, tokens=512, length=576)
    assert verify.kv_bytes == batch.kv_bytes
    # 512 tokens times 2 x 7.568e9 operations outweigh the weights.
    assert verify.operations == pytest.approx(7.75e12, rel=1e-3)
    assert verify.floor(H200) == pytest.approx(7.75e12 / 700e12 + 5.436e9 / 4.27e12, rel=1e-3)


def test_the_slower_of_bytes_and_operations_counts() -> None:
    assert StepWork(100, 50, 10).floor(Rates(10.0, 10.0)) == 15.0
    assert StepWork(100, 50, 400).floor(Rates(10.0, 10.0)) == 45.0


def test_windows_bound_what_is_read() -> None:
    half = msgspec.structs.replace(QWEN, sliding_windows=(128, 0) * 18)
    assert step_work(half, 1, 72, rows=2, tokens=2, length=1000).kv_bytes == 2 * 36 * 1128
    assert step_work(half, 1, 72, rows=2, tokens=2, length=100).kv_bytes == 2 * 72 * 100


def test_prefill_of_an_8b_model() -> None:
    # A layer has 4096 x (4096 + 6144) + 3 x 4096 x 12,288 elements; a token sees half of 8,192.
    work = prefill_operations(QWEN, prompts=2, length=8192)
    layer = 4096 * (4096 + 6144) + 3 * 4096 * 12_288
    assert work.linear == 2 * 2 * (8192 * 36 * layer + 151_936 * 4096)
    assert work.attention == 2 * 36 * 4 * (8192 * 8193 // 2) * 4096
    assert work.total == pytest.approx(2.67e14, rel=1e-2)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 9])
def test_prefill_sees_causally_and_through_windows(length: int) -> None:
    model = msgspec.structs.replace(QWEN, num_hidden_layers=2, sliding_windows=(4, 0))
    seen = sum(min(i + 1, 4) + i + 1 for i in range(length))
    assert prefill_operations(model, 3, length).attention == 3 * 4 * seen * model.q_size


def test_a_table_that_is_the_head_is_read() -> None:
    tied = msgspec.structs.replace(QWEN, tie_word_embeddings=True)
    assert streamed_bytes(tied, 1000, "cuda", "bfloat16") == 1000
    # The CPU kernels keep bfloat16 weights though they compute in float32.
    assert streamed_bytes(QWEN, WEIGHTS, "cpu", "float32") == 15_136_811_008


# A layer of the 8B model: q, k, v; o; gate, up, down.
QKV = (4096 + 2 * 1024) * 4096
LAYER = QKV + 4096 * 4096 + 3 * 4096 * 12_288


def test_floor_of_an_eagle3_round() -> None:
    layer, head, fc = LAYER + QKV, 32_000 * 4096, 3 * 4096 * 4096
    chain = draft_work(EAGLE3, SpecShape(3, 1, 4), "bfloat16", rows=8, length=500)
    # The extend over 8 x 4 tokens, and two forwards of 8; a head behind each of the three.
    assert chain.weight_bytes == 2 * (3 * (layer + head) + fc)
    assert chain.kv_bytes == 3 * 8 * 500 * 4096
    assert chain.operations == 2 * (32 * (layer + fc) + 2 * 8 * layer + 3 * 8 * head)
    tree = draft_work(EAGLE3, SpecShape(3, 4, 16), "bfloat16", rows=8, length=500)
    assert tree.weight_bytes == chain.weight_bytes
    linear = 8 * 16 * (layer + fc) + 2 * 8 * 4 * layer
    assert tree.operations == 2 * (linear + (8 + 2 * 8 * 4) * head)


def test_floor_of_the_other_rounds() -> None:
    def made(algorithm: str, features: int, vocab: int) -> DraftConfig:
        return DraftConfig(
            algorithm=algorithm,  # type: ignore[arg-type]
            model=EAGLE3.model,
            feature_size=features,
            draft_vocab_size=vocab,
            owns_embedding=False,
            owns_head=False,
        )

    shape, vocab = SpecShape(3, 1, 4), 151_936
    eagle = draft_work(made("EAGLE", 4096, vocab), shape, "bfloat16", rows=1, length=100)
    layer = LAYER + 2 * 4096 * 4096  # fc, for every token
    assert eagle.weight_bytes == 2 * 3 * (layer + vocab * 4096)
    assert eagle.operations == 2 * ((4 + 2) * layer + 3 * vocab * 4096)
    small = draft_work(made("STANDALONE", 0, vocab), shape, "float32", rows=1, length=100)
    assert small.weight_bytes == 4 * (4 * LAYER + 3 * vocab * 4096)
    assert small.kv_bytes == 4 * 100 * 4096 * 2
    assert small.operations == 2 * ((4 + 3) * LAYER + 3 * vocab * 4096)


def test_a_round_is_a_verify_step_and_its_drafts() -> None:
    whole = StepWork(10, 20, 30).with_drafts(StepWork(1, 2, 3))
    assert whole == StepWork(11, 22, 33)


def test_floor_of_a_block_round() -> None:
    draft = load_draft_config(CONFIGS / "qwen3-8b-dflash", QWEN, "DFLASH")
    assert draft.block is not None
    work = draft_work(draft, SpecShape(15, 1, 16), "bfloat16", rows=2, length=100)
    # A layer as the target's; keys and values once more for the verified tokens; fc of five layers.
    kv = 5 * 2 * 1024 * 4096
    layers = 5 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288)
    head, fc = 151_936 * 4096, 5 * 4096 * 4096
    assert work.weight_bytes == 2 * (layers + kv + head + fc)
    assert work.kv_bytes == 2 * 100 * 5 * 2 * 1024 * 2
    assert work.operations == 2 * (32 * (layers + kv + fc) + 30 * head)
    block = msgspec.structs.replace(draft.block, first_row=0, markov=MarkovConfig("vanilla", 256))
    dspark = msgspec.structs.replace(draft, algorithm="DSPARK", block=block)
    more = draft_work(dspark, SpecShape(15, 1, 16), "bfloat16", rows=2, length=100)
    assert more.weight_bytes - work.weight_bytes == 2 * 15 * 151_936 * 256
    assert more.operations == work.operations + 2 * (30 * 151_936 * 256 - 2 * layers)
