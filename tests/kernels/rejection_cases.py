"""Random nodes with and without drafts, and what plain Python decides about them."""

import math
import random
from typing import Any, NamedTuple

import numpy as np
import torch

from outrider.kernels.noise_streams import ACCEPT, RESIDUAL

from ..reference import rejection_ref, sampling_ref


class Case(NamedTuple):
    """Arguments of ``rejection_sample``, and the tokens."""

    arguments: list[Any]
    tokens: list[int]


def exact(value: float) -> float:
    """The float32 that a column holds."""
    return float(np.float32(value))


def random_params(rng: random.Random, vocab: int) -> sampling_ref.Params:
    return sampling_ref.Params(
        temperature=exact(rng.choice([0.3, 0.7, 1.0, 1.3, 4.0])),
        top_k=rng.choice([-1, 0, vocab // 2, vocab]),
        top_p=exact(rng.choice([1.0, 1.0, 0.9, 0.6])),
        min_p=exact(rng.choice([0.0, 0.0, 0.02])),
    )


def random_case(
    seed: int,
    rows: int,
    vocab: int,
    draft_vocab: int,
    dtype: torch.dtype = torch.float32,
    draft_dtype: torch.dtype = torch.float32,
) -> Case:
    """Some rows' laws are unusable, some hold no draft, and many logits are equal."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * 8).round().div(4).to(dtype)
    own = torch.randn(2 * rows, draft_vocab, generator=generator).mul(2).to(draft_dtype)
    draft_ids: torch.Tensor | None = None
    names = list(range(vocab))
    if draft_vocab < vocab:
        names = sorted(rng.sample(range(vocab), draft_vocab))
        draft_ids = torch.full((vocab,), -1, dtype=torch.int32)
        draft_ids[names] = torch.arange(draft_vocab, dtype=torch.int32)
    params = [random_params(rng, vocab) for _ in range(rows)]
    seeds = [rng.getrandbits(63) for _ in range(rows)]
    positions = [rng.choice([5, 8191, 2**31 + 7, 2**40]) + row for row in range(rows)]
    draft_rows = [rng.randrange(2 * rows) for _ in range(rows)]
    for row in range(0, rows, 7):
        own[draft_rows[row], rng.randrange(draft_vocab)] = rng.choice([math.nan, math.inf])
    own[draft_rows[-1], : draft_vocab // 2] = -math.inf
    drafts, tokens = [], []
    for row, wanted in enumerate(params):
        p = sampling_ref.probabilities(logits[row].tolist(), wanted, [], [])
        q: list[float] | None = None
        numbers = own[draft_rows[row]].tolist()
        if all(value < math.inf for value in numbers):
            q = [0.0] * vocab
            law = rejection_ref.softmax(numbers, wanted.temperature)
            for name, chance in zip(names, law, strict=True):
                q[name] = chance
        likely = max(names, key=lambda t: p[t])
        drafts.append(rng.choice([-1, likely, likely, rng.choice(names)]))
        three = (seeds[row], seeds[row] ^ ACCEPT, seeds[row] ^ RESIDUAL)
        tokens.append(rejection_ref.decide(p, q, drafts[row], three, positions[row]))
    columns = [
        logits,
        torch.tensor([row.temperature for row in params], dtype=torch.float32),
        torch.tensor([row.top_k for row in params], dtype=torch.int32),
        torch.tensor([row.top_p for row in params], dtype=torch.float32),
        torch.tensor([row.min_p for row in params], dtype=torch.float32),
        torch.tensor(seeds),
        torch.tensor(positions),
        torch.tensor(drafts),
        own,
        torch.tensor(draft_rows),
        draft_ids,
    ]
    return Case(columns, tokens)
