"""The greedy choice: compiled and torch agree, ties go to the lowest id, bad rows are seen."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.kernels import greedy_argmax_cpu
from outrider.kernels.greedy_argmax import greedy_argmax

values = st.sampled_from([-3.0, -0.0, 0.0, 1.5, 2.0, math.nan, math.inf, -math.inf, 3.4e38])


def compiled(logits: torch.Tensor) -> list[int]:
    ids = np.empty(logits.shape[0], dtype=np.int64)
    greedy_argmax_cpu.greedy_argmax(logits.numpy(), ids)
    return ids.tolist()


@given(st.lists(values, min_size=1, max_size=90), st.integers(0, 80))
def test_both_find_the_first_largest_or_refuse_the_row(row: list[float], pad: int) -> None:
    row = [-5.0] * pad + row
    usable = all(math.isfinite(value) for value in row)
    expected = [row.index(max(row)) if usable else -1]
    logits = torch.tensor([row])
    assert compiled(logits) == expected
    assert greedy_argmax(logits).tolist() == expected


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 8192, 50_001])
def test_random_rows_agree(vocab: int) -> None:
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(vocab))
    assert compiled(logits) == greedy_argmax(logits).tolist() == logits.argmax(1).tolist()


def test_short_output_is_refused() -> None:
    with pytest.raises(ValueError, match="ids_out has 1 elements for 2 rows"):
        greedy_argmax_cpu.greedy_argmax(np.zeros((2, 3), np.float32), np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="no columns"):
        greedy_argmax_cpu.greedy_argmax(np.zeros((1, 0), np.float32), np.zeros(1, np.int64))
