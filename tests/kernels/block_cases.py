"""Random chains of drafts, and what plain Python's block verification decides about them."""

import math
import random
from typing import Any

import torch

from outrider.kernels.noise_streams import ACCEPT, RESIDUAL

from ..reference import block_verify_ref as ref
from ..reference import rejection_ref, sampling_ref
from .rejection_cases import Case, random_case

COINS = 64


def random_chains(
    seed: int, chains: int, vocab: int, draft_vocab: int, draft_dtype: torch.dtype = torch.float32
) -> Case:
    """Chains of 0 to 4 drafts, of which some laws are unusable; tokens behind a chain's end are -1.

    Of drafts, most are likely by both models: the target's logits follow the draft's.
    """
    rng = random.Random(seed)
    lengths = [rng.randrange(5) for _ in range(chains)]
    nodes = sum(length + 1 for length in lengths)
    arguments = random_case(seed, nodes, vocab, draft_vocab, draft_dtype=draft_dtype).arguments
    logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, drafts, own, rows, ids = (
        arguments
    )
    names = [t for t in range(vocab) if ids is None or ids[t] >= 0]
    tokens: list[int] = []
    first = 0
    for length in lengths:
        chain = range(first, first + length + 1)
        positions[first : first + length + 1] = positions[first] + torch.arange(length + 1)
        ps, qs, path = [], [], []
        for node in chain:
            numbers = own[rows[node]].float()
            if rng.random() < 0.8 and all(value < math.inf for value in numbers.tolist()):
                logits[node, names] = numbers.clamp(min=-9) + logits[node, names] * 0.3
            wanted = sampling_ref.Params(
                float(temperatures[node]), int(top_ks[node]), float(top_ps[node]),
                min_p=float(min_ps[node]),
            )  # fmt: skip
            ps.append(sampling_ref.probabilities(logits[node].tolist(), wanted, [], []))
            drafts[node] = -1
            if node == first + length:
                break
            law: list[float] | None = None
            if all(value < math.inf for value in numbers.tolist()):
                law = [0.0] * vocab
                shares = rejection_ref.softmax(numbers.tolist(), wanted.temperature)
                for name, chance in zip(names, shares, strict=True):
                    law[name] = chance
            token = rng.choices(names, None if law is None else [law[n] for n in names])[0]
            drafts[node] = token
            path.append(token)
            qs.append(law)
        tokens += _decide(ps, qs, path, seeds[first : first + length + 1], positions[chain])
        first += length + 1
    return Case(arguments, tokens)


def _decide(
    ps: list[list[float]],
    qs: list[list[float] | None],
    path: list[int],
    seeds: torch.Tensor,
    positions: Any,
) -> list[int]:
    own, places = seeds.tolist(), positions.tolist()
    coins = [
        rejection_ref.uniform(own[i] ^ ACCEPT, places[0] * COINS + i)
        for i in range(1, len(path) + 1)
    ]
    count = ref.kept(ref.thresholds(ps, qs, path), coins)
    law = [float(chance) for chance in ref.next_law(count, ps, qs, path)]
    seed = own[count] if count == len(path) else own[count] ^ RESIDUAL
    token = rejection_ref.draw(law, seed, places[count])
    return [*path[:count], token] + [-1] * (len(path) - count)
