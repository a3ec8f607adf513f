"""Sampled tokens through the whole engine follow the target's joint distribution.

Chains and trees of random tokens are verified under the coupled rule.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.engine.sampling import choose
from outrider.engine.sampling.nodes import Nodes, place_nodes
from outrider.engine_core.config import EngineConfig

from ..reference import sampling_ref as ref
from .cores import random_draft_core, tiny_config
from .joint_law import LEAST_P, behind_the_first, draw, folder_of, joint_of, p_value


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
    assert p_value(behind_the_first(joint_of(folder, 16)), Counter(found)) > LEAST_P


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_bans_follow_the_joint_law_at_every_node(tmp_path: Path, tree: bool) -> None:
    folder = folder_of(tmp_path, 6)
    wanted = ref.Params(temperature=1.5, bans=((2, 3), (1, 4, 0)), allowed=(0, 1, 2, 3, 4))
    law = {path: p for path, p in joint_of(folder, 6, wanted=wanted).items() if p > 0}
    with random_draft_core(draft_config(folder), tree) as core:
        found = Counter(draw(core, 3, wanted))
        assert core.stats(0).spec_accepted_tokens > 1_000
    assert set(found) <= set(law)
    assert p_value(law, found) > LEAST_P


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
