"""A budget of drafts shared out by confidence, in torch and in Triton: order, ties, limits."""

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from outrider.kernels import verify_lens as verify_lens_torch
from outrider.kernels.verify_lens_gpu import allocate_verify

from ..reference.verify_budget_ref import survival
from ..reference.verify_lens_ref import verify_lens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
PDL = [False, pytest.param(True, marks=pytest.mark.gpu)]


class Allocated(NamedTuple):
    lens: list[int]
    confidence: list[list[float]]


def found(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    caps: list[int],
    budget: int,
    limit: int,
    eps: float,
    pdl: bool,
) -> list[Allocated]:
    """The answers of the torch operations and of the kernel, whose rows are not contiguous."""
    rows, gamma = logits.shape
    wide = torch.full((rows, gamma + 3), 1.0, device=DEVICE)
    wide[:, :gamma] = logits
    room = torch.tensor(caps, dtype=torch.int32, device=DEVICE)
    most = torch.tensor([budget], dtype=torch.int32, device=DEVICE)
    given = wide[:, :gamma], temperatures.to(DEVICE), room, most
    answers = []
    for allocate in (verify_lens_torch.allocate_verify, partial(allocate_verify, pdl=pdl)):
        lens = torch.full((rows,), -5, dtype=torch.int32, device=DEVICE)
        chances = torch.full((rows, gamma), -5.0, device=DEVICE)
        allocate(*given, limit=limit, eps=eps, confidence=chances, verify_lens=lens)
        answers.append(Allocated(lens.tolist(), chances.tolist()))
    return answers


def check(
    confidence: list[list[float]],
    budget: int,
    caps: list[int] | None = None,
    limit: int = 15,
    eps: float = EPS,
    pdl: bool = False,
    temperature: float = 1.0,
) -> list[int]:
    """Both hold to their own confidence, which is right but for its last bits."""
    gamma = len(confidence[0])
    room = [gamma] * len(confidence) if caps is None else caps
    temperatures = torch.full((gamma,), temperature)
    temperatures[1:] *= torch.linspace(0.5, 2.0, gamma)[1:]
    chances = torch.tensor(confidence, dtype=torch.float64)
    logits = (torch.logit(chances) * temperatures).float()
    lens: list[int] = []
    for answer in found(logits, temperatures, room, budget, limit, eps, pdl):
        torch.testing.assert_close(
            torch.tensor(answer.confidence).double(), chances, rtol=1e-5, atol=1e-7, equal_nan=True
        )
        assert answer.lens == verify_lens(answer.confidence, room, budget, limit, eps)
        assert lens in ([], answer.lens)
        lens = answer.lens
    assert budget < 0 or sum(lens) - len(lens) <= budget
    for length, cap in zip(lens, room, strict=True):
        assert 1 <= length <= 1 + max(0, min(gamma, limit, cap))
    return lens


WORKED = [[0.9, 0.8, 0.5, 0.25], [0.5, 0.2, 0.2, 0.1]]


def test_the_worked_numbers() -> None:
    assert check(WORKED, 3) == [3, 2]
    assert check(WORKED, 8) == [5, 5]
    assert check(WORKED, 0) == [1, 1]
    assert check(WORKED, -1) == [5, 5]
    assert check([[0.0, 0.0], [0.5, 0.0]], -2, caps=[1, 2]) == [2, 3]
    assert check(WORKED, 100) == [5, 5]
    assert check(WORKED, 3, caps=[1, 4]) == [2, 3]
    assert check(WORKED, 8, limit=2) == [3, 3]
    assert check(WORKED, 8, limit=0) == [1, 1]


def test_of_equals_the_shallower_comes_first_then_the_lower_row() -> None:
    sure = [[1.0] * 3] * 3
    assert [check(sure, budget) for budget in range(1, 10)] == [
        *([2, 1, 1], [2, 2, 1], [2, 2, 2], [3, 2, 2], [3, 3, 2], [3, 3, 3]),
        *([4, 3, 3], [4, 4, 3], [4, 4, 4]),
    ]
    assert check([[0.5, 1.0], [1.0, 0.5]], 2) == [2, 2]


def test_drafts_without_hope_are_not_verified() -> None:
    chances = [[0.0, 1.0], [0.5, 1.0], [0.4, 1.0], [float("nan"), 1.0], [1.0, float("nan")]]
    assert check(chances, 10, eps=0.5) == [1, 3, 1, 1, 2]
    assert check(chances, 10, eps=0.0) == [3, 3, 3, 1, 2]


def test_temperatures_are_those_of_the_position() -> None:
    """The second position's is half of the first's, and nothing is done to the logits before."""
    logits, temperatures = torch.tensor([[2.0, 2.0], [-3.0, 1.0]]), torch.tensor([2.0, 1.0])
    for answer in found(logits, temperatures, [2, 2], 3, 2, EPS, False):
        wanted = torch.sigmoid(torch.tensor([[1.0, 2.0], [-1.5, 1.0]]))
        torch.testing.assert_close(torch.tensor(answer.confidence), wanted)
        assert answer.lens == [3, 2]


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize(("rows", "gamma"), [(1, 1), (1, 15), (2, 7), (5, 3), (9, 4), (17, 7)])
def test_random_rows(rows: int, gamma: int, pdl: bool) -> None:
    rng = np.random.default_rng(rows)
    reached = Counter[str]()
    for turn in range(12 if rows < 9 else 6):
        confidence = rng.random((rows, gamma), dtype=np.float32)
        if turn % 2:  # ties
            confidence = np.round(confidence * 2) / np.float32(2)
        caps = rng.integers(0, gamma + 1, rows) if turn % 3 == 0 else np.full(rows, gamma)
        budget = int(rng.integers(0, rows * gamma + 2))
        lens = check(
            confidence.tolist(), budget, caps.tolist(), int(rng.integers(1, gamma + 2)), pdl=pdl
        )
        kept = survival(confidence)
        cut = [kept[r, n - 1] for r, n in enumerate(lens) if n - 1 < min(gamma, caps[r])]
        last = [kept[r, n - 2] for r, n in enumerate(lens) if n > 1]
        reached["spent"] += sum(lens) - rows == budget
        reached["left"] += sum(lens) - rows < budget
        reached["tie at the cut"] += bool(set(cut) & set(last))
    if rows > 2:
        assert min(reached["spent"], reached["left"], reached["tie at the cut"]) > 0


def test_more_rows_than_a_program_looks_at_together() -> None:
    confidence = np.round(np.random.default_rng(7).random((259, 2)) * 8) / 8
    check(confidence.tolist(), 200)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "gamma"), [(256, 15), (256, 7), (1024, 15), (64, 7)])
def test_large_batches(rows: int, gamma: int) -> None:
    rng = np.random.default_rng(rows + gamma)
    for turn in range(20):
        confidence = rng.random((rows, gamma), dtype=np.float32) ** np.float32(0.3)
        if turn % 2:
            confidence = np.round(confidence * 4) / np.float32(4)
        budget = int(rng.integers(0, rows * gamma))
        logits = torch.logit(torch.from_numpy(confidence))
        answers = found(
            logits, torch.ones(gamma), [gamma] * rows, budget, gamma, EPS, bool(turn % 3)
        )
        for lens, chances in answers:
            assert lens == verify_lens(chances, [gamma] * rows, budget, gamma, EPS)


@pytest.mark.gpu
def test_a_graph_reads_the_budget_of_each_replay() -> None:
    logits, temperatures = torch.randn(32, 7, device=DEVICE), torch.ones(7, device=DEVICE)
    caps = torch.full((32,), 7, dtype=torch.int32, device=DEVICE)
    budget = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    lens, confidence = torch.empty_like(caps), torch.empty_like(logits)

    def run() -> None:
        allocate_verify(
            logits, temperatures, caps, budget, limit=7, eps=EPS, confidence=confidence,
            verify_lens=lens,
        )  # fmt: skip

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for drafts in (0, 5, 40, 224):
        budget.fill_(drafts)
        graph.replay()
        wanted = verify_lens(confidence.tolist(), [7] * 32, drafts, 7, EPS)
        assert lens.tolist() == wanted


def test_no_rows_and_refused_tensors() -> None:
    def call(logits: torch.Tensor, **other: torch.Tensor) -> None:
        rows = len(logits)
        ints = torch.full((2, rows), 2, dtype=torch.int32, device=DEVICE)
        given: dict[str, Any] = {
            "temperatures": torch.ones(2, device=DEVICE),
            "budget": torch.tensor([1], dtype=torch.int32, device=DEVICE),
            "confidence": torch.empty(rows, 2, device=DEVICE),
            **other,
        }
        allocate_verify(logits, caps=ints[0], verify_lens=ints[1], limit=2, eps=EPS, **given)

    call(torch.empty(0, 2, device=DEVICE))
    two = torch.zeros(2, 2, device=DEVICE)
    with pytest.raises(ValueError, match=r"logits are torch\.float64"):
        call(two.double())
    with pytest.raises(ValueError, match="with stride 3"):
        call(torch.zeros(2, 3, device=DEVICE).t())
    with pytest.raises(ValueError, match=r"budget is torch\.int64"):
        call(two, budget=torch.tensor([1], device=DEVICE))
    with pytest.raises(ValueError, match=r"temperatures is torch\.float32 \(3,\)"):
        call(two, temperatures=torch.ones(3, device=DEVICE))
    with pytest.raises(ValueError, match=r"confidence is torch\.float64"):
        call(two, confidence=two.double())
