"""Block verification: its law by enumeration, plain Python's tokens, laws at their edges."""

import itertools
import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch

from outrider.kernels import block_verify_cpu
from outrider.kernels.coupled_sample import coupled_sample
from outrider.kernels.philox import philox_words

from ..reference import block_verify_ref as ref
from .block_cases import random_chains

Path = tuple[int, ...]
VOCAB = 3
block_verify: Callable[..., torch.Tensor] = block_verify_cpu.block_verify


class Models(NamedTuple):
    """Both models' next laws by the tokens before."""

    target: dict[Path, list[Fraction]]
    draft: dict[Path, list[Fraction]]


def random_law(rng: random.Random) -> list[Fraction]:
    """Some tokens have no chance at all."""
    shares = [rng.choice([0, 1, 2, 3, 5, 8]) for _ in range(VOCAB)]
    shares[rng.randrange(VOCAB)] += 1
    return [Fraction(share, sum(shares)) for share in shares]


def random_models(seed: int, drafts: int) -> Models:
    rng = random.Random(seed)
    paths = [p for n in range(drafts + 1) for p in itertools.product(range(VOCAB), repeat=n)]
    return Models({p: random_law(rng) for p in paths}, {p: random_law(rng) for p in paths})


class Emitted(NamedTuple):
    """The law of the first ``drafts`` + 1 tokens, and the mean number of drafts kept."""

    law: dict[Path, Fraction]
    kept: Fraction


Kept = Callable[[list[list[Fraction]], list[list[Fraction]], Path], list[Fraction]]
After = Callable[[int, list[list[Fraction]], list[list[Fraction]], Path], ref.Law]


def emitted(models: Models, drafts: int, chances: Kept, after: After = ref.next_law) -> Emitted:
    """By all paths that may be drafted, kept counts and tokens behind; the target goes on."""
    law: dict[Path, Fraction] = dict.fromkeys(
        itertools.product(range(VOCAB), repeat=drafts + 1), Fraction(0)
    )
    mean = Fraction(0)

    def go_on(path: Path, mass: Fraction) -> None:
        if not mass:
            return
        if len(path) == drafts + 1:
            law[path] += mass
            return
        for token, chance in enumerate(models.target[path]):
            go_on((*path, token), mass * chance)

    for path in itertools.product(range(VOCAB), repeat=drafts):
        befores = [path[:i] for i in range(drafts + 1)]
        ps = [models.target[before] for before in befores]
        qs = [models.draft[before] for before in befores[:-1]]
        drawn = Fraction(1)
        for q, token in zip(qs, path, strict=True):
            drawn *= q[token]
        for count, chance in enumerate(chances(ps, qs, path)):
            mean += drawn * chance * count
            for token, share in enumerate(after(count, ps, qs, path)):
                go_on((*path[:count], token), drawn * chance * Fraction(share))
    return Emitted(law, mean)


def after_tokens(
    count: int, ps: list[list[Fraction]], qs: list[list[Fraction]], path: Path
) -> ref.Law:
    """What follows in rejection sampling one token after the other."""
    if count == len(qs):
        return ps[count]
    left = ref.residual(1, ps[count], qs[count])
    total = sum(left)
    return [value / total for value in left] if total else ps[count]


def by_blocks(ps: list[list[Fraction]], qs: list[list[Fraction]], path: Path) -> list[Fraction]:
    return [Fraction(x) for x in ref.kept_law(ref.thresholds(ps, qs, path))]


def by_weights(ps: list[list[Fraction]], qs: list[list[Fraction]], path: Path) -> list[Fraction]:
    """A fault: the shares themselves as chances."""
    return [Fraction(x) for x in ref.kept_law(ref.weights(ps, qs, path)[1:])]


def by_tokens(ps: list[list[Fraction]], qs: list[list[Fraction]], path: Path) -> list[Fraction]:
    """Rejection sampling one token after the other."""
    out, rest = [], Fraction(1)
    for p, q, token in zip(ps, qs, path, strict=False):
        chance = min(Fraction(1), p[token] / q[token]) if q[token] else Fraction(0)
        out.append(rest * (1 - chance))
        rest *= chance
    return [*out, rest]


def target_law(models: Models, length: int) -> dict[Path, Fraction]:
    law = {}
    for path in itertools.product(range(VOCAB), repeat=length):
        mass = Fraction(1)
        for i, token in enumerate(path):
            mass *= models.target[path[:i]][token]
        law[path] = mass
    return law


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_the_law_is_the_targets_exactly(drafts: int) -> None:
    longer = 0
    for seed in range(12 if drafts < 3 else 4):
        models = random_models(seed, drafts)
        wanted = target_law(models, drafts + 1)
        block = emitted(models, drafts, by_blocks)
        assert block.law == wanted
        token = emitted(models, drafts, by_tokens, after_tokens)
        assert token.law == wanted
        assert token.kept <= block.kept
        longer += token.kept < block.kept
    assert longer > 0 or drafts == 1


@pytest.mark.parametrize("drafts", [2, 3])
def test_enumeration_sees_planted_faults(drafts: int) -> None:
    models = random_models(1, drafts)
    wanted = target_law(models, drafts + 1)
    assert emitted(models, drafts, by_blocks, after_tokens).law != wanted
    assert emitted(models, drafts, by_weights).law != wanted


def test_the_published_numbers() -> None:
    ps, qs = [[0.6, 0.4], [0.3, 0.7], [0.5, 0.5]], [[0.8, 0.2], [0.5, 0.5]]
    assert ref.weights(ps, qs, [0, 1]) == pytest.approx([1, 0.75, 1])
    assert ref.thresholds(ps, qs, [0, 1]) == pytest.approx([0.025 / 0.275, 1])


@pytest.mark.parametrize(("vocab", "draft_vocab"), [(5, 5), (40, 40), (40, 17), (300, 130)])
def test_tokens_are_those_of_plain_python(vocab: int, draft_vocab: int) -> None:
    whole = stopped = 0
    for draft_dtype in (torch.float32, torch.bfloat16, torch.float16):
        case = random_chains(vocab + draft_vocab, 40, vocab, draft_vocab, draft_dtype)
        tokens = block_verify(*case.arguments).tolist()
        drafts = case.arguments[7].tolist()
        for token, wanted, draft in zip(tokens, case.tokens, drafts, strict=True):
            assert wanted in (-1, token)
            whole += wanted >= 0 and draft >= 0 and draft == token
            stopped += wanted >= 0 and draft >= 0 and draft != token
    assert whole > 30
    assert stopped > 10


def columns_of(logits: torch.Tensor) -> list[Any]:
    """Columns of rows at temperature 1, unfiltered, in chains of three with seeds of their own."""
    nodes = len(logits)
    return [
        logits,
        torch.ones(nodes),
        torch.zeros(nodes, dtype=torch.int32),
        torch.ones(nodes),
        torch.zeros(nodes),
        torch.arange(nodes) // 3,
        7 + torch.arange(nodes) % 3,
    ]


def test_chains_of_drawn_drafts_follow_the_targets_law() -> None:
    """Drawn by the very numbers that the published example has; its chances beside it."""
    count = 30_000
    p = torch.tensor([[0.6, 0.4], [0.3, 0.7], [0.5, 0.5]])
    q = torch.tensor([[0.8, 0.2], [0.5, 0.5]])
    generator = torch.Generator().manual_seed(5)
    chosen = torch.multinomial(q, count, replacement=True, generator=generator)
    drafts = torch.full((count, 3), -1)
    drafts[:, :2] = chosen.T
    rows = torch.tensor([0, 1, 0]).repeat(count)
    tokens = block_verify(
        *columns_of(p.log().repeat(count, 1)), drafts.flatten(), q.log(), rows, None
    ).view(count, 3)
    # What the walk emits: a node's token, as long as those before it are drafts.
    held = tokens[:, :2] == drafts[:, :2]
    first = torch.bincount(tokens[:, 0], minlength=2) / count
    assert torch.allclose(first, p[0], atol=0.012)
    second = torch.bincount(tokens[held[:, 0], 1], minlength=2)
    assert second.sum() > 0
    whole = held.all(dim=1)
    one = (drafts[:, 0] == 0) & (drafts[:, 1] == 1)
    assert whole[one].all()
    short = (drafts[:, 0] == 0) & (drafts[:, 1] == 0)
    assert whole[short].double().mean() == pytest.approx(0.75 * 0.6, abs=0.02)
    left = held[short & ~whole, 0].double().mean()
    assert left == pytest.approx(0.025 / 0.275, abs=0.02)


def test_a_law_that_equals_the_targets_keeps_nearly_every_draft() -> None:
    logits = torch.randn(300, 30, generator=torch.Generator().manual_seed(3))
    drafts = logits.argmax(dim=1)
    drafts[2::3] = -1
    tokens = block_verify(*columns_of(logits), drafts, logits, torch.arange(300), None)
    kept = drafts >= 0
    assert torch.equal(tokens[kept], drafts[kept])


def test_a_draft_that_the_filters_exclude_is_never_kept() -> None:
    logits = torch.tensor([[5.0, 4.0, 0.0]]).repeat(600, 1)
    columns = columns_of(logits)
    columns[2] = torch.full((600,), 2, dtype=torch.int32)
    own = torch.tensor([[0.0, 0.0, 9.0]])
    drafts = torch.tensor([0, 2, -1]).repeat(200)
    tokens = block_verify(*columns, drafts, own, torch.zeros(600, dtype=torch.int64), None)
    assert set(tokens.tolist()) == {0, 1}


def test_nodes_without_drafts_draw_as_the_coupled_rule() -> None:
    logits = torch.randn(9, 7, generator=torch.Generator().manual_seed(2))
    columns = columns_of(logits)
    drafts, rows = torch.full((9,), -1), torch.zeros(9, dtype=torch.int64)
    tokens = block_verify(*columns, drafts, torch.zeros(1, 7), rows, None)
    assert torch.equal(tokens, coupled_sample(*columns))


def test_unusable_laws_of_drafts_end_the_chain() -> None:
    count = 6_000
    logits = torch.tensor([[0.0, 1.0, 0.5]]).repeat(count * 3, 1)
    own = torch.tensor([[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
    ids = torch.tensor([0, 1, -1], dtype=torch.int32)
    drafts = torch.tensor([1, 1, -1]).repeat(count)
    tokens = block_verify(*columns_of(logits), drafts, own, torch.arange(count * 3) % 3, ids)
    found = torch.bincount(tokens[::3], minlength=3) / count
    assert torch.allclose(found, torch.softmax(logits[0], 0), atol=0.03)


def test_no_two_rounds_share_coins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coin of a draft that was not kept had a say in how many were."""
    keys: list[int] = []

    def watched(seeds: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
        keys.extend(positions[drafts.roll(1) >= 0].tolist())
        return philox_words(seeds, positions, count)

    monkeypatch.setattr(block_verify_cpu, "philox_words", watched)
    drafts = torch.tensor([1] * 63 + [-1])
    for first in range(5, 105):
        columns = columns_of(torch.zeros(64, 2))
        columns[-1] = first + torch.arange(64)
        block_verify(*columns, drafts, torch.zeros(1, 2), torch.zeros(64, dtype=torch.int64), None)
    assert len(keys) == len(set(keys)) == 63 * 100
