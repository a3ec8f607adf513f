"""Steps of the GPU path over ranks (threads here): rank 0's decisions hold on all of them."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from outrider.engine.gemm_timer import Layer
from outrider.engine.models import Model
from outrider.engine.models.gpu_decoder import GpuDecoder
from outrider.engine.models.gpu_linear import GpuLinear
from outrider.engine.parallel.sharding import ShardedTensors
from outrider.engine.weights import Checkpoint
from outrider.engine_core.ids import i32
from outrider.engine_core.model_config import ModelConfig, load_model_config
from outrider.engine_core.plan import StepResult
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.tensor_parallel import shard_model

from ..checkpoints import save
from ..driver import Drafts, Driver
from ..gpu.gpu_driver import DEVICE, GpuDriver
from ..test_step import GREEDY, PROMPT, VOCAB, random_tree
from ..tiny import load_tiny, write_checkpoint
from .meeting import LocalRank, Meeting

COUNT = 30 if DEVICE.type == "cuda" else 6
EDITED = SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={3: 0.5}, logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", VOCAB)


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[Model, ModelConfig]:
    return load_tiny(folder)


def expected_tokens(
    reference: tuple[Model, ModelConfig], params: SamplingParams, count: int
) -> list[int]:
    driver = Driver(*reference)
    tokens = [driver.enter(0, PROMPT, params)]
    while len(tokens) < count:
        tokens += driver.verify({0: None})[0][0]
    return tokens


def rank_driver(folder: Path, rank: LocalRank) -> GpuDriver:
    config = load_model_config(folder)
    share = shard_model(config, rank.size)
    assert isinstance(share, ModelConfig)
    source = ShardedTensors(Checkpoint(folder), config, rank.rank, rank.size)
    # Threads that take turns cannot capture together.
    return GpuDriver(source, share, graphs=False, reduce=rank.reduce, ranks=rank)


def state_of(driver: GpuDriver) -> list[list[int]]:
    state = driver.device_state
    return [t.tolist() for t in (state.seq_lens, state.last_tokens, state.out_counts)]


@pytest.mark.parametrize("params", [GREEDY, EDITED], ids=["greedy", "edited"])
def test_trees_give_one_ranks_tokens_and_kv(
    folder: Path, reference: tuple[Model, ModelConfig], params: SamplingParams
) -> None:
    expected = expected_tokens(reference, params, COUNT + 12)

    def work(rank: LocalRank) -> tuple[list[int], torch.Tensor, list[list[int]], StepResult]:
        driver, rng = rank_driver(folder, rank), random.Random(2)
        tokens = [driver.enter(0, PROMPT, params)]
        while len(tokens) < COUNT:
            drafts = random_tree(rng, expected[len(tokens) : len(tokens) + 11], rng.randint(2, 9))
            emitted, result = driver.verify({0: drafts})
            tokens += emitted[0]
        return tokens, driver.kv_of(0), state_of(driver), result

    (tokens, kv, state, result), (others, other_kv, other_state, unread) = Meeting(2).run(work)
    assert tokens == others
    assert tokens[:COUNT] == expected[:COUNT]
    assert state == other_state
    assert bool(result.logprobs) == (params is EDITED)
    assert unread.logprobs == ()
    plain = Driver(*reference)
    plain.enter(0, PROMPT + tokens[:-1], GREEDY)
    # One key/value head, which both ranks hold.
    torch.testing.assert_close(kv, plain.kv_of(0), atol=1e-4, rtol=1e-4)
    assert torch.equal(kv, other_kv)


def test_chains_beside_a_prompt(folder: Path, reference: tuple[Model, ModelConfig]) -> None:
    expected = expected_tokens(reference, GREEDY, 6)

    def work(rank: LocalRank) -> tuple[list[int], list[list[int]]]:
        driver = rank_driver(folder, rank)
        driver.enter(0, PROMPT, GREEDY)
        drafts = Drafts(expected[1:4], [0, 1, 2])
        result = driver.verify_beside_prompt({0: drafts}, 1, PROMPT, GREEDY)
        return i32(result.tokens).tolist(), state_of(driver)

    first, second = Meeting(2).run(work)
    assert first == second
    assert first[0] == [*expected[1:5], expected[0]]


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_measured_where_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    save("qwen3-tied-bias", tmp_path, tie_word_embeddings=tied)
    config = load_model_config(tmp_path)
    share = shard_model(config, 2)
    assert isinstance(share, ModelConfig)
    widths: list[set[int]] = []

    def tune(linear: GpuLinear, chain: Sequence[Layer], block: int, rows: object) -> None:
        widths.append({len(weight) for layer in chain for _, weight in layer})

    monkeypatch.setattr(GpuLinear, "tune", tune)
    for rank in range(2):
        source = ShardedTensors(Checkpoint(tmp_path), config, rank, 2)
        model = GpuDecoder(source, share, torch.float32, DEVICE, lambda x: x, rank == 0)
        model.tune([1])
    first, second = widths
    assert first == second | {config.vocab_size}
    assert config.vocab_size not in second
