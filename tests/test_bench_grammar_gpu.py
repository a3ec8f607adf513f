"""The benchmark of a grammar's cost on a tiny model: both sides in turns, every text legal."""

import json
import sys
from pathlib import Path

import bench_grammar_gpu
import pytest
from wide_tokenizer import letter_tokens, write_wide_tokenizer

from .engine.tiny import write_checkpoint

VOCAB = 8500


def test_both_sides_of_every_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_checkpoint(tmp_path / "model", VOCAB)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": VOCAB - 7}))
    out = tmp_path / "out.json"
    monkeypatch.setattr(
        sys, "argv",
        [
            "bench_grammar_gpu.py", "--model", str(model), "--device", "cpu", "--dtype", "float32",
            "--batch-size", "1", "3", "--context", "8", "--steps", "6", "--warm-steps", "2",
            "--turns", "2", "--temperature", "1.0", "--drafts", "4", "--json", str(out),
        ],
    )  # fmt: skip
    assert bench_grammar_gpu.main() == 0
    report = json.loads(out.read_text())
    assert report["complete"]
    found = {(row["mode"], row["batch"]): row for row in report["rows"]}
    assert list(found) == [("plain", 3), ("plain", 1), ("drafts", 3), ("forced", 3), ("drafts", 1)]
    for (mode, batch), row in found.items():
        for side in ("without", "with"):
            assert row[side]["steps"] == 12
            assert row[side]["ended"] == 0
        assert row["with"]["legal"] == row["with"]["texts"] == 2 * batch
        assert row["over"] > 0
        assert len(row["over_turns"]) == 2
        assert ("within" in row) == (mode != "forced")
        assert row["without"]["nodes"] == (1 if mode == "plain" else 5)
    assert found["drafts", 3]["with"]["nodes"] > 3
    assert found["forced", 3]["with"]["forced"] > 0
    assert found["forced", 3]["with"]["emitted"] > 1


def test_a_made_tokenizer_has_what_a_model_has(tmp_path: Path) -> None:
    path = write_wide_tokenizer(tmp_path, VOCAB, VOCAB - 7)
    model = json.loads(path.read_text())["model"]
    assert sorted(model["vocab"].values()) == list(range(VOCAB))
    words = {number: word for word, number in model["vocab"].items()}
    assert all(words[number].isalpha() for number in letter_tokens(path))
    with pytest.raises(ValueError, match="EOS"):
        write_wide_tokenizer(tmp_path, VOCAB, 5)
