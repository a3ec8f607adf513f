"""Random draft trees, and what plain Python's thresholds decide about their nodes."""

import random
from typing import Any, NamedTuple

import torch

from outrider.kernels.noise_streams import ACCEPT, RESIDUAL
from outrider.kernels.threshold_sample import Thresholds

from ..reference import sampling_ref
from ..reference import threshold_ref as ref
from .rejection_cases import exact, random_params


class Trees(NamedTuple):
    """Arguments of ``threshold_sample``, and the tokens."""

    arguments: list[Any]
    tokens: list[int]


def random_trees(
    seed: int, rows: int, vocab: int, thresholds: Thresholds, dtype: torch.dtype = torch.float32
) -> Trees:
    """Rows of 1 to 9 nodes: chains, trees and nodes without drafts; many logits are equal."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    parents: list[int] = []
    for _ in range(rows):
        first, chain = len(parents), rng.random() < 0.4
        for node in range(rng.randrange(1, 10)):
            before = node - 1 if chain or not node else rng.randrange(node)
            parents.append(-1 if not node else first + before)
    nodes = len(parents)
    logits = (torch.randn(nodes, vocab, generator=generator) * 8).round().div(4).to(dtype)
    params = [random_params(rng, vocab) for _ in range(nodes)]
    laws = [
        sampling_ref.probabilities(logits[node].tolist(), wanted, [], [])
        for node, wanted in enumerate(params)
    ]
    drafts = [rng.randrange(vocab)] * nodes
    children: list[list[int]] = [[] for _ in range(nodes)]
    for node, parent in enumerate(parents):
        if parent < 0:
            continue
        free = [token for token in range(vocab) if token not in children[parent]]
        likely = max(free, key=lambda t: laws[parent][t])
        drafts[node] = rng.choice([likely, likely, likely, rng.randrange(vocab)])
        children[parent].append(drafts[node])
    seeds = [rng.getrandbits(63) for _ in range(nodes)]
    positions = [rng.choice([5, 8191, 2**31 + 7, 2**40]) + node for node in range(nodes)]
    tokens = [
        ref.decide(
            laws[node], children[node], thresholds,
            (seeds[node], seeds[node] ^ ACCEPT, seeds[node] ^ RESIDUAL), positions[node],
        )
        for node in range(nodes)
    ]  # fmt: skip
    arguments = [
        logits,
        torch.tensor([exact(row.temperature) for row in params], dtype=torch.float32),
        torch.tensor([row.top_k for row in params], dtype=torch.int32),
        torch.tensor([row.top_p for row in params], dtype=torch.float32),
        torch.tensor([row.min_p for row in params], dtype=torch.float32),
        torch.tensor(seeds),
        torch.tensor(positions),
        torch.tensor(drafts),
        torch.tensor(parents),
        thresholds,
    ]
    return Trees(arguments, tokens)
