"""Rejection sampling: the published numbers, plain Python's tokens, laws at their edges."""

import math
from collections.abc import Callable

import pytest
import torch

from outrider.kernels import rejection_sample as reference
from outrider.kernels import rejection_sample_cpu
from outrider.kernels.draft_draw import draw_drafts
from outrider.kernels.draft_ops_cpu import draw_drafts as draw_drafts_cpu

from ..reference import rejection_ref as ref
from .rejection_cases import random_case

Rule = Callable[..., torch.Tensor]
BOTH: list[Rule] = [reference.rejection_sample, rejection_sample_cpu.rejection_sample]


def plain(logits: torch.Tensor) -> list[torch.Tensor]:
    """Columns of rows at temperature 1, unfiltered, each with a seed of its own."""
    rows = len(logits)
    return [
        logits,
        torch.ones(rows),
        torch.zeros(rows, dtype=torch.int32),
        torch.ones(rows),
        torch.zeros(rows),
        torch.arange(rows),
        torch.full((rows,), 9),
    ]


def test_the_published_numbers() -> None:
    p, q = [[0.6, 0.4], [0.3, 0.7]], [[0.8, 0.2], [0.5, 0.5]]
    assert ref.accept_probability(p[0], q[0], 0) == pytest.approx(0.75)
    assert ref.accept_probability(p[1], q[1], 1) == 1.0
    assert ref.residual(p[0], q[0]) == [0.0, 1.0]
    count = 20_000
    for node, draft, chance in ((0, 0, 0.75), (1, 1, 1.0)):
        logits = torch.tensor([p[node]]).log().expand(count, -1).contiguous()
        drafts, own = torch.full((count,), draft), torch.tensor([q[node]])
        left = reference.left_over(torch.tensor([p[node]]), own, None)
        assert left[0, draft] == pytest.approx(0 if node == 0 else 0.2)
        for rule in BOTH:
            columns = (*plain(logits), drafts, own.log(), torch.zeros_like(drafts), None)
            kept = rule(*columns) == draft
            assert kept.double().mean() == pytest.approx(chance, abs=0.01)


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize(("vocab", "draft_vocab"), [(5, 5), (40, 40), (40, 17), (300, 130)])
def test_tokens_are_those_of_plain_python(rule: Rule, vocab: int, draft_vocab: int) -> None:
    for draft_dtype in (torch.float32, torch.bfloat16, torch.float16):
        case = random_case(vocab + draft_vocab, 60, vocab, draft_vocab, draft_dtype=draft_dtype)
        assert rule(*case.arguments).tolist() == case.tokens
        drafts = case.arguments[7]
        agreed = sum(a == b for a, b in zip(case.tokens, drafts.tolist(), strict=True))
        assert 0 < agreed < sum(d >= 0 for d in drafts.tolist())


@pytest.mark.parametrize("rule", BOTH)
def test_a_law_that_equals_the_targets_keeps_nearly_every_draft(rule: Rule) -> None:
    logits = torch.randn(200, 30, generator=torch.Generator().manual_seed(3))
    drafts = logits.argmax(dim=1)
    tokens = rule(*plain(logits), drafts, logits, torch.arange(200), None)
    assert torch.equal(tokens, drafts)


@pytest.mark.parametrize("rule", BOTH)
def test_a_draft_that_the_filters_exclude_is_never_kept(rule: Rule) -> None:
    logits = torch.tensor([[5.0, 4.0, 0.0]]).repeat(500, 1)
    columns = plain(logits)
    columns[2] = torch.full((500,), 2, dtype=torch.int32)
    own = torch.tensor([[0.0, 0.0, 9.0]])
    tokens = rule(*columns, torch.full((500,), 2), own, torch.zeros(500, dtype=torch.int64), None)
    assert set(tokens.tolist()) == {0, 1}


@pytest.mark.parametrize("rule", BOTH)
def test_unusable_laws_draw_from_the_target(rule: Rule) -> None:
    count = 3_000
    logits = torch.tensor([[0.0, 1.0, 0.5]]).repeat(count, 1)
    own = torch.tensor([[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
    ids = torch.tensor([0, 1, -1], dtype=torch.int32)  # nor has token 2 a column
    tokens = rule(*plain(logits), torch.full((count,), 1), own, torch.arange(count) % 3, ids)
    found = torch.bincount(tokens, minlength=3) / count
    assert torch.allclose(found, torch.softmax(logits[0], 0), atol=0.03)


def test_unusable_logits_have_no_token() -> None:
    logits = torch.tensor([[0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf], [0.0, 1.0]])
    own = torch.zeros(1, 2)
    tokens = BOTH[0](
        *plain(logits), torch.tensor([0, 1, 0, -1]), own, torch.zeros(4, dtype=torch.int64), None
    )
    assert tokens[:3].tolist() == [-1, -1, -1]
    assert tokens[3] >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_draws_of_drafts_agree_and_follow_their_law(dtype: torch.dtype) -> None:
    count, generator = 4_000, torch.Generator().manual_seed(1)
    logits = torch.randn(1, 6, generator=generator).repeat(count, 1).to(dtype)
    logits[:2, 3] = math.nan
    names = torch.tensor([3, 5, 6, 9, 10, 11])
    sampled = torch.arange(count) >= 10
    arguments = (
        names, torch.full((count,), 0.7), sampled, torch.arange(count), torch.full((count,), 77),
    )  # fmt: skip
    tokens, native = torch.zeros(2, count, 1, dtype=torch.int64)
    draw_drafts(logits, *arguments, tokens=tokens)
    draw_drafts_cpu(logits, *arguments, tokens=native)
    assert torch.equal(tokens, native)
    best = names[logits[5].float().argmax()]
    assert (tokens[2:10] == best).all()
    assert tokens[0] == names[0]
    found = torch.tensor([(tokens[10:] == name).double().mean() for name in names])
    law = torch.softmax(logits[5].double() / 0.7, 0)
    assert torch.allclose(found, law, atol=0.03)
