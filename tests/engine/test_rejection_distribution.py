"""Rejection sampling keeps the target's joint distribution; planted faults do not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.speculative import draft_law
from outrider.engine.speculative.draft_law import DraftDraw
from outrider.engine_core.draft_config import DraftAlgorithm
from outrider.kernels import draft_ops_cpu, rejection_sample_cpu
from outrider.kernels.noise_streams import ACCEPT, RESIDUAL

from .draft_cores import ALGORITHMS
from .drafted_law import BANNED, FILTERED, drawn, shifted
from .joint_law import LEAST_P

RULE = {"speculative_use_rejection_sampling": True}


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of requests; other tests check every step."""
    monkeypatch.setenv("OUTRIDER_CHECK", "0")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rejection")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_triples_follow_the_joint_law(place: Path, algorithm: DraftAlgorithm) -> None:
    assert drawn(place, algorithm, 6, 4, **RULE).p > LEAST_P


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_pairs_of_a_larger_vocabulary_follow_it(place: Path, algorithm: DraftAlgorithm) -> None:
    assert drawn(place, algorithm, 16, 3, **RULE).p > LEAST_P


def test_filters_penalties_and_bias_hold_where_drafts_know_none(place: Path) -> None:
    filtered = drawn(place, "EAGLE3", 6, 3, FILTERED, **RULE)
    assert all(filtered.law[cell] > 0 for cell in filtered.found)
    assert sum(chance > 0 for chance in filtered.law.values()) < len(filtered.law)
    assert filtered.p > LEAST_P


def test_bans_hold_where_drafts_know_none(place: Path) -> None:
    banned = drawn(place, "STANDALONE", 6, 4, BANNED, **RULE)
    assert all(banned.law[cell] > 0 for cell in banned.found)
    assert banned.p > LEAST_P


def unreduced(p: torch.Tensor, q: torch.Tensor, draft_ids: torch.Tensor | None) -> torch.Tensor:
    """What a rejected token's place is filled from: p as it is."""
    return p


true_init = DraftDraw.__init__


def one_further(draw: DraftDraw, *args: Any) -> None:
    """With places one to a token, those of acceptance: where a draft will stand."""
    true_init(draw, *args)
    draw._newest += 1


BY_PLACE = ((draft_law, "MAX_DRAFT_TOKENS", 1), (DraftDraw, "__init__", one_further))
FAULTS: dict[str, tuple[tuple[object, str, object], ...]] = {
    "q of the next token": ((DraftDraw, "law", shifted),),
    "residual not subtracted": ((rejection_sample_cpu, "left_over", unreduced),),
    "drafts drawn with the noise of acceptance": ((draft_ops_cpu, "DRAFT", ACCEPT), *BY_PLACE),
    "drafts drawn with the noise of the residual": ((draft_ops_cpu, "DRAFT", RESIDUAL), *BY_PLACE),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(
    place: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    for owner, name, value in FAULTS[fault]:
        monkeypatch.setattr(owner, name, value)
    assert drawn(place, "EAGLE3", 6, 4, **RULE).p < 1e-8
