"""Sampled tokens through the whole engine follow the target's joint distribution.

Chains and trees of random tokens are verified under the coupled rule. The expected counts come
from the model's own laws, a prefix at a time, through the scalar reference's filters.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.engine.sampling import choose
from outrider.engine.sampling.nodes import Nodes, place_nodes
from outrider.engine_core.config import EngineConfig
from outrider.engine_core.core import EngineCore
from outrider.engine_core.ids import f32, i32
from outrider.engine_core.sampling_params import SamplingParams

from ..reference import sampling_ref as ref
from .cores import drive, random_draft_core, request, running_engine, tiny_config, tokens_of
from .tiny import write_checkpoint

PROMPT = [1, 3, 2]
LEAST_EXPECTED = 20
LEAST_P = 1e-4 / 8  # Bonferroni over this file's tests
TEMPERATURE = 1.5
DRAWS = 9_000

Prefix = tuple[int, ...]


def folder_of(tmp_path: Path, vocab: int) -> Path:
    return write_checkpoint(tmp_path / f"v{vocab}", vocab, scale=0.12, seed=8)


def laws_after(folder: Path, vocab: int, prefixes: Sequence[Prefix]) -> dict[Prefix, list[float]]:
    """The next token's distribution after the prompt and each prefix."""
    params = SamplingParams(temperature=0.0, max_new_tokens=1, logprobs=vocab, ignore_eos=True)
    names = {str(prefix): prefix for prefix in prefixes}
    laws = {}
    with running_engine(tiny_config(folder)) as engine:
        outputs = drive(
            engine.core, [request(rid, [*PROMPT, *prefix], params) for rid, prefix in names.items()]
        )
    for rid, prefix in names.items():
        (entry,) = outputs[rid][-1].logprobs
        values = dict(zip(i32(entry.top_ids).tolist(), f32(entry.top_values).tolist(), strict=True))
        row = [values[token] for token in range(vocab)]
        laws[prefix] = ref.probabilities(row, ref.Params(temperature=TEMPERATURE), [], [])
    return laws


def draw(core: EngineCore, length: int) -> list[Prefix]:
    """Outputs of many seeded requests."""
    requests = [
        request(
            str(seed),
            PROMPT,
            SamplingParams(
                temperature=TEMPERATURE, max_new_tokens=length, seed=seed, ignore_eos=True
            ),
        )
        for seed in range(DRAWS)
    ]
    return [tuple(tokens_of(outputs)) for outputs in drive(core, requests).values()]


def p_value(joint: dict[Prefix, float], found: Counter[Prefix]) -> float:
    """Chi-square of the cells, the rare ones pooled into one of enough draws."""
    observed: list[int] = []
    expected: list[float] = []
    pooled_observed, pooled_expected = 0, 0.0
    for cell, probability in joint.items():
        if probability * DRAWS >= LEAST_EXPECTED:
            observed.append(found[cell])
            expected.append(probability * DRAWS)
        else:
            pooled_observed += found[cell]
            pooled_expected += probability * DRAWS
    if pooled_expected >= LEAST_EXPECTED:
        observed.append(pooled_observed)
        expected.append(pooled_expected)
    assert len(expected) >= 0.5 * len(joint), "too few draws for this model"
    assert math.isclose(sum(expected), DRAWS, rel_tol=0.01)
    return ref.chi_square_p(observed, expected)


def joint_of(folder: Path, vocab: int) -> dict[Prefix, float]:
    """The joint law of the first three tokens."""
    shorter = [p for n in range(3) for p in itertools.product(range(vocab), repeat=n)]
    laws = laws_after(folder, vocab, shorter)
    return {
        (a, b, c): laws[()][a] * laws[(a,)][b] * laws[(a, b)][c]
        for a, b, c in itertools.product(range(vocab), repeat=3)
    }


def last_two(joint: dict[Prefix, float]) -> dict[Prefix, float]:
    pairs: dict[Prefix, float] = {}
    for (_, b, c), probability in joint.items():
        pairs[(b, c)] = pairs.get((b, c), 0.0) + probability
    return pairs


def draft_config(folder: Path) -> EngineConfig:
    return tiny_config(
        folder,
        "NGRAM",
        max_running_requests=64,
        max_total_tokens=8192,
        speculative_num_draft_tokens=6,
    )


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_triples_follow_the_joint_law(tmp_path: Path, tree: bool) -> None:
    folder = folder_of(tmp_path, 6)
    with random_draft_core(draft_config(folder), tree) as core:
        found = draw(core, 3)
        stats = core.stats(0)
    assert stats.spec_accepted_tokens > 1_000
    assert p_value(joint_of(folder, 6), Counter(found)) > LEAST_P


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_pairs_of_a_larger_vocabulary_follow_the_joint_law(tmp_path: Path, tree: bool) -> None:
    folder = folder_of(tmp_path, 16)
    with random_draft_core(draft_config(folder), tree) as core:
        found = [tokens[1:] for tokens in draw(core, 3)]
        stats = core.stats(0)
    assert stats.spec_accepted_tokens > 500
    assert p_value(last_two(joint_of(folder, 16)), Counter(found)) > LEAST_P


def test_noise_that_forgets_the_position_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(*arguments: torch.Tensor) -> Nodes:
        nodes = place_nodes(*arguments)
        return replace(nodes, positions=torch.zeros_like(nodes.positions))

    monkeypatch.setattr(choose, "place_nodes", stuck)
    folder = folder_of(tmp_path, 6)
    with random_draft_core(draft_config(folder), tree=True) as core:
        found = draw(core, 3)
    assert p_value(joint_of(folder, 6), Counter(found)) < 1e-12
