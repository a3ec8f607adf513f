"""Forced accept lengths: the mean holds, paths are the drafts', and everything says simulated."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.engine.models import Model
from outrider.engine.speculative.simulate import SimulatedAcceptance
from outrider.engine_core.ids import i32
from outrider.engine_core.model_config import ModelConfig
from outrider.engine_core.sampling_params import SamplingParams

from .cores import drive, random_draft_core, request, running_engine, tiny_config
from .driver import BigramModel, Drafts, Driver, chain
from .tiny import bigram_config, load_tiny, write_checkpoint

VOCAB = 40
PROMPT = [3, 9, 1, 22, 17, 9, 30]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", VOCAB)


@pytest.fixture(scope="module")
def tiny(folder: Path) -> tuple[Model, ModelConfig]:
    return load_tiny(folder)


@pytest.mark.parametrize("mean", [1.0, 1.25, 2.5, 3.0, 7.9])
def test_lengths_have_the_mean_and_repeat(mean: float) -> None:
    slots, positions = (a.ravel().astype(np.int32) for a in np.mgrid[0:64, 100:1100])
    forced = SimulatedAcceptance(mean)
    lengths = forced.lengths(slots, positions)
    assert abs(lengths.mean() - mean) < 0.01
    assert set(lengths.tolist()) <= {int(mean), int(mean) + 1}
    for part in (slots == 5, positions == 731):  # no slot and no position is special
        assert abs(lengths[part].mean() - mean) < 0.25
    assert np.array_equal(lengths, forced.lengths(slots, positions))


def walks(drafts: Drafts) -> set[tuple[int, ...]]:
    """Paths (row-local nodes, root included) to the deepest nodes."""
    paths: dict[int, tuple[int, ...]] = {0: (0,)}
    for node, parent in enumerate(drafts.parents, 1):
        paths[node] = (*paths[parent], node)
    depth = max(map(len, paths.values()))
    return {path for path in paths.values() if len(path) == depth}


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("mean", [1.0, 2.5, 12.0])
def test_rows_emit_their_drafts_and_then_the_target(
    tiny: tuple[Model, ModelConfig], mean: float, tree: bool
) -> None:
    rng = random.Random(7)
    driver = Driver(*tiny, accept_length=mean)
    for slot in range(3):
        driver.enter(slot, PROMPT[slot:], GREEDY)
    history = [[*PROMPT[slot:], int(driver.state.last_tokens[slot])] for slot in range(3)]
    for _ in range(12):
        drafts: dict[int, Drafts | None] = {1: None}
        for slot, width in ((0, 1), (2, rng.randint(2, 8))):
            tokens = [rng.randrange(VOCAB) for _ in range(width)]
            parents = [rng.randint(0, i) for i in range(width)] if tree else list(range(width))
            drafts[slot] = Drafts(tokens, parents)
        drafts = dict(sorted(drafts.items()))
        positions = driver.state.seq_lens[:3].clone()
        emitted, result = driver.verify(drafts)
        depths = i32(result.depths).tolist()
        wanted = SimulatedAcceptance(mean).lengths(
            np.arange(3, dtype=np.int32), positions.numpy().astype(np.int32)
        )
        for row, (slot, row_drafts) in enumerate(drafts.items()):
            got = list(emitted[slot])
            history[slot] += got
            if row_drafts is None:
                assert len(got) == 1
                continue
            assert len(got) == min(wanted[slot], depths[row] + 1)
            assert any(
                got[:-1] == [row_drafts.tokens[node - 1] for node in path[1 : len(got)]]
                for path in walks(row_drafts)
            )
            # The last token is the target's, given the forced text before it.
            expected = Driver(*tiny).enter(0, history[slot][:-1], GREEDY)
            assert got[-1] == expected


@pytest.mark.parametrize(
    ("mean", "bad", "good", "expected"),
    [(3.0, [5, 1, 2], [7, 1, 2], [7, 1, 2]), (None, [4, 5], [4], [4, 5])],
)
def test_unusable_logits_end_their_row_beside_a_row_that_accepts(
    mean: float | None, bad: list[int], good: list[int], expected: list[int]
) -> None:
    table = torch.eye(8)[torch.arange(1, 9) % 8].contiguous()
    table[5] = float("nan")
    driver = Driver(BigramModel(table), bigram_config(8), accept_length=mean)
    for slot in (0, 1):
        driver.enter(slot, [2], GREEDY)
    emitted, result = driver.verify({0: chain(bad), 1: chain(good)})
    assert [error.row for error in result.errors] == [0]
    assert emitted[1] == expected


@pytest.mark.parametrize("tree", [False, True])
def test_the_mean_holds_through_the_core(folder: Path, tree: bool) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=300, ignore_eos=True)
    config = tiny_config(folder, "NGRAM", simulate_accept_length=2.6)
    with random_draft_core(config, tree) as core:
        outputs = drive(core, [request(f"r{n}", PROMPT[n:], params) for n in range(6)])
    stats = [out[-1].stats for out in outputs.values()]
    assert all(s is not None for s in stats)
    tokens = sum(s.verify_tokens for s in stats if s is not None)
    steps = sum(s.verify_ct for s in stats if s is not None)
    assert steps > 500
    assert abs(tokens / steps - 2.6) < (0.1 if tree else 0.05)


def test_an_engine_says_that_it_simulates(folder: Path) -> None:
    with running_engine(tiny_config(folder, "NGRAM", simulate_accept_length=2.0)) as engine:
        assert engine.info.simulated
    with running_engine(tiny_config(folder, "NGRAM")) as engine:
        assert not engine.info.simulated
