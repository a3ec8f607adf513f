"""Block drafts keep the target's joint distribution, whatever caps them; planted faults do not."""

import json
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from outrider.engine.models import torch_block, torch_layers
from outrider.engine.models.block_weights import BlockWeights
from outrider.engine.speculative.draft_law import DraftDraw, DraftLaw, DraftNoise
from outrider.engine.speculative.draft_ops import draft_ops
from outrider.engine_core.counters import Counters
from outrider.engine_core.step_times import StepTimes
from outrider.kernels.confidence_logits import confidence_logits

from .batched_attention import batched_attention
from .block_cores import TIMES, Change, block_core
from .joint_law import LEAST_P, behind_the_first, draw, folder_of, joint_of, p_value

Tokens = tuple[int, ...]
MODES = ("static", "cap-accept", "compact")
RAGGED = MODES[1:]
MORE = 2  # tokens behind those that are counted, so that few rows are short of room
# With which the length policy finds about one draft a row worth its cost.
DEAR = StepTimes([1, 4096], [0.1, 4.1])


class Drawn(NamedTuple):
    """How unlikely the tokens are, and what was counted."""

    p: float
    counters: Counters
    found: Counter[Tokens]


def fair(weights: BlockWeights) -> None:
    """The target's own logits as the Markov head; confidence that the token before decides."""
    assert weights.markov is not None
    assert weights.confidence is not None
    weights.markov.w2 /= 20
    vocab = len(weights.markov.w1)
    weights.confidence.weight[:-vocab] = 0.0
    weights.confidence.weight[-vocab:] = torch.tensor([4.0, -1.0]).repeat(vocab // 2)
    weights.confidence.bias.zero_()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of requests; other tests check every step."""
    monkeypatch.setenv("OUTRIDER_CHECK", "0")
    monkeypatch.setattr(torch_layers, "paged_attention", batched_attention)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blocks")


@pytest.fixture(scope="module")
def costs(place: Path) -> str:
    """A tenth of what a step of one token takes for each further one: sure drafts are worth it."""
    table = {
        "bias_seconds": 1e-3, "bs_probes": [1], "alpha_seconds": [0.0],
        "m_probes": [1, 4097], "theta_seconds": [0.0, 0.4096],
    }  # fmt: skip
    path = place / "sps.json"
    path.write_text(json.dumps(table))
    return str(path)


@lru_cache
def law_of(place: Path, vocab: int, length: int) -> dict[Tokens, float]:
    return behind_the_first(joint_of(folder_of(place, vocab), vocab, length))


def drawn(
    place: Path,
    vocab: int,
    name: str,
    change: Change | None = None,
    times: StepTimes = TIMES,
    share: float | None = None,
    /,
    **flags: object,
) -> Drawn:
    """Pairs of a vocabulary of 16, triples of one of 6, behind the first token.

    ``share``: so many of all drafts are verified, those of which confidence is surest.
    """
    length = 3 if vocab == 16 else 4
    flags = {
        "max_running_requests": 256, "max_total_tokens": 16384,
        "speculative_use_rejection_sampling": True, **flags,
    }  # fmt: skip
    with block_core(folder_of(place, vocab), name, 3, change, times, **flags) as made:
        if share is not None:
            assert made.core.scheduler.verify is not None
            made.core.scheduler.verify.planner.force(share)
        found = Counter(tokens[1:] for tokens in draw(made.core, length, more=MORE))
        counters = made.core.scheduler.counters
    assert counters.spec_accepted_tokens > 1_500
    return Drawn(p_value(law_of(place, vocab, length), found), counters, found)


def dspark(place: Path, mode: str) -> Drawn:
    """Triples; ragged modes verify two drafts of five."""
    share = None if mode == "static" else 0.4
    return drawn(place, 6, "dspark", fair, TIMES, share, speculative_ragged_verify_mode=mode)


def test_dsparks_triples_follow_the_joint_law(place: Path) -> None:
    drawn = {mode: dspark(place, mode) for mode in MODES}
    for mode, (p, counters, _) in drawn.items():
        assert p > LEAST_P
        drafts, verified = counters.spec_drafts, counters.spec_draft_tokens
        assert (verified > 2.8 * drafts) == (mode == "static")
        assert (counters.trimmed_drafts > 1_000) == (mode == "cap-accept")
    assert drawn["compact"].found == drawn["cap-accept"].found
    assert drawn["compact"].found != drawn["static"].found


def test_pairs_follow_it_where_an_sps_table_says_what_is_verified(place: Path, costs: str) -> None:
    p, counters, _ = drawn(
        place, 16, "dspark", fair, speculative_ragged_verify_mode="compact",
        speculative_dspark_sps_table_path=costs,
    )  # fmt: skip
    assert p > LEAST_P
    assert counters.budget_steps > 100
    assert counters.budget_drafts < 400 * counters.budget_steps  # of 768


def test_dflashs_triples_follow_the_joint_law(place: Path) -> None:
    p, counters, _ = drawn(place, 6, "dflash")
    assert p > LEAST_P
    assert counters.spec_draft_tokens > 2.8 * counters.spec_drafts


@pytest.mark.parametrize(("name", "change"), [("dflash", None), ("dspark", fair)])
def test_triples_follow_it_under_block_verification(
    place: Path, name: str, change: Change | None
) -> None:
    accepted = []
    for blocks in (True, False):
        p, counters, _ = drawn(place, 6, name, change, speculative_use_block_verification=blocks)
        assert p > LEAST_P
        assert counters.spec_draft_tokens > 2.8 * counters.spec_drafts
        accepted.append(counters.spec_accepted_tokens / counters.spec_drafts)
    assert accepted[0] > accepted[1]


def test_dflashs_pairs_follow_it_where_the_length_policy_caps(place: Path) -> None:
    p, counters, _ = drawn(
        place, 16, "dflash", None, DEAR, speculative_ragged_verify_mode="cap-accept",
        speculative_length_policy="auto",
    )  # fmt: skip
    assert p > LEAST_P
    assert counters.spec_draft_tokens < 2 * counters.spec_drafts
    assert counters.trimmed_drafts > 500


def test_triples_follow_it_under_the_coupled_rule(place: Path) -> None:
    p, counters, _ = drawn(
        place, 6, "dspark", fair, TIMES, 0.4, speculative_ragged_verify_mode="cap-accept",
        speculative_use_rejection_sampling=False,
    )  # fmt: skip
    assert p > LEAST_P
    assert counters.trimmed_drafts > 300


def test_a_node_at_a_cap_tries_no_draft(place: Path) -> None:
    """Thresholds, whose law is another: capped in either way the tokens are the same."""
    both = [
        drawn(
            place, 6, "dspark", fair, TIMES, 0.4, speculative_ragged_verify_mode=mode,
            speculative_use_rejection_sampling=False, speculative_accept_threshold_acc=0.7,
        )
        for mode in RAGGED
    ]  # fmt: skip
    assert both[0].found == both[1].found
    assert both[0].counters.trimmed_drafts > 300


def of_itself(
    weight: torch.Tensor,
    bias: torch.Tensor,
    before: torch.Tensor | None,
    hidden: torch.Tensor,
    bonus: torch.Tensor,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """Confidence of a draft by its own token, not by the one before."""
    late = torch.cat((tokens[1:], bonus[None]))
    return confidence_logits(weight, bias, before, hidden, tokens[0], late)


true_law = DraftDraw.law


def of_the_next_level(draw: DraftDraw) -> DraftLaw:
    law = true_law(draw)
    return law._replace(logits=law.logits.roll(-1, dims=0))


FAULTS = {
    "a cap that knows the draft behind it": (torch_block, "confidence_logits", of_itself),
    "q of the next draft": (DraftDraw, "law", of_the_next_level),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(
    place: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    assert dspark(place, "compact").p < 1e-8


def test_no_two_rounds_share_noise() -> None:
    """Late confidence of drafts that were never reached says how much a later round verifies."""
    keys: list[int] = []

    def draw_drafts(*arguments: torch.Tensor, tokens: torch.Tensor) -> None:
        keys.extend(arguments[-1].tolist())

    ops = draft_ops(torch.device("cpu"))._replace(draw_drafts=draw_drafts)
    one = torch.ones(1)
    noise = DraftNoise(one, one.long(), one.bool())
    for newest in range(5, 25):
        lens = torch.tensor([newest], dtype=torch.int32)
        made = DraftDraw(ops, noise, torch.zeros(1, dtype=torch.int32), lens, 7, None, None)
        for level in range(7):
            made.draw(level, torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64))
    assert len(set(keys)) == 7 * 20
