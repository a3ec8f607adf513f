"""The served matrix: complete, sensitive, and its least part for every kind of drafter.

All of it is ``make exact``'s: benchmarks/served_matrix.py.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import served_matrix as matrix
import served_servers
from served_answers import CHAT, GENERATE, Answer, Ask, Counts, difference, joined
from served_cells import LEAST, ROWS, empty_known

from outrider.engine_core.capability import DRAFTERS
from outrider.engine_core.capability_table import SUPPORTED

LEAST_ROWS = [row for row in ROWS if row.feature in LEAST]


def test_every_field_of_every_feature_has_a_cell() -> None:
    """What is added to the capability table gets its requests in benchmarks/served_cells.py."""
    asked = {row.feature: row.asks(empty_known()) for row in ROWS}
    assert len(asked) == len(ROWS)
    for feature in SUPPORTED:
        assert feature.feature in asked, feature.feature
        fields = set().union(*(ask.fields for ask in asked[feature.feature]))
        assert set(feature.fields) <= fields, feature.feature
    table = {feature.feature: set(feature.fields) for feature in SUPPORTED}
    for row in ROWS:
        assert row.same | row.free <= table.get(row.feature, set()), row.feature
    assert set(LEAST) <= asked.keys()


def test_every_drafter_is_tried() -> None:
    tried = {name: algorithm for name, (algorithm, _) in served_servers.DRAFTERS.items()}
    assert set(tried.values()) == set(DRAFTERS.values())
    assert {tried[name] for name in served_servers.CHAINS} == set(DRAFTERS.values())


@pytest.mark.parametrize(
    ("got", "place"),
    [
        ({"text": "ab", "n": [{"v": -0.5, "t": 3}]}, ""),
        ({"text": "ac", "n": [{"v": -0.5, "t": 3}]}, ".text"),
        ({"text": "ab", "n": [{"v": -0.5, "t": 4}]}, ".n[0].t"),
        ({"text": "ab", "n": [{"v": -0.5, "t": 3}, {}]}, ".n: length"),
        ({"text": "ab", "n": [{"v": None, "t": 3}]}, ".n[0].v"),
        ({"text": "ab", "n": [{"t": 3}]}, ".n[0]"),
        ({"text": "ab"}, ""),
    ],
)
def test_a_difference_is_found(got: dict[str, object], place: str) -> None:
    expected = {"text": "ab", "n": [{"v": -0.5, "t": 3}], "id": "x", "spec_verify_ct": 4}
    found, gap = difference(Answer(200, expected), Answer(200, got))
    equal = got == {"text": "ab", "n": [{"v": -0.5, "t": 3}]}
    assert (found is None, gap) == (equal, 0.0)
    assert found is None or found.place == place


def test_numbers_may_differ_and_it_is_said_by_how_much() -> None:
    found, gap = difference(Answer(200, [-0.5, -1.0]), Answer(200, [-0.25, -1.0]))
    assert (found, gap) == (None, 0.25)
    assert difference(Answer(200, [1]), Answer(400, [1]))[0] is not None
    assert difference(Answer(200, 1), Answer(200, True))[0] is not None


def test_a_field_is_taken_out_wherever_it_stands() -> None:
    ask = Ask(GENERATE, {"seed": 1, "sampling_params": [{"seed": 1, "n": 2}, {"seed": 3}]})
    assert ask.fields == {"seed", "sampling_params", "n"}
    assert ask.without("seed").body == {"sampling_params": [{"n": 2}, {}]}
    assert ask.without("sampling_params").body == {"seed": 1}


def test_a_stream_is_put_together() -> None:
    def chunk(delta: dict[str, object], ids: list[int], finish: str | None) -> dict[str, object]:
        choice = {"index": 0, "delta": delta, "token_ids": ids, "finish_reason": finish,
                  "logprobs": {"content": ids}}  # fmt: skip
        return {"id": "a", "choices": [choice], "usage": None}

    whole = joined(
        CHAT,
        [
            chunk({"role": "assistant", "content": ""}, [], None),
            chunk({"content": "a"}, [1], None),
            chunk({}, [2, 3], "stop"),
            {"choices": [], "usage": {"total_tokens": 4}},
        ],
    )
    [choice] = whole["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "a"},
        "token_ids": [1, 2, 3],
        "logprobs": {"content": [1, 2, 3]},
        "finish_reason": "stop",
    }
    assert whole["usage"] == {"total_tokens": 4}
    parts: list[dict[str, object]] = [
        {"id": "c", "function": {"name": "f", "arguments": ""}},
        {"function": {"arguments": "1"}},
        {"function": {"arguments": "2"}},
    ]
    calls = [chunk({"tool_calls": [{"index": 0, **part}]}, [], None) for part in parts]
    [choice] = joined(CHAT, calls)["choices"]
    function = {"name": "f", "arguments": "12"}
    assert choice["message"]["tool_calls"] == [{"index": 0, "id": "c", "function": function}]
    assert joined(GENERATE, [{"text": "a"}, {"text": "ab"}]) == {"text": "ab"}


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    with served_servers.chat_tokenizer() as folder:
        yield folder


@pytest.fixture(scope="module")
def reference(template: Path) -> Iterator[tuple[matrix.Plain, list[str]]]:
    """Plain answers, and the fields that do nothing to them."""
    with served_servers.server(None, template) as url:
        known = matrix.plain(url, LEAST_ROWS)
        yield known, matrix.idle_fields(url, known, SUPPORTED)


@pytest.mark.serial
def test_every_field_changes_plain_answers(reference: tuple[matrix.Plain, list[str]]) -> None:
    assert reference[1] == []


@pytest.mark.serial
@pytest.mark.parametrize("drafter", served_servers.CHAINS)
def test_drafts_change_no_answer(
    drafter: str, template: Path, reference: tuple[matrix.Plain, list[str]]
) -> None:
    with served_servers.server(drafter, template) as url:
        cells = matrix.drafted(url, drafter, reference[0], crowd=False)
        refused = matrix.refusals(url, drafter)
    assert [cell.feature for cell in cells] == [row.feature for row in LEAST_ROWS]
    for cell in cells:
        assert (cell.status, cell.wrong) == ("exact", []), cell
        assert cell.alone.draft_tokens > cell.alone.accepted > 0, cell
        assert cell.tokens > 50, cell
    assert {cell.status for cell in refused} == {"refused"}, refused


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"output_ids": [1, 5], "value": -0.5}, "request 0.output_ids[1]: expected 2, got 5"),
        ({"output_ids": [1, 2], "value": -0.4}, "request 0: log-probabilities 0.1 apart"),
    ],
)
def test_a_run_that_differs_is_told(
    given: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell fails, and says where, if answers are not those of plain decoding."""
    row = next(row for row in ROWS if row.feature == "logit_bias")
    asks = row.asks(empty_known())
    wanted = [Answer(200, {"output_ids": [1, 2], "value": -0.5})] * len(asks)
    answer = Answer(200, given)
    seen = iter(range(10))
    monkeypatch.setattr(matrix, "counts", lambda url: Counts(*[next(seen)] * 4))
    monkeypatch.setattr(matrix, "ask", lambda url, some, at_once=1: [answer for _ in some])
    [cell] = matrix.drafted("", "NGRAM", matrix.Plain([row], [asks], [wanted]))
    assert cell.status == "FAILED"
    assert cell.wrong[0] == words
    assert cell.wrong[-1].startswith("in the crowd, request")
    assert len(cell.wrong) == 2 * len(asks)


@pytest.mark.parametrize(
    ("feature", "accepted", "words"),
    [
        ("logit_bias", 0, "no draft was accepted"),
        ("logit_bias", 3, None),
        ("speculation switch", 0, "3 rows had drafts"),
    ],
)
def test_a_run_without_drafts_shows_nothing(
    feature: str, accepted: int, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = next(row for row in ROWS if row.feature == feature)
    asks = row.asks(empty_known())
    answers = [Answer(200, {"output_ids": [1]})] * len(asks)
    seen = iter((Counts(), Counts(3, 9, accepted)))
    monkeypatch.setattr(matrix, "counts", lambda url: next(seen))
    monkeypatch.setattr(matrix, "ask", lambda url, some, at_once=1: answers)
    [cell] = matrix.drafted("", "NGRAM", matrix.Plain([row], [asks], [answers]), crowd=False)
    assert cell.wrong == ([] if words is None else [words])
    assert cell.status == ("exact" if words is None else "FAILED")
