"""Two rank processes over gloo: one rank's tokens, whatever rank 1 thinks, and clear ends."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.engine.build import build_worker
from outrider.engine.parallel.worker import ParallelWorker
from outrider.engine.worker import EngineWorker
from outrider.engine_core.device_config import Placement
from outrider.engine_core.host_memory import free_memory
from outrider.engine_core.memory_plan import MemoryPlan, plan_memory
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.safetensors_header import tensor_dtypes

from ..cores import running_engine, tiny_config
from ..tiny import write_checkpoint
from .rank_cores import VOCAB, Tokens, assert_same, core_on, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", VOCAB)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Tokens:
    """One rank's tokens, from the native kernels."""
    with running_engine(tiny_config(folder)) as engine:
        return run(engine.core)


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[EngineWorker]:
    worker = build_worker(tiny_config(folder, tp_size=2))
    yield worker
    worker.shutdown()
    assert isinstance(worker, ParallelWorker)
    assert all(not Path(f"/proc/{pid}").exists() for pid in worker._ranks.pids)
    assert not worker._ranks.store.parent.exists()


def test_the_worker_is_as_large_as_planned(folder: Path, worker: EngineWorker) -> None:
    config, model = tiny_config(folder, tp_size=2), load_model_config(folder)
    placement = Placement("cpu", "float32", 0.5)
    plan = plan_memory(config, model, tensor_dtypes(folder), placement, free_memory())
    assert isinstance(plan, MemoryPlan)
    info = worker.info()
    assert (info.weight_bytes, info.num_pages) == (plan.weight_bytes, plan.num_pages)
    assert info.kv_bytes_per_token == plan.kv_bytes_per_token


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in-turn"])
@pytest.mark.parametrize("algorithm", [None, "NGRAM"])
def test_two_ranks_give_the_tokens_of_one(
    folder: Path, worker: EngineWorker, expected: Tokens, algorithm: str | None, overlap: bool
) -> None:
    config = tiny_config(
        folder, algorithm, tp_size=2, disable_overlap_schedule=not overlap, chunked_prefill_size=7
    )
    core = core_on(worker, config)
    assert_same(folder, expected, run(core))
    if algorithm is not None:
        assert core.stats(0).spec_accepted_tokens > 20
