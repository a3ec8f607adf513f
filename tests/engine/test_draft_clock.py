"""Timing a draft model's part of a step disturbs nobody."""

from pathlib import Path

import pytest
import torch

from outrider.engine_core.draft_config import DraftAlgorithm, SpecShape

from .draft_cores import ALGORITHMS, CHAIN, TREE, draft_core, write_models


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_clock_writes_the_sink_page_alone(
    algorithm: DraftAlgorithm, shape: SpecShape, tmp_path: Path
) -> None:
    with draft_core(write_models(tmp_path), algorithm, shape) as made:
        assert made.draft is not None
        state, size = made.runner.state, made.draft.kv.page_size
        state.page_table.fill_(3)
        pools = [pool.data for pool in made.runner.pools]
        assert len(pools) == 2
        for data in pools:
            data.fill_(7.0)
        times = made.worker.measure_drafting([1, 2, 8])
        steps = made.worker.measure([1, 8, 70])
        assert min(*times, *steps) > 0
        assert bool((state.page_table == 3).all())
        for data in pools:
            assert torch.equal(data[:, :, size:], torch.full_like(data[:, :, size:], 7.0))
            assert bool((data[:, :, :size] != 7.0).any())
