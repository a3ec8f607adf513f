"""Coupled sampling: the noise is Philox, three implementations agree, the law is the softmax."""

import random

import numpy as np
import pytest
import torch

from outrider.kernels import coupled_sample_cpu
from outrider.kernels.coupled_sample import coupled_sample
from outrider.kernels.philox import philox_words

from ..reference import sampling_ref as ref

SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF)
POSITIONS = (0, 1, 8191, 2**31, 2**32 + 5, 2**62)


def columns(rows: list[ref.Params], seeds: list[int], positions: list[int]) -> list[torch.Tensor]:
    return [
        torch.tensor([row.temperature for row in rows], dtype=torch.float32),
        torch.tensor([row.top_k for row in rows], dtype=torch.int32),
        torch.tensor([row.top_p for row in rows], dtype=torch.float32),
        torch.tensor([row.min_p for row in rows], dtype=torch.float32),
        torch.tensor(seeds),
        torch.tensor(positions),
    ]


def compiled(logits: torch.Tensor, arguments: list[torch.Tensor]) -> list[int]:
    out = np.full(logits.shape[0], -1, dtype=np.int64)
    temperatures, top_ks, top_ps, min_ps, seeds, positions = (a.numpy() for a in arguments)
    coupled_sample_cpu.coupled_sample(
        logits.numpy(), temperatures, top_ks, top_ps, min_ps, seeds, positions, out
    )
    return out.tolist()


def exact(value: float) -> float:
    """The float32 that a column holds."""
    return float(np.float32(value))


def random_params(rng: random.Random) -> ref.Params:
    return ref.Params(
        temperature=exact(rng.choice([0.05, 0.5, 1.0, 1.3, 4.0])),
        top_k=rng.choice([-1, 0, 1, 2, 5, 17, 100, 10_000]),
        top_p=exact(rng.choice([1.0, 0.99, 0.7, 0.3, 0.01])),
        min_p=exact(rng.choice([0.0, 0.0, 0.02, 0.4, 1.0])),
    )


def test_reference_philox_gives_the_published_vectors() -> None:
    assert ref.philox4x32_10([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = [0xFFFFFFFF] * 6
    assert ref.philox4x32_10(ones[:4], ones[4:]) == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]
    digits = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    assert ref.philox4x32_10(digits[:4], digits[4:]) == [
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    ]


def test_torch_words_are_philox() -> None:
    pairs = [(seed, position) for seed in SEEDS for position in POSITIONS]
    words = philox_words(
        torch.tensor([pair[0] for pair in pairs]), torch.tensor([pair[1] for pair in pairs]), 10
    )
    for row, (seed, position) in zip(words.tolist(), pairs, strict=True):
        counter = [0, 0, position & 0xFFFFFFFF, position >> 32 & 0xFFFFFFFF]
        key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
        blocks = [ref.philox4x32_10([block, *counter[1:]], key) for block in range(3)]
        assert row == [word for block in blocks for word in block][:10]


@pytest.mark.parametrize("vocab", [1, 2, 5, 16, 130])
def test_three_implementations_agree(vocab: int) -> None:
    rng = random.Random(vocab)
    rows = 150
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    logits = (logits * 4).round() / 4  # many equal logits
    logits[::7, : vocab // 2] = torch.finfo(torch.float32).min
    params = [random_params(rng) for _ in range(rows)]
    seeds = [rng.choice([*SEEDS, rng.getrandbits(63)]) for _ in range(rows)]
    positions = [rng.choice([*POSITIONS, rng.getrandbits(13)]) for _ in range(rows)]
    arguments = columns(params, seeds, positions)
    tokens = compiled(logits, arguments)
    assert tokens == coupled_sample(logits, *arguments).tolist()
    for row, values in enumerate(logits.tolist()):
        scaled = [value / params[row].temperature for value in values]
        allowed = ref.kept(scaled, params[row])
        scores = {t: scaled[t] + ref.gumbel(seeds[row], positions[row], t) for t in allowed}
        assert tokens[row] == max(scores, key=lambda t: (scores[t], -t))


@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (40, 1.0), (-1, 0.9), (300, 0.8)])
def test_large_vocabularies_agree(top_k: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 30_000, generator=generator) * torch.tensor([[0.2], [1.0], [5.0]])
    params = [ref.Params(top_k=top_k, top_p=exact(top_p))] * 3
    for seed in range(8):
        arguments = columns(params, [seed] * 3, [seed, 7, 99])
        assert compiled(logits, arguments) == coupled_sample(logits, *arguments).tolist()


def test_noise_is_uniform_over_tokens_positions_and_seeds() -> None:
    """Words in 64 equal bins, and successive positions' bins in pairs."""
    positions = torch.arange(2_000)
    words = philox_words(torch.full_like(positions, 42), positions, 64)
    bins = (words >> 26).flatten()
    counts = torch.bincount(bins, minlength=64).tolist()
    assert ref.chi_square_p(counts, [len(bins) / 64] * 64) > 1e-4
    coarse = words >> 29
    pairs = (coarse[:-1] * 8 + coarse[1:]).flatten()
    counts = torch.bincount(pairs, minlength=64).tolist()
    assert ref.chi_square_p(counts, [len(pairs) / 64] * 64) > 1e-4
    other = philox_words(positions + 2**33, torch.zeros_like(positions), 64) >> 29
    pairs = (other[:-1] * 8 + other[1:]).flatten()
    counts = torch.bincount(pairs, minlength=64).tolist()
    assert ref.chi_square_p(counts, [len(pairs) / 64] * 64) > 1e-4


@pytest.mark.parametrize(
    "params",
    [
        ref.Params(),
        ref.Params(temperature=1.7),
        ref.Params(top_k=4),
        ref.Params(top_p=exact(0.6)),
        ref.Params(min_p=exact(0.3)),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p"],
)
def test_the_law_is_the_filtered_softmax(params: ref.Params) -> None:
    draws = 20_000
    row = [1.0, 0.2, -0.7, 0.9, 0.0, -1.1, 0.4]
    logits = torch.tensor([row]).expand(draws, -1).contiguous()
    arguments = columns([params] * draws, [9] * draws, list(range(draws)))
    counts = np.bincount(compiled(logits, arguments), minlength=len(row))
    law = ref.probabilities([exact(v) for v in row], params, [], [])
    allowed = [token for token, p in enumerate(law) if p > 0]
    assert sum(counts[token] for token in allowed) == draws
    p_value = ref.chi_square_p([int(counts[t]) for t in allowed], [draws * law[t] for t in allowed])
    assert p_value > 1e-4


def test_short_arrays_are_named() -> None:
    arguments = columns([ref.Params()] * 2, [1, 2], [3, 4])
    arguments[4] = arguments[4][:1]
    with pytest.raises(ValueError, match="seeds has 1 elements but at least 2"):
        compiled(torch.zeros(2, 3), arguments)


@pytest.mark.parametrize("filters", [(-1, 1.0, 0.0), (5, 1.0, 0.0), (-1, 0.9, 0.0), (5, 0.9, 0.1)])
@pytest.mark.parametrize("place", [0, 17, 99])
def test_nothing_is_drawn_from_unusable_rows(filters: tuple[int, float, float], place: int) -> None:
    logits = torch.randn(7, 100, generator=torch.Generator().manual_seed(place))
    logits[0, place] = torch.nan
    logits[1, place] = torch.inf
    logits[2] = torch.nan
    logits[3] = -torch.inf
    logits[4, place] = -torch.inf  # excluded and no more
    logits[5] = -torch.inf
    logits[5, place] = 1.0
    rows = [ref.Params(0.8, *filters)] * len(logits)
    arguments = columns(rows, list(range(7)), list(range(7)))
    found = compiled(logits, arguments)
    assert found == coupled_sample(logits, *arguments).tolist()
    assert found[:4] == [-1] * 4
    assert found[4] not in (-1, place)
    assert found[5] == place
    assert found[6] >= 0
