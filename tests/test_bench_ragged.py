"""The sweep of verify policies on a tiny model: one table, three engines, marked as simulated."""

import json
import sys
from pathlib import Path

import bench_ragged
import pytest

from outrider.engine_core.sps_table import AdditiveTable

from .engine.block_checkpoints import write_block
from .engine.tiny import write_checkpoint


def test_policies_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CHECK", "0")
    # In this process, which costs no imports.
    monkeypatch.setattr(bench_ragged, "apart", bench_ragged.measure)
    table = AdditiveTable(1e-3, (1,), (0.0,), (1, 64), (0.0, 1e-2))
    monkeypatch.setattr(bench_ragged, "measure_costs", lambda *_: ([], None))
    monkeypatch.setattr(bench_ragged, "fit_costs", lambda *_: table)
    target = write_checkpoint(tmp_path / "target", 48, layers=4)
    draft = write_block(tmp_path / "draft", target, algorithm="DSPARK", confidence="markov")
    out = tmp_path / "out.json"
    monkeypatch.setattr(
        sys, "argv",
        [
            "bench_ragged.py", "--model", str(target), "--draft", str(draft), "--device", "cpu",
            "--simulate-survival", "0.8", "--batch-size", "1", "3", "--context", "8", "--steps",
            "4", "--turns", "2", "--bar", "0.0", "--json", str(out),
        ],
    )  # fmt: skip
    assert bench_ragged.main() == 0
    report = json.loads(out.read_text())
    assert report["simulated"]
    assert [row["batch"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        assert row["simulated"] is row["static"]["simulated"] is row["compact"]["simulated"] is True
        assert not row["plain"]["simulated"]
        assert row["plain"]["tokens_per_row"] == 1
        assert row["static"]["verified_per_row"] == report["gamma"]
        assert row["static"]["tokens_per_row"] > 2
        assert row["compact"]["verified_per_row"] <= report["gamma"]
        best = max(row[name]["tokens_per_s"] for name in ("plain", "static"))
        assert row["compact_over_best"] == pytest.approx(
            row["compact"]["tokens_per_s"] / best, abs=1e-3
        )
    assert report["worst"] == min(row["compact_over_best"] for row in report["rows"])
