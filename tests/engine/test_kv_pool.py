"""The KV pool's moves and sizes, and the choice of the thread count."""

from pathlib import Path

import pytest
import torch

from outrider.engine.kv_pool import KVPool, bytes_per_token, copy_pages
from outrider.engine.threads import choose_num_threads, pick
from outrider.engine_core.available_cores import available_cores
from outrider.engine_core.memory_plan import plan_num_pages
from outrider.engine_core.model_config import ModelConfig, load_model_config
from outrider.engine_core.plan import SlotInit, StepPlan
from outrider.engine_core.sampling_params import SamplingParams

from .checkpoints import save

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = tmp_path_factory.mktemp("qwen3")
    save("qwen3", folder)
    return load_model_config(folder)


def test_move_reads_before_it_writes(config: ModelConfig) -> None:
    pool = KVPool(6, 4, config, torch.float32, CPU)
    assert pool.data.shape == (3, 2, 28, 2, 32)
    assert float(pool.data.abs().max()) == 0.0
    pool.data.normal_()
    before = pool.data.clone()
    pool.move(torch.tensor([9, 11, 14]), torch.tensor([8, 9, 10]))
    assert torch.equal(pool.data[:, :, [8, 9, 10]], before[:, :, [9, 11, 14]])
    untouched = [slot for slot in range(28) if slot not in (8, 9, 10)]
    assert torch.equal(pool.data[:, :, untouched], before[:, :, untouched])
    pool.move(torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long))
    key, value = pool.layer(2)
    assert key.data_ptr() == pool.data[2, 0].data_ptr()
    assert value.shape == (28, 2, 32)


def test_pages_are_copied_in_every_pool(config: ModelConfig) -> None:
    pools = [KVPool(6, 4, config, torch.float32, CPU) for _ in range(2)]
    for pool in pools:
        pool.data.normal_()
    before = [pool.data.clone() for pool in pools]
    copy_pages(plan_with_copies((2, 5), (1, 6)), pools)
    for pool, was in zip(pools, before, strict=True):
        assert torch.equal(pool.data[:, :, 20:24], was[:, :, 8:12])
        assert torch.equal(pool.data[:, :, 24:], was[:, :, 4:8])
        assert torch.equal(pool.data[:, :, :20], was[:, :, :20])
    for wrong in ((0, 3), (3, 0), (7, 1), (1, 7)):
        with pytest.raises(ValueError, match="of 1 to 6"):
            copy_pages(plan_with_copies(wrong), pools)


def plan_with_copies(*copies: tuple[int, int]) -> StepPlan:
    init = SlotInit(0, 1, SamplingParams(), 0, b"", b"", 3, (), copies)
    return StepPlan(1, False, b"", b"", b"", b"", b"", (init,), b"", b"", b"")


def test_sizes(config: ModelConfig) -> None:
    token = bytes_per_token(config, torch.float32)
    assert token == 2 * 3 * 64 * 4
    assert bytes_per_token(config, torch.bfloat16) * 2 == token
    pages = plan_num_pages(1 << 30, 0.5, 1 << 28, 16, token)
    assert (pages + 1) * 16 * token <= (1 << 28) < (pages + 2) * 16 * token
    assert plan_num_pages(1 << 30, 0.5, 0, 16, token, max_total_tokens=100) == 6
    with pytest.raises(ValueError, match=r"mem_fraction_static: 0\.5"):
        plan_num_pages(1 << 20, 0.5, 1 << 20, 16, token)
    with pytest.raises(ValueError, match="mem_fraction_static"):
        plan_num_pages(1 << 30, 1.5, 0, 16, token)
    with pytest.raises(ValueError, match="max_total_tokens"):
        plan_num_pages(1 << 30, 0.5, 0, 16, token, max_total_tokens=15)
    with pytest.raises(ValueError, match="num_pages"):
        KVPool(0, 16, config, torch.float32, CPU)


def test_more_threads_must_be_clearly_faster() -> None:
    assert pick([(1, 1.0)]) == 1
    assert pick([(1, 1.0), (2, 30.0)]) == 1
    assert pick([(1, 1.0), (2, 0.9)]) == 1
    assert pick([(1, 1.0), (2, 0.55), (4, 0.5)]) == 2
    assert pick([(1, 1.0), (2, 0.55), (4, 0.3)]) == 4


def test_thread_count_is_set() -> None:
    before = torch.get_num_threads()
    try:
        assert 1 <= choose_num_threads() <= available_cores()
        assert choose_num_threads(1) == torch.get_num_threads() == 1
        for wrong in (0, available_cores() + 1):
            with pytest.raises(ValueError, match="num_threads"):
                choose_num_threads(wrong)
    finally:
        torch.set_num_threads(before)
