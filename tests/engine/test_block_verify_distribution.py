"""Block verification keeps the target's joint distribution; planted faults do not."""

from pathlib import Path

import pytest
import torch

from outrider.engine.speculative.draft_law import DraftDraw
from outrider.engine_core.draft_config import DraftAlgorithm
from outrider.kernels import block_verify_cpu

from .draft_cores import ALGORITHMS
from .drafted_law import FILTERED, drawn, shifted
from .joint_law import LEAST_P

RULE = {"speculative_use_block_verification": True}
TOKENS = {"speculative_use_rejection_sampling": True}


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of requests; other tests check every step."""
    monkeypatch.setenv("OUTRIDER_CHECK", "0")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blocks")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_triples_follow_the_joint_law_and_more_drafts_are_kept(
    place: Path, algorithm: DraftAlgorithm
) -> None:
    block = drawn(place, algorithm, 6, 4, **RULE)
    assert block.p > LEAST_P
    assert block.accepted > drawn(place, algorithm, 6, 4, **TOKENS).accepted


def test_pairs_of_a_larger_vocabulary_follow_it(place: Path) -> None:
    assert drawn(place, "EAGLE", 16, 3, **RULE).p > LEAST_P


def test_filters_penalties_and_bias_hold_where_drafts_know_none(place: Path) -> None:
    filtered = drawn(place, "EAGLE3", 6, 3, FILTERED, **RULE)
    assert all(filtered.law[cell] > 0 for cell in filtered.found)
    assert filtered.p > LEAST_P


def as_it_is(p: torch.Tensor, q: torch.Tensor, draft_ids: torch.Tensor | None) -> torch.Tensor:
    """Of what p has beyond q: all of p."""
    return p


FAULTS: dict[str, tuple[object, str, object]] = {
    "q of the next token": (DraftDraw, "law", shifted),
    "residual not subtracted": (block_verify_cpu, "left_over", as_it_is),
    "chances that are the paths' shares": (block_verify_cpu, "beyond", as_it_is),
    "coins that all rounds share": (block_verify_cpu, "PLACES", 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(
    place: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    assert drawn(place, "EAGLE3", 6, 4, **RULE).p < 1e-8
