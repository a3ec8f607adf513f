"""Forced accept lengths on the device: the CPU's draws, paths and tokens."""

import random
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from outrider.engine.speculative.simulate import SimulatedAcceptance
from outrider.engine_core.ids import i32
from outrider.engine_core.sampling_params import SamplingParams
from outrider.kernels import force_accept, force_accept_gpu

from ..cores import running_engine, tiny_config
from ..driver import BigramModel, Drafts, Driver, chain
from ..test_processors import EOS, VOCAB, make_table
from ..tiny import bigram_config, write_checkpoint
from .gpu_driver import DEVICE, GpuBigram, GpuDriver

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.8, seed=5)
EDITED = SamplingParams(temperature=0.0, frequency_penalty=0.4, min_new_tokens=20)
WIDTH = 5  # nodes of a row


def drawn(
    module: ModuleType, device: torch.device, mean: float, slots: list[int], positions: list[int]
) -> list[int]:
    """Accept lengths of chains of four drafts, from the targets that were forced."""
    simulated, rows = SimulatedAcceptance(mean), len(slots)

    def each_row(values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device).repeat(rows)

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    edges = int32(list(range(0, rows * WIDTH + 1, WIDTH)))
    targets = each_row([9] * WIDTH, torch.int64)
    starts = int32(positions)
    module.force_accept(
        targets,
        each_row([0, 1, 2, 3, 4], torch.int64),
        starts.long().repeat_interleave(WIDTH) + each_row([0, 1, 2, 3, 4], torch.int64),
        each_row([1, 3, 7, 15, 31], torch.int64),
        each_row([-1, 0, 1, 2, 3], torch.int32),
        edges,
        edges,
        int32(slots),
        starts,
        floor=simulated.floor,
        threshold=simulated.threshold,
        tokens=torch.empty_like(targets),
    )
    lengths: list[int] = (1 + (targets.view(rows, WIDTH) < 9).sum(1)).tolist()
    return lengths


@pytest.mark.parametrize("mean", [1.0, 2.37, 3.9])
@pytest.mark.parametrize(
    ("module", "device", "count"),
    [
        (force_accept, torch.device("cpu"), 4000),
        (force_accept_gpu, DEVICE, 20_000 if DEVICE.type == "cuda" else 400),
    ],
    ids=["torch", "gpu"],
)
def test_draws_are_those_of_the_cpu(
    module: ModuleType, device: torch.device, count: int, mean: float
) -> None:
    rng = random.Random(int(mean * 1000))
    slots = [rng.choice((0, 1, rng.randrange(512))) for _ in range(count)]
    positions = [rng.choice((0, rng.randrange(40_000), 2**31 - 70)) for _ in range(count)]
    expected = SimulatedAcceptance(mean).lengths(np.array(slots, np.int32), np.array(positions))
    assert drawn(module, device, mean, slots, positions) == expected.tolist()
    assert len(set(expected.tolist())) == (1 if mean == 1.0 else 2)


def random_drafts(rng: random.Random, tree: bool) -> Drafts | None:
    width = rng.choice((0, 1, rng.randint(2, 11)))
    tokens = [rng.randrange(VOCAB) for _ in range(width)]
    if not tokens:
        return None
    return Drafts(tokens, [rng.randint(0, i) for i in range(width)]) if tree else chain(tokens)


@pytest.mark.parametrize(("mean", "tree"), [(1.0, False), (2.5, True), (2.5, False), (12.0, True)])
def test_rows_emit_what_the_cpus_rows_emit(mean: float, tree: bool) -> None:
    """Greedy, sampled and edited rows beside rows without drafts; on a GPU, in a graph."""
    rng, table = random.Random(int(mean * 10)), make_table(4)
    gpu = GpuDriver(GpuBigram(table), bigram_config(VOCAB), accept_length=mean)
    cpu = Driver(BigramModel(table), bigram_config(VOCAB), accept_length=mean)
    for driver in (gpu, cpu):
        for slot, params in enumerate((GREEDY, GREEDY, SEEDED, EDITED)):
            driver.enter(slot, [slot + 1, 3], params, 5, EOS)
    steps = 40 if DEVICE.type == "cuda" else 6
    forced = 0
    for _ in range(steps):
        drafts = {slot: random_drafts(rng, tree) for slot in rng.sample(range(4), 3)}
        expected, other = cpu.verify(drafts)
        emitted, result = gpu.verify(drafts)
        assert emitted == expected
        assert i32(result.depths).tolist() == i32(other.depths).tolist()
        forced += sum(len(tokens) > 1 for tokens in emitted.values())
    assert (forced > 0) == (mean > 1)
    if DEVICE.type == "cuda":
        assert gpu.gpu_runner.replays == steps


def test_an_unusable_row_ends_beside_one_that_accepts() -> None:
    table = torch.eye(8)[torch.arange(1, 9) % 8].contiguous()
    table[5] = float("nan")
    driver = GpuDriver(GpuBigram(table), bigram_config(8), accept_length=3.0)
    for slot in (0, 1):
        driver.enter(slot, [2], GREEDY)
    emitted, result = driver.verify({0: chain([5, 1, 2]), 1: chain([7, 1, 2])})
    assert [error.row for error in result.errors] == [0]
    assert emitted[1] == [7, 1, 2]


@pytest.mark.gpu
def test_an_engine_on_a_gpu_says_that_it_simulates(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", VOCAB)
    config = tiny_config(folder, "NGRAM", device="cuda", simulate_accept_length=2.0)
    with running_engine(config) as engine:
        assert engine.info.simulated
        assert engine.info.device == "cuda"
