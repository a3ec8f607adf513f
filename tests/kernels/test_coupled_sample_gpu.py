# mypy: disable-error-code="untyped-decorator"
"""Sampling without a sort: the CPU's words and tokens, ties by id, the law, no batch effects."""

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from outrider.kernels.coupled_sample import coupled_sample as torch_sample
from outrider.kernels.coupled_sample_gpu import coupled_sample
from outrider.kernels.gumbel_gpu import philox_words as words_of
from outrider.kernels.gumbel_gpu import screening_noise
from outrider.kernels.philox import philox_words

from ..reference import sampling_ref as ref

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
MASKED = torch.finfo(torch.float32).min
TILE = 2048
SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF)
POSITIONS = (0, 1, 8191, 2**31, 2**32 + 5, 2**62)
Columns = list[torch.Tensor]


@pytest.fixture(autouse=True)
def _poison_new_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def exact(value: float) -> float:
    """The float32 that a column holds."""
    return float(np.float32(value))


def random_params(rng: random.Random) -> ref.Params:
    return ref.Params(
        temperature=exact(rng.choice([0.05, 0.5, 1.0, 1.3, 4.0])),
        top_k=rng.choice([-1, 0, 1, 2, 5, 17, 100, 1500, 10_000]),
        top_p=exact(rng.choice([1.0, 0.99, 0.7, 0.3, 1e-4])),
        min_p=exact(rng.choice([0.0, 0.0, 0.02, 0.4, 1.0])),
    )


def columns(params: list[ref.Params], rng: random.Random) -> Columns:
    pick = [rng.choice([*SEEDS, rng.getrandbits(63)]) for _ in params]
    places = [rng.choice([*POSITIONS, rng.getrandbits(13)]) for _ in params]
    return [
        torch.tensor([row.temperature for row in params], dtype=torch.float32, device=DEVICE),
        torch.tensor([row.top_k for row in params], dtype=torch.int32, device=DEVICE),
        torch.tensor([row.top_p for row in params], dtype=torch.float32, device=DEVICE),
        torch.tensor([row.min_p for row in params], dtype=torch.float32, device=DEVICE),
        torch.tensor(pick, device=DEVICE),
        torch.tensor(places, device=DEVICE),
    ]


def padded(rows: torch.Tensor) -> torch.Tensor:
    """The same rows as a view into wider ones whose rest is NaN or larger than any logit."""
    wide = rows.new_full((rows.shape[0], rows.shape[1] + 2), math.nan)
    wide[:, -1] = 6e4
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]].to(DEVICE)


def reference(logits: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
    """The torch reference, whose cumsum has no deterministic form on a GPU."""
    torch.use_deterministic_algorithms(False)
    tokens = torch_sample(logits, *arguments)
    torch.use_deterministic_algorithms(True)
    return tokens


def oracle(logits: torch.Tensor, params: list[ref.Params], arguments: Columns) -> list[int]:
    """The tokens in plain Python."""
    seeds, positions = arguments[4].tolist(), arguments[5].tolist()
    tokens = []
    for row, values in enumerate(logits.tolist()):
        scaled = [value / params[row].temperature for value in values]
        allowed = ref.kept(scaled, params[row])
        scores = {t: scaled[t] + ref.gumbel(seeds[row], positions[row], t) for t in allowed}
        tokens.append(max(scores, key=lambda t: (scores[t], -t)))
    return tokens


@triton.jit
def _store_words(
    seeds: tl.tensor, positions: tl.tensor, out: tl.tensor, SIZE: tl.constexpr
) -> None:
    row = tl.program_id(0)
    words = words_of(tl.load(seeds + row), tl.load(positions + row), 8, SIZE)
    tl.store(out + row * SIZE + tl.arange(0, SIZE), words.to(tl.int64))


@triton.jit
def _store_noise(words: tl.tensor, out: tl.tensor, SIZE: tl.constexpr) -> None:
    lane = tl.arange(0, SIZE)
    tl.store(out + lane, screening_noise(tl.load(words + lane).to(tl.uint32)))


def test_the_words_are_those_of_the_cpu() -> None:
    pairs = list(itertools.product(SEEDS, POSITIONS))
    seeds = torch.tensor([pair[0] for pair in pairs])
    positions = torch.tensor([pair[1] for pair in pairs])
    out = torch.full((len(pairs), 16), -1, device=DEVICE)
    _store_words[(len(pairs),)](seeds.to(DEVICE), positions.to(DEVICE), out, SIZE=16)
    assert torch.equal(out.cpu(), philox_words(seeds, positions, 24)[:, 8:])


def test_screening_noise_is_within_a_hundredth_of_the_margin() -> None:
    edge = round(2**32 * 0.875)
    special = [0, 1, 2, 2**24, 2**31, edge - 1, edge, edge + 1, 2**32 - 2**8, 2**32 - 2, 2**32 - 1]
    words = torch.randint(0, 2**32, (1024,), generator=torch.Generator().manual_seed(2))
    words[: len(special)] = torch.tensor(special)
    words[100:200] = 2**32 - 1 - 2 ** (torch.arange(100) * 31 / 99).long()
    out = torch.full((1024,), math.nan, device=DEVICE)
    _store_noise[(1,)](words.to(DEVICE), out, SIZE=1024)
    noise = -torch.log(-torch.log((words.double() + 0.5) * 2.0**-32))
    assert (out.cpu().double() - noise).abs().max() < 1e-5


@pytest.mark.parametrize("vocab", [1, 2, 5, 130])
def test_small_vocabularies_agree_with_plain_python(vocab: int) -> None:
    rng = random.Random(vocab)
    rows = 400 if ON_GPU else 6
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    logits = (logits * 4).round() / 4  # many equal logits
    logits[::7, : vocab // 2] = MASKED
    logits[3::7, : vocab // 2] = -math.inf
    logits[5::7] *= -0.0  # both zeros, all equal
    params = [random_params(rng) for _ in range(rows)]
    arguments = columns(params, rng)
    expected = oracle(logits, params, arguments)
    assert coupled_sample(padded(logits), *arguments).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [TILE - 1, TILE, TILE + 1, 2 * TILE + 5])
def test_combinations_agree_across_tiles(vocab: int, dtype: torch.dtype) -> None:
    rng = random.Random(vocab)
    rows = 400 if ON_GPU else 2
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    logits = logits.to(dtype)
    arguments = columns([random_params(rng) for _ in range(rows)], rng)
    expected = reference(logits.float().to(DEVICE), *arguments)
    assert torch.equal(coupled_sample(padded(logits), *arguments), expected)


@pytest.mark.parametrize("top_k", [3, 2500, 4000])
def test_equals_at_the_cut_stay_in_the_order_of_their_ids(top_k: int) -> None:
    """Three tiles of one value but for two larger ones: top_k cuts inside any of the tiles."""
    vocab = 2 * TILE + 50
    logits = torch.zeros(1, vocab)
    logits[0, [70, TILE + 3]] = 0.5
    rows = 60 if ON_GPU else 2
    params = [ref.Params(top_k=top_k)] * rows
    arguments = columns(params, random.Random(top_k))
    logits = logits.expand(rows, -1).contiguous()
    tokens = coupled_sample(padded(logits), *arguments).tolist()
    assert tokens == reference(logits.to(DEVICE), *arguments).tolist()
    assert all(token < top_k or token in (70, TILE + 3) for token in tokens)


def test_top_p_splits_equals_by_id_too() -> None:
    """Half of eight equal tokens, after top_k left eight: exactly the four lowest ids."""
    logits = torch.full((1, 40), -3.0)
    logits[0, 5:25] = 1.0
    rows = 2_000 if ON_GPU else 4
    params = [ref.Params(top_k=8, top_p=0.5)] * rows
    arguments = columns(params, random.Random(1))
    arguments[4] = torch.arange(rows, device=DEVICE)
    tokens = coupled_sample(logits.expand(rows, -1).contiguous().to(DEVICE), *arguments)
    found = set(tokens.tolist())
    assert found == {5, 6, 7, 8} if ON_GPU else found <= {5, 6, 7, 8}


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    rng = random.Random(4)
    rows = 64 if ON_GPU else 4
    logits = torch.randn(rows, TILE + 9, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    arguments = columns([random_params(rng) for _ in range(rows)], rng)
    together = coupled_sample(logits, *arguments)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    mixed = coupled_sample(logits[order], *(column[order] for column in arguments))
    assert torch.equal(mixed, together[order])
    alone = [coupled_sample(logits[r : r + 1], *(c[r : r + 1] for c in arguments)) for r in (0, 3)]
    assert torch.equal(torch.cat(alone), together[[0, 3]])


def test_skipped_rows_take_the_argmax_and_bad_rows_nothing() -> None:
    vocab = TILE + 1
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(6))
    logits[:, [8, vocab - 1]] = 9.0  # the argmax, twice
    logits[2, vocab - 1] = math.nan
    logits[3, 7] = -math.inf
    logits[5, 3] = math.nan
    logits[6, vocab - 1] = math.inf
    logits[7] = -math.inf
    logits[8] = -math.inf
    logits[8, 77] = -5.0
    temperatures = [0.0, 1.0, -1.0, 0.0, 0.01, 1.0, 1.0, 1.0, 1.0]
    params = [ref.Params(temperature=t, top_k=2) for t in temperatures]
    arguments = columns(params, random.Random(3))
    active = torch.tensor([1, 0, 1, 1, 1, 1, 1, 1, 1], dtype=torch.bool, device=DEVICE)
    tokens = coupled_sample(padded(logits), *arguments, active=active).tolist()
    assert tokens[:4] == [8, 8, -1, -1]
    assert tokens[4] in (8, vocab - 1)
    assert tokens[5:] == [-1, -1, -1, 77]
    arguments[1] = arguments[3] = torch.zeros_like(arguments[1])
    arguments[3] = arguments[3].float()
    plain = coupled_sample(padded(logits), *arguments, active=active, filtered=False).tolist()
    assert plain == coupled_sample(padded(logits), *arguments, active=active).tolist()
    assert plain[5:] == [-1, -1, -1, 77]


def pair_law_p_value(positions_differ: bool) -> float:
    """Chi-square of successive draws of one request against the law's square."""
    pairs = 20_000 if ON_GPU else 25
    row = [0.3, 0.0, -0.2, 0.1] if ON_GPU else [0.1, 0.0]
    seeds = torch.arange(pairs, device=DEVICE).repeat_interleave(2)
    positions = torch.arange(2, device=DEVICE).repeat(pairs) * int(positions_differ)
    arguments = columns([ref.Params(temperature=exact(0.9))] * 2 * pairs, random.Random(0))
    arguments[4], arguments[5] = seeds, positions
    logits = torch.tensor([row], device=DEVICE).expand(2 * pairs, -1).contiguous()
    tokens = coupled_sample(logits, *arguments, filtered=False).view(-1, 2).cpu()
    counts = torch.bincount(
        tokens[:, 0] * len(row) + tokens[:, 1], minlength=len(row) ** 2
    ).tolist()
    law = ref.probabilities([exact(v) for v in row], ref.Params(temperature=exact(0.9)), [], [])
    return ref.chi_square_p(counts, [pairs * a * b for a in law for b in law])


def test_the_joint_law_is_the_softmax_and_noise_without_the_position_fails() -> None:
    assert pair_law_p_value(positions_differ=True) > 1e-4
    assert pair_law_p_value(positions_differ=False) < 1e-4


def test_wrong_logits_are_refused() -> None:
    arguments = columns([ref.Params()] * 2, random.Random(0))
    with pytest.raises(ValueError, match="float16, not float32 or bfloat16"):
        coupled_sample(torch.zeros(2, 3, dtype=torch.float16), *arguments)
    with pytest.raises(ValueError, match="no columns"):
        coupled_sample(torch.zeros(2, 0), *arguments)
    with pytest.raises(ValueError, match="not contiguous"):
        coupled_sample(torch.zeros(3, 2).T, *arguments)
    none = [column[:0] for column in arguments]
    assert coupled_sample(torch.zeros(0, 5, device=DEVICE), *none).shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_a_captured_graph_replays_the_draw_at_full_size(pdl: bool) -> None:
    rng = random.Random(8)
    logits = torch.randn(64, 151_936, device=DEVICE) * 3
    arguments = columns([random_params(rng) for _ in range(64)], rng)
    coupled_sample(logits, *arguments, pdl=pdl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = coupled_sample(logits, *arguments, pdl=pdl)
    for step in range(5):
        logits.copy_(torch.randn_like(logits) * 3)
        arguments[5].add_(step)
        graph.replay()
        assert torch.equal(tokens, reference(logits, *arguments))
