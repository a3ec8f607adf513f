"""The calibration benchmark on a tiny draft: its samples are what the engine verified."""

import json
import sys
from pathlib import Path

import bench_confidence
import numpy as np
import pytest

from .engine.block_checkpoints import write_block
from .engine.tiny import write_checkpoint


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("confidence")
    target = write_checkpoint(folder / "target", 48, layers=4)
    write_block(folder / "draft", target, algorithm="DSPARK", confidence="markov")
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(1, 47, 600).astype(np.uint16))
    return folder


def run(place: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[int, dict[str, object]]:
    out = place / "out.json"
    words = [
        "bench_confidence.py", "--model", str(place / "target"), "--draft", str(place / "draft"),
        "--prompts", str(place / "ids.npy"), "--prompt-tokens", "20", "--new-tokens", "30",
        "--count", "16", "--json", str(out), *flags,
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", words)
    code = bench_confidence.main()
    return code, json.loads(out.read_text())


def test_errors_by_position_and_samples_for_the_fit(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npz = place / "samples.npz"
    code, report = run(place, monkeypatch, "--least", "200", "--npz", str(npz))
    assert code == 0
    with np.load(npz) as found:
        logits, mask = found["logits"], found["prefix_mask"]
    assert len(logits) == report["samples"]
    assert logits.shape == mask.shape
    assert 0 < mask.sum() < mask.size
    assert (np.diff(mask, axis=1) <= 0).all()
    # The samples that were not fitted to are about half.
    assert 0.3 < int(str(report["samples_tried"])) / len(logits) < 0.7
    before, after = report["ece_before"], report["ece_after"]
    assert isinstance(before, list)
    assert isinstance(after, list)
    assert len(before) == len(after) == logits.shape[1]
    assert after[0] < before[0]


def test_a_table_is_tried_on_all_samples_and_too_few_fail(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = place / "table.json"
    table.write_text(json.dumps({"temperatures": [1.0, 1.0, 1.0, 1.0]}))
    code, report = run(place, monkeypatch, "--sts", str(table))
    assert code == 1
    assert report["samples"] == report["samples_tried"]
    assert report["ece_before"] == report["ece_after"]


def test_the_error_of_known_samples() -> None:
    chance = np.repeat([0.5, 0.9], 1000)
    logits = np.log(chance / (1 - chance)).astype(np.float32)[:, None]
    accepted = np.zeros((2000, 1), np.float32)
    accepted[:500] = 1  # half of those that say 0.5
    accepted[1000:1700] = 1  # 0.7 of those that say 0.9
    samples = bench_confidence.Samples(logits, accepted, np.arange(2000))
    assert bench_confidence.errors(samples, [1.0]) == [pytest.approx(0.1, abs=1e-4)]
