"""What the GPU runner tells benchmarks: steps, replays, idle time, and bare replays."""

import time
from pathlib import Path

import pytest
import torch

from outrider.engine.weights import Checkpoint
from outrider.engine_core.model_config import load_model_config

from ..driver import chain
from ..test_step import GREEDY, PROMPT, VOCAB
from ..tiny import write_checkpoint
from .gpu_driver import DEVICE, GpuDriver


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", VOCAB)


def make(folder: Path) -> GpuDriver:
    return GpuDriver(Checkpoint(folder), load_model_config(folder))


def test_idle_time_is_what_lies_between_steps(folder: Path) -> None:
    driver = make(folder)
    runner = driver.gpu_runner
    driver.enter(0, PROMPT, GREEDY)
    driver.verify({0: None})
    assert runner.prefill_steps == runner.steps - runner.decode_steps == 2
    before = runner.gap_ns
    time.sleep(0.02)
    result = driver.verify({0: None})[1]
    assert 15e6 < runner.gap_ns - before < 1e9
    assert result.busy_ns > 0
    assert runner.decode_steps == 2
    assert runner.replays == (2 if DEVICE.type == "cuda" else 0)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there are graphs")
def test_without_graphs_nothing_is_replayed(folder: Path) -> None:
    assert make(folder).gpu_runner.replay_seconds(1, 1, 3) is None


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [None, [3, 4, 5]])
def test_bare_replays_leave_lengths_and_last_tokens(folder: Path, drafts: list[int] | None) -> None:
    driver = make(folder)
    state = driver.device_state
    for slot in (0, 1):
        driver.enter(slot, PROMPT, GREEDY)
    row = None if drafts is None else chain(drafts)
    for _ in range(4):
        driver.verify({0: row, 1: row})
    before = [t.clone() for t in (state.seq_lens, state.last_tokens, state.out_counts)]
    seconds = driver.gpu_runner.replay_seconds(2, 2 * (1 + len(drafts or ())), 4)
    assert seconds is not None
    assert 0 < seconds < 1
    after = (state.seq_lens, state.last_tokens, state.out_counts)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
