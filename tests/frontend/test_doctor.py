"""``outrider doctor``: what acceptance by position is taken to mean, and whole runs on a CPU."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.engine_core.divergence import Divergence
from outrider.engine_core.draft_finding import Finding
from outrider.engine_core.model_path import resolve_model
from outrider.frontend import cli
from outrider.frontend.doctor import trial
from outrider.frontend.doctor.acceptance import Run, diagnose, loops, positions
from outrider.frontend.doctor.prompts import PROMPTS, read_prompts
from outrider.frontend.doctor.report import finding_lines
from outrider.frontend.flags import UsageError

from ..engine.draft_checkpoints import write_eagle3

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "prompts" / "pycoder_prompts.jsonl"


def judge(rates: Sequence[float], algorithm: str = "EAGLE3", **fields: Any) -> list[Finding]:
    """The findings of 1,000 rows whose drafts hold at ``rates``, each given the one before."""
    accepted, left = [], 1000.0
    for rate in rates:
        left *= rate
        accepted.append(round(left))
    run = Run(
        algorithm=algorithm,
        has_model=algorithm != "NGRAM",
        drafted=(1000,) * len(rates),
        accepted=tuple(accepted),
        ended=0,
        looping=0,
        outputs=20,
        known=None,
    )
    return list(diagnose(run._replace(**fields)))


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_what_is_wrong_with_a_block_draft(algorithm: str) -> None:
    [finding] = judge([0.01, 0.5], algorithm)
    assert (finding.level, "another mask token" in finding.remedy) == ("failed", True)
    [finding] = judge([0.80, 0.20, 0.30], algorithm)
    assert "layers that look ahead in the block" in finding.remedy
    assert "recurrent" not in finding.remedy


@pytest.mark.parametrize(
    ("rates", "level", "words"),
    [
        ([0.85, 0.86, 0.85, 0.84], "ok", "flat: 0.85 0.86 0.85 0.84"),
        ([0.80, 0.76, 0.72, 0.69], "ok", "decays slowly"),
        ([0.80, 0.70, 0.60, 0.50], "ok", "decays with position"),
        ([0.01, 0.5], "failed", "near zero"),
        ([0.20, 0.22, 0.2], "warning", "low from the first position"),
        ([0.80, 0.20, 0.30], "warning", "collapses behind the first position"),
        ([0.40, 0.80, 0.85], "warning", "the first position is the worst"),
        ([1.0, 1.0, 1.0], "warning", "exactly 1.0"),
        ([0.97], "ok", "at the first position"),
    ],
)
def test_acceptance_is_put_into_words(rates: list[float], level: str, words: str) -> None:
    [finding] = judge(rates)
    assert (finding.check, finding.level) == ("acceptance", level)
    assert words in finding.found
    assert bool(finding.remedy) == (level != "ok")


def test_remedies_are_those_of_the_algorithm() -> None:
    causes = {name: judge([0.0, 0.0], name)[0].remedy for name in ("EAGLE3", "EAGLE", "STANDALONE")}
    assert "eagle_aux_hidden_state_layer_ids" in causes["EAGLE3"]
    assert "d2t" not in causes["EAGLE"]
    assert "shifted by one" not in causes["STANDALONE"]
    assert "norm_output" in judge([0.8, 0.1])[0].remedy


def test_text_lookup_is_judged_by_the_text() -> None:
    for rates, level in (([0.3, 0.9], "ok"), ([0.2, 0.1], "ok"), ([0.01], "warning")):
        assert judge(rates, "NGRAM")[0].level == level
    assert judge([1.0, 1.0], "NGRAM")[0].level == "ok"


def test_an_output_that_ends_inside_a_run_is_no_miss() -> None:
    counts: dict[str, Any] = {"drafted": (500, 500, 500), "accepted": (498, 496, 490), "ended": 20}
    [finding] = judge([1.0] * 3, **counts)
    assert "exactly 1.0" in finding.found
    [finding] = judge([1.0] * 3, **counts | {"ended": 5})
    assert "exactly" not in finding.found


def test_too_few_drafts_are_not_judged() -> None:
    [finding] = judge([], drafted=(), accepted=())
    assert (finding.level, finding.found) == ("failed", "nothing was drafted")
    [finding] = judge([], drafted=(9,), accepted=(9,))
    assert finding.level == "warning"
    [finding] = judge([], "NGRAM", drafted=(), accepted=())
    assert finding.level == "warning"
    # A position that few rows reach is not spoken of.
    assert judge([0.02, 1.0])[0].found == "near zero: 0.02"


def test_loops_and_the_vocabulary_are_told() -> None:
    assert [f.check for f in judge([0.8], looping=10)] == ["acceptance"]
    assert judge([0.8], looping=11)[1].level == "warning"
    assert judge([0.8], known=0.99)[1].level == "ok"
    low = judge([0.8], known=0.80)[1]
    assert low.level == "warning"
    assert "80.0%" in low.found
    assert loops([5, 6, *[1, 2, 3] * 12])
    assert not loops(list(range(64)))
    assert not loops([1] * 20)  # too short to tell


def test_rates_by_position() -> None:
    table = positions((10, 8, 4), (5, 2))
    assert [(p.position, p.drafted, p.accepted) for p in table] == [
        (1, 10, 5),
        (2, 8, 2),
        (3, 4, 0),
    ]
    assert [p.given for p in table] == [0.5, 0.5, 0.0]
    assert positions((4, 4), ())[1].given is None
    assert positions((3, 0), (1,))[-1].position == 1


@pytest.mark.parametrize(
    ("dtype", "gap", "usual", "level"),
    [
        ("float32", 1e-5, 0.0, "ok"),
        ("float32", 0.2, 0.0, "failed"),
        ("bfloat16", 0.1, 0.2, "ok"),
        ("bfloat16", 0.3, 0.2, "warning"),
    ],
)
def test_ties_are_told_from_faults(
    dtype: str, gap: float, usual: float, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def divergence(size: float) -> Divergence:
        return Divergence(prompt=0, position=3, expected=1, got=2, gap=size)

    monkeypatch.setattr(trial, "_outputs", lambda *_, **__: [[1]])
    monkeypatch.setattr(trial, "_divergences", lambda *_: [divergence(usual)])
    llm: Any = SimpleNamespace(info=SimpleNamespace(dtype=dtype))
    params: Any = None
    finding = trial._exactness(llm, [[1]], params, [[1, 2]], [divergence(gap)])
    assert finding.level == level


def test_its_prompts_are_not_those_of_the_benchmarks() -> None:
    assert len(PROMPTS) == len(set(PROMPTS)) == 20
    for line in BENCHMARK.read_text().splitlines():
        text = json.loads(line)["prompt"]
        assert not [p for p in PROMPTS if isinstance(text, str) and (p in text or text in p)]


def test_prompts_are_read_from_files(tmp_path: Path) -> None:
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": "a\\nb", "kind": "x"}\n\n{"prompt": [1, 2]}\n')
    assert read_prompts(str(lines)) == ("a\nb", [1, 2])
    text = tmp_path / "p.txt"
    text.write_text("one\n\n  two\n")
    assert read_prompts(str(text)) == ("one", "  two")
    lines.write_text('{"text": "a"}\n')
    with pytest.raises(UsageError, match="line 1"):
        read_prompts(str(lines))
    text.write_text("\n")
    with pytest.raises(UsageError, match="no prompt"):
        read_prompts(str(text))
    with pytest.raises(UsageError, match="cannot read"):
        read_prompts(str(tmp_path / "absent"))


def test_long_findings_are_wrapped_beside_their_check() -> None:
    lines = finding_lines(Finding("weights", "failed", "word " * 40, "remedy " * 20)).splitlines()
    assert lines[0].startswith("FAILED   weights")
    assert all(len(line) <= 100 for line in lines)
    assert sum("->" in line for line in lines) == 1
    assert all(line.startswith(" " * 28) for line in lines[1:])


@pytest.fixture
def few(tmp_path: Path) -> list[str]:
    """Flags of a short run."""
    file = tmp_path / "prompts.txt"
    file.write_text("def area(self):\nimport os\nx = 1; x = 1; x = 1;\n")
    return ["--prompts", str(file), "--max-new-tokens", "24", "--num-threads", "1"]


def doctor(*args: str) -> int:
    return cli.main(["doctor", "--model", "pycoder", *args])


def test_a_draft_that_is_the_target_is_suspicious(
    few: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody says which algorithm: the tensors do."""
    file = tmp_path / "report.json"
    steps = ("--speculative-num-steps", "1")  # many rows of one draft
    assert doctor("--draft", str(resolve_model("pycoder")), *steps, *few, "--json", str(file)) == 0
    out = capsys.readouterr().out
    assert "drafts by STANDALONE" in out
    assert "exactly 1.0 at every position" in out
    report = json.loads(file.read_text())
    assert report["healthy"] is True
    assert report["positions"][0]["rate"] == 1.0
    assert report["divergences"] == []
    assert report["num_prompts"] == 3
    assert report["config"]["speculative_length_policy"] == "fixed"
    levels = {finding["check"]: finding["level"] for finding in report["findings"]}
    assert levels["exactness"] == levels["tokenizer"] == levels["weights"] == "ok"
    assert levels["acceptance"] == "warning"


def test_a_draft_that_knows_nothing_fails(
    few: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = write_eagle3(tmp_path / "d", resolve_model("pycoder"))
    assert doctor("--draft", str(draft), *few, "--json", "-") == 1
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert report["algorithm"] == "EAGLE3"
    found = {finding["check"]: finding for finding in report["findings"]}
    assert found["acceptance"]["level"] == "failed"
    assert found["draft vocabulary"]["level"] == "warning"
    assert found["exactness"]["level"] == "ok"
    assert "near zero" in shown.err
    assert "checks failed" in shown.err


def test_text_lookup_needs_no_draft(few: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--speculative-algorithm", "ngram", *few) == 0
    out = capsys.readouterr().out
    assert "drafts by NGRAM" in out
    assert "tokenizer" not in out
    assert "exactness" in out


def test_nothing_runs_once_a_check_has_failed(
    few: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = write_eagle3(tmp_path / "d", resolve_model("pycoder"))
    path = draft / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 9000}))
    assert doctor("--draft", str(draft), *few) == 1
    out = capsys.readouterr().out
    assert "FAILED   vocabulary" in out
    assert "and nothing was run" in out
    assert "exactness" not in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "--speculative-algorithm: name the drafter"),
        (("--speculative-algorithm", "EAGLE3", "--draft", "/nowhere"), "speculative_draft_model"),
        (("--draft", "/nowhere"), "speculative_draft_model_path"),
        (("--speculative-algorithm", "NGRAM", "--draft", "pycoder"), "belongs to a draft model"),
        (
            ("--speculative-algorithm", "NGRAM", "--simulate-accept-length", "2"),
            "would force what is to be measured",
        ),
        (("--speculative-algorithm", "NGRAM", "--skip-tokenizer-init"), "needs the tokenizer"),
        (("--speculative-algorithm", "NGRAM", "--prompts", "/nowhere"), "--prompts: cannot read"),
        (("--speculative-algorithm", "NGRAM", "--json", "/nowhere/x"), "--json: cannot write"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(
    args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(*args) == 2
    assert words in capsys.readouterr().err
