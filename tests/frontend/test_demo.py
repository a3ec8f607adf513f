"""``make run``: plain, NGRAM and EAGLE3 beside each other, and without a draft the first two."""

import json
from pathlib import Path

import pytest

from outrider.engine_core.model_path import ModelNotFound, resolve_model
from outrider.engine_core.sampling_params import SamplingParams
from outrider.frontend import demo
from outrider.frontend.results import Chunk

from ..engine.draft_checkpoints import write_eagle3


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ROUNDS", 1)
    monkeypatch.setattr(demo, "SAMPLING", SamplingParams(max_new_tokens=24, temperature=0.0))


def rows(out: str) -> dict[str, list[str]]:
    """Lines of the table by their side."""
    lines = [line for line in out.splitlines() if line.startswith(("with NGRAM", "with EAGLE3"))]
    return {" ".join(line.split()[:2]): line.split()[2:] for line in lines}


def test_a_draft_is_shown_beside_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = write_eagle3(tmp_path / "draft", resolve_model("pycoder"))
    config = json.loads((draft / "config.json").read_text())
    shape = {"steps": 2, "topk": 1, "num_draft_tokens": 3}
    (draft / "config.json").write_text(json.dumps({**config, "outrider": shape}))
    assert demo.main(str(draft)) == 0
    out = capsys.readouterr().out
    shown = rows(out)
    assert set(shown) == {"with NGRAM", "with EAGLE3"}
    assert all(cells[-2:] == ["the", "same"] for cells in shown.values())
    assert "without speculation" in out
    assert "left out" not in out


def test_without_a_draft_one_line_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise ModelNotFound("no draft")

    monkeypatch.setattr(demo, "resolve_draft", missing)
    assert demo.main() == 0
    out = capsys.readouterr().out
    assert set(rows(out)) == {"with NGRAM"}
    assert "EAGLE3 is left out: no draft of it ships with this installation." in out


def test_outputs_that_differ_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    chunks = [Chunk("", (1, 2)), Chunk("", (1, 3), meta_info={"spec_accept_length": 2.5})]
    sides = [demo.Side("without speculation", 10.0, chunks[0]), demo.Side("x", 20.0, chunks[1])]
    assert demo._compare(sides) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT" in out
    assert "2.00 x" in out
    assert "2.50" in out
