"""Two ranks on two GPUs over NCCL: one rank's tokens from graphs, and the end of a killed rank."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from outrider.engine.worker import GraphWorker
from outrider.engine_core.config import EngineConfig
from outrider.engine_core.worker import WorkerFailed

from ..cores import running_engine, tiny_config
from ..tiny import write_checkpoint
from .rank_cores import VOCAB, assert_same, doomed_engine, requests, run, step_for_ever

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", VOCAB)


def two_gpus(folder: Path, algorithm: str | None, **fields: object) -> EngineConfig:
    return tiny_config(folder, algorithm, tp_size=2, device="cuda", dtype="float32", **fields)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "single-launches"])
@pytest.mark.parametrize("algorithm", [None, "NGRAM"])
def test_two_gpus_give_the_tokens_of_a_cpu(
    folder: Path, algorithm: str | None, graphs: bool
) -> None:
    with running_engine(tiny_config(folder, device="cpu")) as engine:
        expected = run(engine.core)
    with running_engine(two_gpus(folder, algorithm, disable_cuda_graph=not graphs)) as engine:
        assert_same(folder, expected, run(engine.core))
        assert isinstance(engine.worker, GraphWorker)
        assert (engine.worker.counts.replays > 10) == graphs


def test_a_killed_rank_ends_the_steps_with_its_name(folder: Path) -> None:
    with doomed_engine(two_gpus(folder, "NGRAM")) as (core, _, pid):
        for message in requests(400):
            assert core.submit(message) is None
        for _ in range(20):
            core.step()
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(WorkerFailed, match=rf"rank 1 \(process {pid}\).*killed by signal 9"):
            step_for_ever(core)
        assert time.monotonic() - killed < 1.5
