"""SPS tables: both forms of the file, what they answer, and the fits from measured steps."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from outrider.engine_core.sps_fit import Cell, fit_additive, fit_steps
from outrider.engine_core.sps_table import AdditiveTable, StepTable, read_sps
from outrider.engine_core.table_files import TableError, write_table

STEPS = StepTable((1, 4, 6, 8), (100.0, 95.0, 80.0, 60.0), 9)
ADDITIVE = AdditiveTable(0.01, (1, 8), (0.0, 0.007), (4, 16, 64), (0.001, 0.002, 0.008))


def test_a_step_runs_at_the_rate_of_the_largest_probe_within_it() -> None:
    found = [1 / STEPS.seconds(2, m) for m in (0, 1, 3, 4, 5, 6, 7, 8, 9, 1000)]
    assert found == pytest.approx([100, 100, 100, 95, 95, 80, 80, 60, 60, 60])


def test_the_parts_of_the_additive_form_are_linear_between_probes() -> None:
    for requests, extra, seconds in ((2, 0, 0.012), (2, 6, 0.0123333), (4, 20, 0.016)):
        assert ADDITIVE.seconds(requests, requests + extra) == pytest.approx(seconds, abs=1e-6)
    assert ADDITIVE.seconds(16, 116) == pytest.approx(0.025)
    one = AdditiveTable(0.01, (4,), (0.002,), (8,), (0.003,))
    assert {round(one.seconds(n, m), 9) for n in (1, 4, 9) for m in (1, 8, 99)} == {0.015}


@pytest.mark.parametrize("table", [STEPS, ADDITIVE])
def test_a_table_is_read_as_it_was_written(
    tmp_path: Path, table: StepTable | AdditiveTable
) -> None:
    path = str(tmp_path / "sps.json")
    assert table.seconds(1, 1) > 0  # what a lookup keeps is not written
    write_table(path, table)
    assert read_sps(path) == table
    assert json.loads(Path(path).read_text()).keys() == set(table.__struct_fields__)


A = {"sample_batch_tokens": [1, 4], "sample_steps_per_sec": [9, 5], "max_batch_tokens": 4}
B = {
    "bias_seconds": 0.1,
    "bs_probes": [1, 2],
    "alpha_seconds": [0, 0.1],
    "m_probes": [1],
    "theta_seconds": [0.0],
}


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (A, {"sample_batch_tokens": []}, "sample_batch_tokens: is empty"),
        (A, {"sample_batch_tokens": [4, 1]}, "sample_batch_tokens: 1 follows 4"),
        (A, {"sample_batch_tokens": [4, 4]}, "sample_batch_tokens: 4 follows 4"),
        (A, {"sample_batch_tokens": [0, 4]}, "sample_batch_tokens: begins with 0"),
        (A, {"sample_batch_tokens": [1, 2, 3]}, "sample_steps_per_sec: has 2 values"),
        (A, {"sample_batch_tokens": [1, 2.5]}, "sample_batch_tokens[1]: Expected `int`"),
        (A, {"sample_steps_per_sec": [9, 0]}, "sample_steps_per_sec: 0.0 is not above 0"),
        (A, {"sample_batch_tokens": [1, 10**400]}, "00… is no size of a step"),
        (B, {"bs_probes": [1, 10**400]}, "bs_probes: 1000"),
        (B, {"alpha_seconds": [0, 1e300]}, "alpha_seconds: 1e+300 s are no time of a step"),
        (A, {"max_batch_tokens": 3}, "max_batch_tokens: 3 is below the last probe"),
        (A, {"max_batch_tokens": None}, "max_batch_tokens: Expected `int`"),
        (B, {"bias_seconds": 0}, "bias_seconds: 0.0 is not above 0"),
        (B, {"bias_seconds": -1}, "bias_seconds: -1.0 is not above 0"),
        (B, {"bs_probes": [2, 1]}, "bs_probes: 1 follows 2"),
        (B, {"m_probes": []}, "m_probes: is empty"),
        (B, {"theta_seconds": [0, 1]}, "theta_seconds: has 2 values"),
        (B, {"alpha_seconds": [0]}, "alpha_seconds: has 1 values"),
        (B, {"theta_seconds": [-0.1]}, "bias_seconds: with the least"),
        # The text decides on the form.
        (A, {"note": "no bias_seconds", "bias_seconds": 1}, "missing required field `bs_probes`"),
    ],
)
def test_files_that_are_no_table(
    tmp_path: Path, base: dict[str, object], change: dict[str, object], words: str
) -> None:
    path = tmp_path / "sps.json"
    path.write_text(json.dumps(base))
    read_sps(str(path))
    path.write_text(json.dumps(base | change))
    with pytest.raises(TableError) as raised:
        read_sps(str(path))
    assert str(raised.value).startswith(f"{path}: ")
    assert words in str(raised.value)


def test_times_that_are_none() -> None:
    with pytest.raises(TableError, match="alpha_seconds: some values are not finite"):
        AdditiveTable(0.1, (1,), (float("inf"),), (1,), (0.0,))


def grid(gamma: int = 7) -> list[tuple[int, int]]:
    return [(n, n * (1 + k)) for n in (1, 2, 4, 8, 16, 32, 64) for k in range(gamma + 1)]


def test_a_step_table_has_the_median_of_each_size_and_never_falls() -> None:
    cells = [Cell(1, 4, s) for s in (0.3, 0.1, 0.2)] + [Cell(1, 2, 0.1), Cell(4, 8, 0.15)]
    assert fit_steps(cells) == StepTable((2, 4, 8), (10.0, 5.0, 5.0), 8)


def test_an_additive_table_gives_back_what_it_was_measured_of() -> None:
    cells = [Cell(n, m, 0.01 + 1e-4 * n + 3e-5 * max(m - 32, 0)) for n, m in grid()]
    table = fit_additive(cells)
    assert table.bs_probes == (1, 2, 4, 8, 16, 32, 64)
    assert table.m_probes[:6] == (1, 2, 3, 4, 6, 8)
    assert {round(b) - round(a) for a, b in pairwise(table.m_probes[-3:])} == {64}
    assert (table.alpha_seconds[0], table.theta_seconds[0]) == (0.0, 0.0)
    off = [table.seconds(c.requests, c.batch_tokens) / c.seconds - 1 for c in cells]
    assert float(np.abs(off).max()) < 0.03
    # Of times that a table gave, the fit finds the same times.
    again = fit_additive([c._replace(seconds=table.seconds(*c[:2])) for c in cells])
    for n, m in grid():
        assert again.seconds(n, m) == pytest.approx(table.seconds(n, m), rel=1e-9)


def test_more_requests_or_tokens_never_count_as_faster() -> None:
    rng = np.random.default_rng(4)
    cells = [Cell(n, m, 1e-4 * m * float(rng.uniform(0.3, 3.0))) for n, m in grid()]
    table = fit_additive(cells)
    for part in (table.alpha_seconds, table.theta_seconds):
        assert list(part) == sorted(part)
    falling = fit_additive([Cell(n, m, 1.0 / m) for n, m in grid()])
    assert max(falling.theta_seconds) == max(falling.alpha_seconds) == 0.0


def test_noise_is_averaged() -> None:
    rng = np.random.default_rng(3)
    cells = [
        Cell(n, m, (0.01 + 1e-4 * n + 3e-5 * m) * float(rng.normal(1.0, 0.02)))
        for n, m in grid()
        for _ in range(8)
    ]
    table = fit_additive(cells)
    off = [table.seconds(n, m) / (0.01 + 1e-4 * n + 3e-5 * m) - 1 for n, m in grid()]
    assert float(np.abs(off).max()) < 0.05


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([Cell(1, 2, 0.1)] * 3, "3 were measured; at least 4"),
        ([Cell(n, 64 * n, 0.1) for n in (1, 2, 3, 4)], "do not tell what requests cost"),
        ([Cell(1, 1, 0.1)] * 4 + [Cell(2, 1, 0.1)], "is no step"),
        ([Cell(1, 1, 0.0)] * 4, "is no step"),
    ],
)
def test_cells_that_make_no_additive_table(cells: list[Cell], words: str) -> None:
    with pytest.raises(TableError, match=words):
        fit_additive(cells)


def test_no_cells_make_no_step_table() -> None:
    with pytest.raises(TableError, match="0 were measured"):
        fit_steps([])
