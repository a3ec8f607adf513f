"""``outrider check lossless``: the matrix on a CPU, and that it finds what it is there to find."""

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from outrider.engine_core.config import EngineConfig
from outrider.engine_core.divergence import ENDED, TIE_GAP, Divergence, first_divergence
from outrider.engine_core.ids import f32, i32
from outrider.engine_core.plan import TokenLogprobs
from outrider.engine_core.refusal import Refused, RefusedError
from outrider.engine_core.sampling_params import SamplingParams
from outrider.frontend import cli, launch
from outrider.frontend.errors import RequestFailed
from outrider.frontend.flags import UsageError
from outrider.frontend.llm import LLM
from outrider.frontend.logit_gap import logit_gap
from outrider.frontend.lossless import draws, matrix
from outrider.frontend.lossless.cells import Limits, judge_outputs, lost, unserved
from outrider.frontend.lossless.draws import chi_square_tail, same_law
from outrider.frontend.lossless.features import FEATURES
from outrider.frontend.lossless.matrix import Matrix
from outrider.frontend.lossless.outputs import (
    Answers,
    Deviation,
    Parting,
    Request,
    deviation,
    partings,
)
from outrider.frontend.lossless.recording import Recording
from outrider.frontend.lossless.report import row_lines
from outrider.frontend.results import Completion, GenerationResult

from ..engine.processor_package import EXAMPLES

cells_of = vars(draws)["_cells"]
PROMPTS = "def area(self):\nx = 1; x = 1; x = 1;\n"


@pytest.fixture
def few(tmp_path: Path) -> list[str]:
    """Flags of a short run, whose traces go to ``traces``."""
    file = tmp_path / "prompts.txt"
    file.write_text(PROMPTS)
    return [
        *("--prompts", str(file), "--max-new-tokens", "10", "--num-threads", "1"),
        *("--traces", str(tmp_path / "traces")),
    ]


def check(*args: str) -> int:
    return cli.main(["check", "lossless", "--model", "pycoder", *args])


def keep(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leave these rows of the matrix."""
    chosen = tuple(feature for feature in FEATURES if feature.name in names)
    assert len(chosen) == len(names)
    monkeypatch.setattr(matrix, "FEATURES", chosen)


def test_every_feature_is_exact(
    few: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check("--speculative-algorithm", "ngram", *few, "--json", "-") == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    cells = [cell for row in report["rows"] for cell in row["cells"]]
    assert [row["feature"] for row in report["rows"]] == [one.name for one in FEATURES]
    assert {cell["status"] for cell in cells} == {"exact"}
    assert report["lossless"] is True
    assert report["batches"] == [1, 8]
    accepted = {row["feature"]: row["accepted_drafts"] for row in report["rows"]}
    proposed = {row["feature"]: row["proposed_drafts"] for row in report["rows"]}
    assert all(accepted[name] > 3 for name in accepted if name != "max tokens"), accepted
    assert sum(proposed.values()) > sum(accepted.values()) + 50  # wrong drafts, too
    assert "54 cells: 54 exact" in shown.err
    assert list((tmp_path / "traces").iterdir()) == []


def test_broken_verification_fails_with_a_trace_that_shows_where(
    few: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = str(Path(__file__).parent / "broken_core.py")
    monkeypatch.setattr(launch, "core_command", lambda: [sys.executable, "-P", script])
    keep(monkeypatch, "greedy", "temperature", "frequency_penalty", "n = 2")
    file = tmp_path / "report.json"
    assert check("--speculative-algorithm", "NGRAM", *few, "--json", str(file)) == 1
    out = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["lossless"] is False
    failed = {
        row["feature"]: cell["failure"]
        for row in report["rows"]
        for cell in row["cells"]
        if cell["status"] == "failed"
    }
    assert failed.keys() == {"greedy", "temperature", "frequency_penalty", "n = 2"}
    for failure in failed.values():
        assert failure["expected"] != failure["got"]
        words = f"position {failure['position']}: expected {failure['expected']} "
        assert words in " ".join(out.split())
    assert "FAILED" in out
    assert f"outrider replay {report['trace']}" in out
    trace = Path(report["trace"])
    assert trace.parent == tmp_path / "traces"
    # The core did as it was told; the model, verified rightly, decides otherwise.
    assert cli.main(["replay", str(trace)]) == 1
    core, model, *differences = capsys.readouterr().out.splitlines()
    assert core.endswith("all the same")
    assert model.endswith("differences")
    assert "StepResult.accept_lens" in differences[0]
    # Batch 1 of the first row is the first that failed, and its step is named.
    step = report["rows"][0]["cells"][0]["failure"]["step"]
    assert f"step {step}: greedy, batch 1" in out
    assert any(line.strip().startswith(f"step {step}: ") for line in differences)
    # The first sample of two is the request of the row temperature, and yet has steps of its own.
    failures = [cell["failure"] for row in report["rows"] for cell in row["cells"]]
    steps = [failure["step"] for failure in failures if failure is not None]
    assert steps == sorted(set(steps))
    both = [failed[name] for name in ("temperature", "n = 2")]
    assert both[0]["output"] == both[1]["output"]
    assert both[1]["sample"] == 0


@pytest.mark.parametrize("rule", ["rejection-sampling", "block-verification"])
def test_drawn_drafts_are_compared_by_their_distribution(
    rule: str, few: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draws, "DRAWS", 24)
    keep(monkeypatch, "greedy", "temperature", "n = 2", "regex, temperature")
    eagle = ["--speculative-algorithm", "EAGLE3", f"--speculative-use-{rule}"]
    assert check(*eagle, *few) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:22].strip(): line for line in lines}
    assert "(p = " not in rows["greedy"]
    assert rows["temperature"].count("exact (p = ") == 2
    assert rows["n = 2"].count("exact (p = ") == 2
    assert rows["regex, temperature"].count("exact (p = ") == 2


@pytest.mark.parametrize("rule", ["rejection-sampling", "block-verification"])
def test_a_rule_that_is_broken_behind_the_first_draft_is_found(
    rule: str,
    few: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = str(Path(__file__).parent / "broken_rules.py")
    monkeypatch.setattr(launch, "core_command", lambda: [sys.executable, "-P", script])
    monkeypatch.setattr(draws, "DRAWS", 128)
    monkeypatch.setattr(draws, "PROMPTS", 1)
    keep(monkeypatch, "temperature")
    file = tmp_path / "report.json"
    eagle = ["--speculative-algorithm", "EAGLE3", f"--speculative-use-{rule}"]
    assert check(*eagle, *few, "--json", str(file)) == 1
    [row] = json.loads(file.read_text())["rows"]
    assert [cell["status"] for cell in row["cells"]] == ["failed", "failed"]
    for cell in row["cells"]:
        assert cell["p"] < 1e-4
        assert cell["failure"]["position"] >= 1  # token 0 comes before any draft, 1 is the first
    assert "another distribution" in capsys.readouterr().out


def test_outputs_that_thresholds_change_are_lossy_and_not_failed(
    few: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keep(monkeypatch, "greedy", "temperature", "regex, temperature")
    flags = ["--speculative-algorithm", "NGRAM", "--speculative-accept-threshold-acc", "0.01"]
    file = tmp_path / "report.json"
    assert check(*flags, *few, "--json", str(file)) == 0
    out = capsys.readouterr().out
    report = json.loads(file.read_text())
    statuses = {row["feature"]: {cell["status"] for cell in row["cells"]} for row in report["rows"]}
    assert statuses.pop("greedy") == {"exact"}
    assert "lossy" in set.union(*statuses.values()) <= {"lossy", "exact"}
    assert (report["lossless"], report["failed"], report["trace"]) == (False, False, None)
    assert "speculative_accept_threshold_acc: 0.01 is lossy" in out
    lossy = sum(cell["status"] == "lossy" for row in report["rows"] for cell in row["cells"])
    assert f"6 cells: {6 - lossy} exact, {lossy} lossy" in out
    assert list((tmp_path / "traces").iterdir()) == []


def test_gaps_are_found_through_whatever_decides() -> None:
    """Against log-probabilities, of which a greedy choice is a function."""
    with LLM("pycoder", num_threads=1, max_running_requests=2) as llm:
        prompt = list(range(40, 60))
        plain = SamplingParams(temperature=0.0, max_new_tokens=4, logprobs=8)
        [result] = llm.generate([prompt], plain)
        before, at = result.token_ids[:3], result.outputs[0].logprobs[3]
        best = i32(at.top_ids).tolist()
        values = dict(zip(best, f32(at.top_values).tolist(), strict=True))
        wanted = values[best[0]] - values[best[5]]
        found = logit_gap(llm, prompt, before, plain, best[0], best[5])
        assert wanted <= found + 1e-4 <= wanted * 1.06 + 2e-4
        biased = SamplingParams(temperature=0.0, logit_bias={best[5]: wanted - 0.25})
        assert logit_gap(llm, prompt, before, biased, best[0], best[5]) == pytest.approx(
            0.25, rel=0.06
        )
        # A token that the output holds already is nearer or farther by its penalties.
        penal = SamplingParams(temperature=0.0, frequency_penalty=0.5, presence_penalty=1.0)
        held = [best[0], best[0]]
        free = SamplingParams(temperature=0.0, logit_bias={best[0]: -2.0})
        first = llm.generate([[*prompt, *held]], free, max_new_tokens=1)[0].token_ids[0]
        for other in {*best[:4]} - {first}:
            assert logit_gap(llm, prompt, held, penal, first, other) == pytest.approx(
                logit_gap(llm, prompt, held, free, first, other), rel=0.06
            )
        # A banned sequence bans its last token where its beginning is said already.
        ban = SamplingParams(temperature=0.0, bad_words_ids=((held[0], first), (best[5], best[4])))
        assert logit_gap(llm, prompt, held, ban, best[2], first) == math.inf
        assert logit_gap(llm, prompt, held, ban, best[2], best[4]) < math.inf
        assert logit_gap(llm, prompt, [best[5]], ban, best[2], best[4]) == math.inf
        # Noise of a seed takes part: what it draws is what it draws.
        seeded = SamplingParams(temperature=1.0, seed=7, max_new_tokens=4)
        drawn = llm.generate([prompt], seeded)[0].token_ids
        gap = logit_gap(llm, prompt, drawn[:2], seeded, drawn[2], 99)
        assert TIE_GAP < gap < math.inf


class RoundingEngine:
    """Stands for an LLM in half precision: what it says at place 2 depends on the batch.

    ``by_cache``: or on whether its caches are empty.
    """

    def __init__(
        self,
        spoil: int = ENDED,
        refuse: str = "",
        fail: bool = False,
        plain: tuple[str, int, int] = ("", 0, 0),
        by_cache: bool = False,
    ) -> None:
        self.info = SimpleNamespace(max_running_requests=8, dtype="bfloat16", eos_ids=(0,))
        self.spoil, self.refuse, self.fail = spoil, refuse, fail
        self.message, self.status, self.least = plain
        self.by_cache, self.empty = by_cache, False

    def flush_cache(self) -> None:
        self.empty = True

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(steps=0)

    def generate(
        self, prompts: Sequence[list[int]], params: Any, speculative: bool
    ) -> list[GenerationResult]:
        if isinstance(params, SamplingParams):  # a probe of a gap: 3 loses against 4 at 0.2
            rise = params.logit_bias.get(4, 0.0) - params.logit_bias.get(3, 0.0)
            more = params.logit_bias.get(9, 0.0)
            token = 9 if more > 0.9 else 4 if rise > 0.2 else 3
            return [_result(prompts[0], [token])]
        if any(one.min_p for one in params) and self.refuse:
            raise RefusedError(Refused("min_p", self.refuse))
        if self.message and not speculative and params[0].min_p and len(prompts) >= self.least:
            raise RequestFailed(self.message, self.status)
        if speculative and self.fail:
            raise RequestFailed("the row has no token")
        odd = self.empty if self.by_cache else len(prompts) > 2
        self.empty = False
        tokens = [1, 2, 4 if odd and not speculative else 3, 5]
        if speculative and self.spoil != ENDED:
            tokens[2] = self.spoil
        return [_result(prompt, tokens) for prompt in prompts]


def _result(prompt: Sequence[int], tokens: Sequence[int]) -> GenerationResult:
    one = Completion(0, str(tokens), tuple(tokens), "length", None, {"id": "r"}, ())
    return GenerationResult(tuple(prompt), len(prompt), (one,))


def matrix_of(engine: RoundingEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    keep(monkeypatch, "greedy", "min_p")
    tokenizer: Any = SimpleNamespace(decode=str, token_text=str)
    llm: Any = engine
    return Matrix(llm, tokenizer, EngineConfig(model="m"), [[7], [8], [9]], 4).rows()


@pytest.mark.parametrize(("spoil", "status"), [(ENDED, "exact"), (4, "rounding"), (9, "failed")])
def test_half_precision_may_round_as_far_as_plain_decoding_does(
    spoil: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(matrix_of(RoundingEngine(spoil), monkeypatch))
    assert {cell.status for row in rows for cell in row.cells} == {status}
    if status == "rounding":
        assert rows[0].cells[0].gap == pytest.approx(0.2, rel=0.06)
        assert "within rounding (0.2" in row_lines(rows[0])


@pytest.mark.parametrize(("spoil", "status"), [(4, "rounding"), (9, "failed")])
def test_half_precision_may_round_as_plain_decoding_does_with_empty_caches(
    spoil: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts meet such caches at their first batch size."""
    rows = list(matrix_of(RoundingEngine(spoil, by_cache=True), monkeypatch))
    assert {cell.status for row in rows for cell in row.cells} == {status}


def test_refusals_and_errors_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy, min_p = matrix_of(RoundingEngine(refuse="cannot be had", fail=True), monkeypatch)
    assert {cell.status for cell in greedy.cells} == {"failed"}
    words = "batch 8: served without drafts, but with them: the row has no token"
    assert words in row_lines(greedy)
    assert {cell.status for cell in min_p.cells} == {"refused"}
    assert row_lines(min_p).count("cannot be had") == 1


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    ("status", "called"), [(500, "failed"), (400, "refused"), (413, "refused"), (501, "refused")]
)
def test_an_error_of_plain_decoding_is_no_refusal(
    status: int, called: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch 8: one that comes while it is found out how far rounding goes."""
    engine = RoundingEngine(plain=("the logits are NaN", status, batch))
    greedy, min_p = matrix_of(engine, monkeypatch)
    assert {cell.status for cell in greedy.cells} == {"exact"}
    assert {cell.status for cell in min_p.cells} == {called}
    words = "without drafts: the logits are NaN" if called == "failed" else "the logits are NaN"
    assert words in row_lines(min_p)


def test_a_refusal_by_a_core_that_is_gone_is_a_failure() -> None:
    gone = RefusedError(Refused("core", "has died", 503))
    assert unserved(1, gone).status == lost(1, gone).status == "failed"
    assert unserved(1, RefusedError(Refused("min_p", "no"))).status == "refused"


@pytest.mark.parametrize(
    ("error", "called"),
    [
        (RequestFailed("two_back: no token is left", 400), "failed"),
        (RequestFailed("not with this drafter", 501), "failed"),  # it had begun
        (RefusedError(Refused("min_p", "must be below 1")), "failed"),
        (RefusedError(Refused("min_p", "not with this drafter", 501)), "refused"),
    ],
)
def test_what_drafts_alone_cannot_serve_is_a_failure(error: Any, called: str) -> None:
    cell = lost(8, error)
    assert cell.status == called
    if cell.failure is not None:
        assert cell.failure.found == f"served without drafts, but with them: {error}"


def test_where_sequences_part() -> None:
    def gap(position: int, expected: int, got: int) -> float:
        return position + expected / 10 + got / 100

    assert first_divergence("a", [1, 2], [1, 2], gap) is None
    assert first_divergence("a", [1, 2, 3], [1, 5, 3], gap) == Divergence("a", 1, 2, 5, 1.25)
    shorter = first_divergence(3, [1, 2], [1], gap)
    assert shorter == Divergence(3, 1, 2, ENDED, math.inf)
    assert not shorter.tie


def test_equal_tokens_may_still_differ() -> None:
    request = Request(4, [1], SamplingParams())
    one, other = (_result([1], [5, 6]).outputs[0] for _ in range(2))
    cut = Completion(0, one.text[:-1], one.token_ids, "stop", "x", one.meta_info, ())
    assert list(partings([request], [(one,)], [(other,)])) == []
    [parting] = partings([request], [(one,)], [(cut,)])
    cell = judge_outputs(1, [parting], None, Limits(), lambda _: math.inf, str)
    assert cell.failure is not None
    assert (cell.failure.prompt, cell.failure.position) == (4, 2)
    assert "not the finish reason" in cell.failure.found
    assert deviation([request], [(one,)], [(other,)]) is None


@pytest.mark.parametrize(
    ("size", "limit", "status"), [(5e-5, 1e-4, "exact"), (0.02, 0.03, "rounding"), (1, 0, "failed")]
)
def test_log_probabilities_are_compared(size: float, limit: float, status: str) -> None:
    found = Deviation(size, Request(0, [1], SamplingParams()), 0, (1, 2))
    none: list[Parting] = []
    assert judge_outputs(8, none, found, Limits(0, limit), lambda _: 0.0, str).status == status


def test_log_probabilities_of_prompts_are_compared() -> None:
    def entry(value: float) -> TokenLogprobs:
        return TokenLogprobs(token=3, value=value, rank=1, top_ids=b"", top_values=b"")

    def answer(*values: float) -> Completion:
        return replace(_result([1], [5]).outputs[0], prompt_logprobs=tuple(map(entry, values)))

    request = Request(2, [1, 3, 3], SamplingParams(prompt_logprobs=0))
    wanted: Answers = [(answer(-1.0, -2.0),)]
    found = deviation([request], wanted, [(answer(-1.0, -2.5),)])
    assert found is not None
    cell = judge_outputs(1, [], found, Limits(), lambda _: 0.0, str)
    assert cell.failure is not None
    assert (cell.failure.prompt, cell.failure.position, cell.failure.output) == (2, 0, ())
    assert "of the prompt's token 2 0.5 apart" in cell.failure.found
    [parting] = partings([request], wanted, [(answer(-1.0),)])
    assert "number of prompt_logprobs" in parting.words


def test_chi_square_finds_another_distribution() -> None:
    for freedom, square in ((1, 3.841459), (2, 5.991465), (5, 11.0705), (10, 18.30704)):
        assert chi_square_tail(square, freedom) == pytest.approx(0.05, rel=1e-5)
    assert chi_square_tail(0.0, 3) == 1.0
    assert same_law([(100, 104), (50, 46), (30, 31)]) > 0.5
    assert same_law([(100, 150), (50, 20), (30, 10)]) < 1e-4
    assert same_law([(256, 256)]) == 1.0


def test_a_shift_of_a_drawn_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.frontend.lossless.cells import judge_draws

    request = Request(0, [1], SamplingParams())

    def some(often: int) -> list[tuple[Completion, ...]]:
        return [_result([1], [1, 2 if i < often else 3, 4]).outputs for i in range(100)]

    found = list(draws.shifts([request], some(70), some(20)))
    cell = judge_draws(8, found, 12, str)
    assert cell.failure is not None
    assert (cell.failure.position, cell.failure.expected) == (0, 2)
    assert "drawn 70 times by plain decoding and 20 times with drafts" in cell.failure.found
    fine = judge_draws(8, list(draws.shifts([request], some(70), some(66))), 12, str)
    assert (fine.status, fine.p) == ("exact", 1.0)


def test_rare_pairs_share_cells_with_others_that_are_about_as_rare() -> None:
    """A flat law would be a single cell otherwise, which shows nothing."""
    flat = Counter({(i, 0): 4 for i in range(64)})
    cells = cells_of(flat, flat)
    assert cells == [(20, 20)] * 11 + [(36, 36)]
    assert sum(a for a, _ in cells) == 256
    peaked = Counter({(i, 0): 12 if i < 20 else 1 for i in range(36)})
    assert same_law(cells_of(flat, peaked)) < 1e-4
    assert cells_of(Counter({(1,): 3}), Counter({(1,): 2, (2,): 1})) == [(3, 3)]
    assert cells_of(Counter({(1,): 200, (2,): 3}), Counter({(1,): 198})) == [(203, 198)]


def test_traces_do_not_overwrite_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Recording(str(tmp_path)), Recording(str(tmp_path))
    assert first.path != second.path
    second.drop()
    assert first.path.exists()
    assert not second.path.exists()
    temporary = Recording(None)
    temporary.drop()
    assert not temporary.path.parent.exists()
    monkeypatch.setenv("OUTRIDER_TRACE", "x")
    with pytest.raises(UsageError, match="--traces"):
        Recording(None)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "--speculative-algorithm: name the drafter"),
        (("--speculative-algorithm", "NGRAM", "--simulate-accept-length", "2"), "forces what is"),
        (("--speculative-algorithm", "NGRAM", "--skip-tokenizer-init"), "needs the tokenizer"),
        (("--speculative-algorithm", "NGRAM", "--prompts", "/nowhere"), "--prompts: cannot read"),
        (("--speculative-algorithm", "NGRAM", "--json", "/nowhere/x"), "--json: cannot write"),
        (("--speculative-algorithm", "NGRAM", "--traces", "/dev/null/x"), "--traces: cannot"),
        (("--draft", "/nowhere"), "speculative_draft_model_path"),
        (
            ("--speculative-algorithm", "NGRAM", "--logits-processor-args", '{"typo": {}}'),
            "logits_processor_args: 'typo' is not loaded (loaded: none); load it with",
        ),
        (
            ("--speculative-algorithm", "NGRAM", "--logits-processor-args", "{}"),
            "--logits-processor-args: names no processor",
        ),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(
    args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(*args) == 2
    assert words in capsys.readouterr().err


def test_check_alone_names_what_can_be_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["check"])
    assert exit_.value.code == 2
    assert "outrider check lossless" in capsys.readouterr().err


def test_custom_logits_processors_are_rows_too(
    few: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pure one is exact; one that depends on how often it was asked is not."""
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    keep(monkeypatch, "greedy")
    flags = ["--speculative-algorithm", "NGRAM", *few, "--json", "-", "--logits-processors"]
    flags += ["two_back,impure=example_processors:Impure", "--logits-processor-args"]

    def statuses(calls: str, status: int) -> dict[str, set[str]]:
        assert check(*flags, calls) == status
        rows = json.loads(capsys.readouterr().out)["rows"]
        return {row["feature"]: {cell["status"] for cell in row["cells"]} for row in rows}

    greedy, seeded = "logits_processors", "logits_processors, temperature"
    found = statuses('{"two_back": {"back": 4}}', 0)
    assert found == {"greedy": {"exact"}, greedy: {"exact"}, seeded: {"exact"}}
    found = statuses('{"impure": {}}', 1)
    assert found["greedy"] == {"exact"}
    assert found[greedy] == found[seeded] == {"failed"}
    assert check(*flags, "[1]") == 2
    assert "logits_processor_args: must be a JSON object" in capsys.readouterr().err
