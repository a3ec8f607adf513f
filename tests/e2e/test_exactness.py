"""Greedy exactness, small: the covering array on 8 prompts; ``make exact`` runs all 144."""

import itertools

import exactness
import exactness_gpu
import pytest

from outrider.engine_core.config import refuse_config
from outrider.engine_core.divergence import Divergence
from outrider.engine_core.refusal import Refused
from outrider.engine_core.sps_table import AdditiveTable, read_sps


@pytest.fixture(scope="module")
def prompts() -> list[exactness.Prompt]:
    return exactness.load_prompts(limit=8, max_tokens=40)


def test_covering_array_covers_every_pair() -> None:
    rows = exactness.covering_array(exactness.FACTORS)
    assert len(rows) <= 12
    for a, b in itertools.combinations(exactness.FACTORS, 2):
        wanted = set(itertools.product(exactness.FACTORS[a], exactness.FACTORS[b]))
        assert {(row[a], row[b]) for row in rows} == wanted


def test_a_difference_is_found_and_its_gap_decides() -> None:
    prompts = [exactness.Prompt("p", [1, 2], 3)]
    gaps: list[tuple[list[int], int, int]] = []

    def gap(prefix: object, a: int, b: int) -> float:
        gaps.append((list(prefix), a, b))  # type: ignore[call-overload]
        return 0.5

    found = exactness.divergences(prompts, {"p": [5, 6, 7]}, {"p": [5, 9, 7]}, gap)
    assert gaps == [([1, 2, 5], 6, 9)]
    assert [(d.position, d.expected, d.got, d.tie) for d in found] == [(1, 6, 9, False)]
    assert exactness.divergences(prompts, {"p": [5, 6, 7]}, {"p": [5, 6]}, gap)[0].tie is False
    assert Divergence("p", 0, 1, 2, -1e-5).tie


def test_greedy_output_is_the_same_with_and_without_speculation(
    prompts: list[exactness.Prompt],
) -> None:
    gap = exactness.float64_gap()
    verified = ties = tokens = 0
    for record in exactness.matrix(prompts, gap, cases=exactness.short_cases()):
        if "reference" in record:
            continue
        assert record["failures"] == 0, record["differences"]
        ties += int(str(record["ties"]))
        tokens += int(str(record["tokens"]))
        verified += int(str(record["verify_steps"]))
    assert ties <= exactness.MAX_TIE_SHARE * tokens
    assert verified > 500


def test_greedy_output_equals_transformers(prompts: list[exactness.Prompt]) -> None:
    few = prompts[:4]
    base = {"batch": 1, "overlap": 0, "page_size": 16, "chunk": 512}
    ours, _ = exactness.run_config(exactness.config_of(base, None), few)
    theirs = exactness.transformers_greedy(few)
    found = exactness.divergences(few, ours, theirs, exactness.float64_gap())
    assert not [d for d in found if not d.tie]


def test_a_second_pass_and_aborts_change_nothing(prompts: list[exactness.Prompt]) -> None:
    few = prompts[:4]
    case = exactness_gpu.Case(exactness.Speculation("EAGLE3", exactness.TREE), 2, 1)
    config = exactness_gpu.engine_config(case, "cpu", "float32")
    plain, _ = exactness.run_config(
        exactness_gpu.engine_config(exactness_gpu.PLAIN, "cpu", "float32"), few
    )
    outputs, figures = exactness.run_passes(config, few, 2, aborts=3)
    gap = exactness.float64_gap()
    found = [d for each in outputs for d in exactness.divergences(few, plain, each, gap)]
    assert not [d for d in found if not d.tie]
    assert figures["aborts"] >= 3
    # The second pass finds all but the last page.
    assert figures["cached_tokens"] > sum(len(prompt.tokens) - 32 for prompt in few)


@pytest.mark.parametrize("few", [False, True])
def test_every_part_compares_with_plain_decoding_at_both_batches(few: bool) -> None:
    for part in exactness_gpu.PARTS:
        cases = exactness_gpu.chosen_cases([part], few, "cuda")
        assert cases[:2] == [exactness_gpu.PLAIN, exactness_gpu.WIDE]
        assert len(set(cases)) == len(cases)
    drafts = exactness_gpu.chosen_cases(["drafts", "blocks"], few, "cuda")
    wanted = {some for some in exactness.speculations() if some not in (None, exactness_gpu.NGRAM)}
    assert wanted <= {case.speculation for case in drafts}
    sources = {case.source for case in exactness_gpu.chosen_cases(["ngram"], few, "cuda")}
    assert sources == {"cpu", "gpu", "both"}
    assert {c.source for c in exactness_gpu.chosen_cases(["ngram"], few, "cpu")} == {"cpu"}


def test_block_drafts_take_part_once_they_are_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "embedded", lambda algorithm: True)
    names = [some.name for some in exactness.speculations() if some is not None]
    wanted = ["DFLASH", "DSPARK", "DSPARK-cap-accept", "DSPARK-compact"]
    assert names[-4:] == wanted
    cases = exactness_gpu.chosen_cases(["blocks"], False, "cuda")
    assert {c.speculation.name for c in cases if c.speculation} == set(wanted)
    few = exactness_gpu.chosen_cases(["blocks"], True, "cuda")
    assert [c.speculation.name for c in few if c.speculation] == wanted
    for case in few[2:]:
        config = exactness_gpu.engine_config(case, "cuda", "bfloat16")
        assert not isinstance(refuse_config(config), Refused)
    assert isinstance(read_sps(str(exactness.DEAR)), AdditiveTable)


def test_a_draft_that_is_not_there_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "embedded", lambda algorithm: False)
    assert [some and some.name for some in exactness.speculations()] == [None, "NGRAM"]
