"""Acceptance thresholds: near 1 the target's joint law, below it more drafts and another law."""

from collections import Counter
from pathlib import Path

import msgspec
import pytest
import torch

from outrider.engine_core.draft_config import DraftAlgorithm, SpecShape
from outrider.engine_core.sampling_params import SamplingParams
from outrider.kernels import threshold_sample_cpu
from outrider.kernels.threshold_sample import coins

from .cores import drive, random_draft_core, request, tiny_config, tokens_of
from .draft_cores import CHAIN, TREE, draft_core, write_models
from .drafted_law import drawn
from .joint_law import LEAST_P, WARM, behind_the_first, draw, folder_of, joint_of, p_value

SINGLE, ACC = "speculative_accept_threshold_single", "speculative_accept_threshold_acc"
NEARLY_ONE = {ACC: 1 - 1e-9}  # another rule than at 1, the same law
Tokens = dict[str, list[int]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("thresholds")


@pytest.mark.parametrize(
    ("algorithm", "shape"), [("STANDALONE", CHAIN), ("EAGLE", TREE), ("EAGLE3", TREE)]
)
def test_nearly_at_one_triples_follow_the_joint_law(
    monkeypatch: pytest.MonkeyPatch, place: Path, algorithm: DraftAlgorithm, shape: SpecShape
) -> None:
    monkeypatch.setenv("OUTRIDER_CHECK", "0")
    assert drawn(place, algorithm, 6, 4, WARM, shape, **NEARLY_ONE).p > LEAST_P


def test_pairs_follow_it_behind_the_hosts_trees(
    monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    monkeypatch.setenv("OUTRIDER_CHECK", "0")
    folder = folder_of(place, 16)
    config = tiny_config(
        folder, "NGRAM", max_running_requests=64, max_total_tokens=8192,
        speculative_num_draft_tokens=6, **NEARLY_ONE,
    )  # fmt: skip
    with random_draft_core(config, tree=True) as core:
        found = Counter(tokens[1:] for tokens in draw(core, 3))
        assert core.stats(0).spec_accepted_tokens > 500
    assert p_value(behind_the_first(joint_of(folder, 16)), found) > LEAST_P


@pytest.mark.parametrize("flags", [{SINGLE: 0.2}, {ACC: 0.6}], ids=["single", "acc"])
def test_below_one_they_do_not_and_more_drafts_are_accepted(
    monkeypatch: pytest.MonkeyPatch, place: Path, flags: dict[str, float]
) -> None:
    monkeypatch.setenv("OUTRIDER_CHECK", "0")
    loose = drawn(place, "EAGLE", 6, 4, WARM, TREE, **flags)
    assert loose.p < 1e-8
    assert loose.accepted > 1.15 * drawn(place, "EAGLE", 6, 4, WARM, TREE).accepted


def as_it_is(p: torch.Tensor, parent: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Nothing taken out of p for the drafts that were tried."""
    return p


def last_place(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Coins that their own position does not change."""
    return coins(seeds, torch.zeros_like(positions))


FAULTS = {
    "tried drafts that are drawn again": ("untried", as_it_is),
    "coins that all positions share": ("coins", last_place),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(
    monkeypatch: pytest.MonkeyPatch, place: Path, fault: str
) -> None:
    monkeypatch.setenv("OUTRIDER_CHECK", "0")
    monkeypatch.setattr(threshold_sample_cpu, *FAULTS[fault])
    assert drawn(place, "EAGLE", 6, 4, WARM, TREE, **NEARLY_ONE).p < 1e-8


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE", "EAGLE3"])
def test_greedy_requests_and_those_without_drafts_are_left_alone(
    tmp_path: Path, algorithm: DraftAlgorithm
) -> None:
    models = write_models(tmp_path)

    def run(made: DraftAlgorithm | None, **flags: float) -> Tokens:
        requests = []
        for i in range(6):
            params = SamplingParams(
                temperature=0.9 * (i % 2), seed=i, max_new_tokens=16, ignore_eos=True
            )
            prompt = [(3 * j * j + i * 5 + j) % 16 for j in range(2 + 5 * i)]
            made_request = request(f"r{i}", prompt, params)
            requests.append(msgspec.structs.replace(made_request, speculative=i < 4))
        shape = CHAIN if algorithm == "STANDALONE" else TREE
        with draft_core(models, made, shape, **flags) as core:
            outputs = drive(core.core, requests)
            accepted.append(core.core.stats(0).spec_accepted_tokens)
        return {rid: tokens_of(some) for rid, some in outputs.items()}

    accepted: list[int] = []
    plain, coupled = run(None), run(algorithm)
    assert coupled == plain
    loose = run(algorithm, **{SINGLE: 0.05, ACC: 0.3})
    for rid in ("r0", "r2", "r4", "r5"):
        assert loose[rid] == plain[rid]
    assert loose["r1"] != plain["r1"]
    assert run(algorithm, **{SINGLE: 0.05, ACC: 0.3}) == loose
    assert accepted[2] > accepted[1] > 0
