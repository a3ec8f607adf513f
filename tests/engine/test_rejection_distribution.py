"""Rejection sampling keeps the target's joint distribution; planted faults do not."""

from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.speculative import draft_law
from outrider.engine.speculative.draft_law import DraftDraw, DraftLaw
from outrider.engine_core.draft_config import DraftAlgorithm, SpecShape
from outrider.kernels import draft_ops_cpu, rejection_sample_cpu
from outrider.kernels.noise_streams import ACCEPT, RESIDUAL

from ..reference import sampling_ref as ref
from .draft_checkpoints import write_eagle, write_eagle3, write_standalone
from .draft_cores import ALGORITHMS, DraftCore, Models, draft_core
from .joint_law import LEAST_P, WARM, behind_the_first, draw, folder_of, joint_of, p_value

CHAIN = SpecShape(3, 1, 4)
FLAGS = {
    "speculative_use_rejection_sampling": True,
    "max_running_requests": 256,
    "max_total_tokens": 16384,
}
# No repetition penalty: the laws come from log-probabilities, whose signs are not the logits'.
FILTERED = ref.Params(
    temperature=1.5, top_k=4, top_p=0.8, min_p=0.05, presence=0.2,
    frequency=0.1, bias={2: 0.7},
)  # fmt: skip


BANNED = ref.Params(temperature=1.5, bans=((2, 3), (1, 4, 0), (5,)), allowed=(0, 2, 3, 4, 5, 1))


@lru_cache
def models_of(folder: Path, vocab: int) -> Models:
    """Drafts that are right often enough, and wrong often enough."""
    target = folder_of(folder, vocab)
    return Models(
        target,
        {
            "STANDALONE": write_standalone(folder / f"standalone{vocab}", target, noise=1.0),
            "EAGLE": write_eagle(folder / f"eagle{vocab}", target),
            "EAGLE3": write_eagle3(folder / f"eagle3{vocab}", target, draft_vocab=vocab * 3 // 4),
        },
    )


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of requests; other tests check every step."""
    monkeypatch.setenv("OUTRIDER_CHECK", "0")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rejection")


def tokens_behind_the_first(
    made: DraftCore, length: int, wanted: ref.Params = WARM
) -> Counter[tuple[int, ...]]:
    found = Counter(tokens[1:] for tokens in draw(made.core, length, wanted))
    stats = made.core.stats(0)
    assert stats.spec_accepted_tokens > 1_000
    assert stats.spec_draft_tokens > 1.1 * stats.spec_accepted_tokens
    return found


@lru_cache
def law_of(folder: Path, vocab: int, length: int, filtered: bool) -> dict[tuple[int, ...], float]:
    return behind_the_first(joint_of(folder, vocab, length, FILTERED if filtered else WARM))


def p_value_of(place: Path, algorithm: DraftAlgorithm, vocab: int, length: int) -> float:
    models = models_of(place, vocab)
    with draft_core(models, algorithm, CHAIN, **FLAGS) as made:
        found = tokens_behind_the_first(made, length)
    return p_value(law_of(models.target, vocab, length, False), found)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_triples_follow_the_joint_law(place: Path, algorithm: DraftAlgorithm) -> None:
    assert p_value_of(place, algorithm, 6, 4) > LEAST_P


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_pairs_of_a_larger_vocabulary_follow_it(place: Path, algorithm: DraftAlgorithm) -> None:
    assert p_value_of(place, algorithm, 16, 3) > LEAST_P


def test_filters_penalties_and_bias_hold_where_drafts_know_none(place: Path) -> None:
    models = models_of(place, 6)
    with draft_core(models, "EAGLE3", CHAIN, **FLAGS) as made:
        found = tokens_behind_the_first(made, 3, FILTERED)
    law = law_of(models.target, 6, 3, True)
    assert all(law[cell] > 0 for cell in found)
    assert sum(probability > 0 for probability in law.values()) < len(law)
    assert p_value({cell: p for cell, p in law.items() if p > 0}, found) > LEAST_P


def test_bans_hold_where_drafts_know_none(place: Path) -> None:
    models = models_of(place, 6)
    with draft_core(models, "STANDALONE", CHAIN, **FLAGS) as made:
        found = tokens_behind_the_first(made, 4, BANNED)
    law = behind_the_first(joint_of(models.target, 6, 4, BANNED))
    assert all(law[cell] > 0 for cell in found)
    assert p_value({cell: p for cell, p in law.items() if p > 0}, found) > LEAST_P


def shifted(draw: DraftDraw) -> DraftLaw:
    """q of the next token."""
    law = true_law(draw)
    return law._replace(logits=law.logits.roll(1, dims=2))


true_law = DraftDraw.law


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
    p = p_value_of(place, "EAGLE3", 6, 4)
    assert p < 1e-8
