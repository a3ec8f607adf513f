"""STS: the file as SGLang has it, and the fit by the equations, one number after the other."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from outrider.engine_core.sts_table import (
    StsTable,
    calibration_error,
    confidence,
    fit_sts,
    identity_sts,
    read_sts,
)
from outrider.engine_core.table_files import TableError, write_table

from ..reference.verify_budget_ref import survival


def test_the_worked_numbers() -> None:
    found = confidence(np.array([[2.0, 0.0, -1.0]]), np.array([1.0, 2.0, 0.5]))
    np.testing.assert_allclose(found, [[0.880797, 0.5, 0.119203]], atol=1e-6)
    kept = survival(found.astype(np.float32))
    np.testing.assert_allclose(kept, [[0.880797, 0.440399, 0.052497]], atol=1e-6)


def test_logits_of_any_size_have_a_confidence() -> None:
    found = confidence(np.array([-1e6, -800.0, 0.0, 800.0, 1e6]), 0.1)
    np.testing.assert_array_equal(found, [0.0, 0.0, 0.5, 1.0, 1.0])


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    table = StsTable((0.5, 2.0), "code", 12, (0.2, 0.3), (0.1, 0.05))
    write_table(str(path), table)
    assert read_sts(str(path), 2) == table
    assert [p.name for p in tmp_path.iterdir()] == ["sts.json"]
    write_table(str(path), identity_sts(3))
    assert json.loads(path.read_text()) == {"temperatures": [1.0, 1.0, 1.0]}


def test_whole_numbers_and_unknown_fields_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    path.write_text('{"temperatures": [1, 2], "tool": "x"}')
    assert read_sts(str(path), 2).temperatures == (1.0, 2.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "temperatures"),
        ('{"temperatures": []}', "temperatures: is empty"),
        ('{"temperatures": [1, 0]}', "temperatures: 0.0 at position 1"),
        ('{"temperatures": [-1, 1]}', "temperatures: -1.0 at position 0"),
        ('{"temperatures": "x"}', "temperatures: Expected `array`"),
        ('{"temperatures": [1, true]}', "temperatures"),
        ('{"temperatures": [1, 1], "ece_before": [1]}', "ece_before: has 1 values"),
        ('{"temperatures": [1, 1], "ece_after": []}', "ece_after: has 0 values"),
        ('{"temperatures": [1, 1, 1]}', "3 of them for 2 draft positions"),
        ("[1, 1]", "Expected `object`"),
        ("{", "is no JSON"),
        ("\xff", "is no JSON"),
    ],
)
def test_files_that_are_no_table(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "sts.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(TableError) as raised:
        read_sts(str(path), 2)
    assert str(raised.value).startswith(f"{path}: ")
    assert words in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"none\.json: cannot be read: No such file"):
        read_sts(str(tmp_path / "none.json"), 2)


def plain_error(chances: list[float], accepted: list[int], bins: int) -> float:
    held: list[list[tuple[float, int]]] = [[] for _ in range(bins)]
    for chance, truth in zip(chances, accepted, strict=True):
        clamped = min(max(chance, 1e-8), 1 - 1e-8)
        held[int(clamped * bins)].append((clamped, truth))
    total = 0.0
    for group in held:
        if group:
            gap = sum(p for p, _ in group) / len(group) - sum(y for _, y in group) / len(group)
            total += len(group) / len(chances) * abs(gap)
    return total


def samples(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Raw logits that are twice, half and once what they should be."""
    rng = np.random.default_rng(seed)
    true = rng.normal(1.0, 1.5, (n, 3))
    held = rng.random((n, 3)) < 1 / (1 + np.exp(-true))
    return true * [2.0, 0.5, 1.0], np.cumprod(held, axis=1).astype(np.float64)


def test_the_error_is_that_of_the_equation() -> None:
    rng = np.random.default_rng(1)
    for bins in (1, 4, 15):
        chances = np.r_[rng.random(60), 0.0, 1.0, 0.5, 1 / 3]
        accepted = (rng.random(64) < 0.4).astype(np.float64)
        expected = plain_error(chances.tolist(), accepted.astype(int).tolist(), bins)
        assert calibration_error(chances, accepted, bins) == pytest.approx(expected, abs=1e-12)


def test_the_fit_is_that_of_the_equations() -> None:
    logits, mask = samples(80)
    grid = [10 ** (-1 + i / 20) for i in range(41)]
    before, plain, wanted = [1.0] * 80, [1.0] * 80, []
    table = fit_sts(logits, mask, dataset="made up")
    for k in range(3):
        raw, truth = logits[:, k].tolist(), mask[:, k].astype(int).tolist()

        def scaled(old: list[float], t: float, raw: list[float] = raw) -> list[float]:
            return [s / (1 + math.exp(-x / t)) for s, x in zip(old, raw, strict=True)]

        plain = scaled(plain, 1.0)
        errors = [plain_error(scaled(before, t), truth, 15) for t in grid]
        wanted.append(grid[errors.index(min(errors))])
        before = scaled(before, wanted[-1])
        assert table.ece_before is not None
        assert table.ece_after is not None
        assert table.ece_before[k] == pytest.approx(plain_error(plain, truth, 15), abs=1e-12)
        assert table.ece_after[k] == pytest.approx(min(errors), abs=1e-12)
    np.testing.assert_allclose(table.temperatures, wanted)
    assert (table.dataset, table.num_samples) == ("made up", 80)


def test_a_large_sample_finds_the_temperatures_behind_it() -> None:
    table = fit_sts(*samples(20_000))
    assert table.temperatures == pytest.approx((2.0, 0.5, 1.0), rel=0.2)
    assert table.ece_before is not None
    assert table.ece_after is not None
    assert max(table.ece_after) < 0.02 < max(table.ece_before)


def test_of_equal_errors_the_lowest_temperature_wins() -> None:
    logits = np.zeros((4, 2))  # a temperature changes nothing
    assert fit_sts(logits, np.zeros((4, 2))).temperatures == (0.1, 0.1)


@pytest.mark.parametrize(
    ("logits", "mask", "words"),
    [
        (np.zeros(3), np.zeros(3), r"logits: must be \[samples, positions\]"),
        (np.zeros((3, 0)), np.zeros((3, 0)), "logits: must be"),
        (np.zeros((0, 2)), np.zeros((0, 2)), "no samples"),
        (np.zeros((2, 2)), np.zeros((2, 3)), r"prefix_mask: is \[2, 3\]"),
        (np.full((1, 2), np.nan), np.zeros((1, 2)), "logits: some are not finite"),
        (np.zeros((1, 2)), np.array([[0.0, 1.0]]), "ones, then zeros"),
        (np.zeros((1, 2)), np.array([[0.5, 0.0]]), "ones, then zeros"),
    ],
)
def test_samples_that_cannot_be_fitted(logits: np.ndarray, mask: np.ndarray, words: str) -> None:
    with pytest.raises(TableError, match=words):
        fit_sts(logits, mask)
    with pytest.raises(TableError, match="num_bins"):
        fit_sts(np.zeros((1, 1)), np.zeros((1, 1)), bins=0)
