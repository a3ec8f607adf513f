"""Committing runs: equal to one token at a time, to a whole-text reference, and to hand counts."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine_core.commit import (
    LENGTH,
    Progress,
    commit_row,
    commit_token,
    kept_drafts,
)
from outrider.engine_core.ids import RowKind
from outrider.engine_core.messages import FinishReason
from outrider.engine_core.plan import TokenLogprobs
from outrider.engine_core.sampling_params import SamplingParams

from ..reference.stop_rule import end_of_request
from .byte_tail import EOS, PIECES, ByteTail, whole_text

FAST = settings(max_examples=400, derandomize=True, deadline=None)
STOPS = ("a", "ab", "bca", "é", "日", "c\n", "abcabcabcabcabc", "<end>", "end", "b日", "x x")


def logprob(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, b"", b"")


def progress(params: SamplingParams, prompt_len: int = 4, max_total: int = 1000) -> Progress:
    return Progress(params, prompt_len, max_total, EOS, ByteTail())


@st.composite
def requests(draw: st.DrawFn) -> tuple[SamplingParams, int, list[int]]:
    cap = draw(st.integers(0, 30))
    params = SamplingParams(
        max_new_tokens=cap,
        min_new_tokens=draw(st.integers(0, min(cap, 8))),
        stop=tuple(draw(st.lists(st.sampled_from(STOPS), max_size=3))),
        stop_token_ids=tuple(draw(st.lists(st.integers(4, 8), max_size=2))),
        ignore_eos=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
        logprobs=draw(st.sampled_from((None, 0))),
    )
    often = st.sampled_from((0, 1, 2, 3, 9, 10, 11, 12, 13, 2, 7, 15))
    tokens = draw(st.lists(often | st.integers(0, len(PIECES) - 1), min_size=1, max_size=40))
    return params, draw(st.integers(10, 60)), tokens


def split(data: st.DataObject, tokens: list[int]) -> list[list[int]]:
    runs, at = [], 0
    while at < len(tokens):
        length = data.draw(st.integers(1, 9))
        runs.append(tokens[at : at + length])
        at += length
    return runs


def test_any_split_equals_one_at_a_time_and_the_whole_text() -> None:
    seen: Counter[str] = Counter()

    @FAST
    @given(requests(), st.data())
    def check(request: tuple[SamplingParams, int, list[int]], data: st.DataObject) -> None:
        params, max_total, tokens = request
        single = progress(params, max_total=max_total)
        for token in tokens:
            commit_token(single, token, logprob(token))
        by_run = progress(params, max_total=max_total)
        runs = split(data, tokens)
        kept = []
        for run in runs:
            extra = data.draw(st.integers(0, 3))
            rows = [logprob(token) for token in run] if params.logprobs is not None else []
            proposed = len(run) - 1 + extra
            kept.append(commit_row(by_run, run, RowKind.VERIFY, proposed, rows))
        assert by_run.tokens == single.tokens
        assert by_run.finish == single.finish
        assert by_run.logprobs == single.logprobs
        assert sum(kept) == len(by_run.tokens)
        count, kind, matched = end_of_request(
            tokens,
            cap=min(params.max_new_tokens, max_total - 4),
            min_tokens=params.min_new_tokens,
            stop_ids=single.stop_ids,
            stops=params.stop,
            text=lambda part: whole_text(part, params.skip_special_tokens),
        )
        assert list(single.tokens) == tokens[:count]
        found = single.finish
        assert (found and (found.kind, found.matched)) == (kind and (kind, matched))
        seen[kind or "open"] += 1
        seen["by string"] += isinstance(matched, str)
        seen["by id"] += isinstance(matched, int)
        seen["inside a run"] += any(0 < k < len(r) for k, r in zip(kept, runs, strict=True))

    check()
    for path in ("open", "length", "by string", "by id", "inside a run"):
        assert seen[path] >= 20, seen


@FAST
@given(requests(), st.data())
def test_counters_are_hand_counts(
    request: tuple[SamplingParams, int, list[int]], data: st.DataObject
) -> None:
    params, max_total, tokens = request
    done = progress(params, max_total=max_total)
    verify = correct = emitted = proposals = plain = 0
    for run in split(data, tokens):
        proposed = len(run) - 1 + data.draw(st.integers(0, 3))
        over = done.finish is not None
        before = len(done.tokens)
        commit_row(done, run, RowKind.VERIFY, proposed, [logprob(t) for t in run])
        kept = len(done.tokens) - before
        if over:
            assert kept == 0
        elif proposed == 0:
            plain += 1
        else:
            verify += 1
            emitted += kept
            proposals += proposed
            correct += kept if kept < len(run) else kept - 1
    stats = done.stats()
    assert stats.verify_ct == verify
    assert stats.verify_tokens == emitted
    assert stats.correct_drafts == correct
    assert stats.proposed_drafts == proposals
    assert stats.plain_ct == plain
    assert sum(stats.histogram) == verify
    assert sum(j * n for j, n in enumerate(stats.histogram)) == correct
    assert correct <= proposals
    assert stats.completion_tokens == len(done.tokens)
    assert verify == 0 or emitted / verify <= 10


def test_a_stop_inside_a_run_that_crosses_the_cap_is_a_stop() -> None:
    params = SamplingParams(max_new_tokens=5, stop_token_ids=(5,), ignore_eos=True)
    inside = progress(params)
    assert commit_row(inside, [0, 1, 5, 2, 3, 4], RowKind.VERIFY, 5, ()) == 3
    assert inside.finish == FinishReason("stop", matched=5)
    assert (inside.verify_tokens, inside.correct_drafts, inside.histogram) == (3, 3, [0, 0, 0, 1])
    beyond = progress(params)
    assert commit_row(beyond, [0, 1, 2, 2, 3, 5], RowKind.VERIFY, 5, ()) == 5
    assert beyond.finish == LENGTH


def test_eos_as_the_last_allowed_token_is_a_stop() -> None:
    last = progress(SamplingParams(max_new_tokens=3))
    assert commit_row(last, [0, 0, 8, 0], RowKind.VERIFY, 3, ()) == 3
    assert last.finish == FinishReason("stop", matched=8)


def test_the_context_caps_as_max_new_tokens_does() -> None:
    short = progress(SamplingParams(max_new_tokens=100), prompt_len=4, max_total=6)
    assert short.room == 2
    assert commit_row(short, [0, 0, 0], RowKind.VERIFY, 2, ()) == 2
    assert (short.finish, short.total_len, short.room) == (LENGTH, 6, 0)


def test_no_tokens_asked_for_keeps_none() -> None:
    none = progress(SamplingParams(max_new_tokens=0))
    assert commit_row(none, [3], RowKind.PREFILL_LAST, 0, ()) == 0
    assert none.finish == LENGTH
    assert not none.tokens


def test_no_stop_before_min_new_tokens_and_the_first_legal_one_ends() -> None:
    """EOS, stop ids and stop strings are legal from token min + 1 on, however runs are cut."""
    params = SamplingParams(max_new_tokens=50, min_new_tokens=4, stop=("ab",), stop_token_ids=(7,))
    held = progress(params)
    assert commit_row(held, [3, 8, 7, 0], RowKind.VERIFY, 3, ()) == 4
    assert held.finish is None
    assert commit_row(held, [1], RowKind.VERIFY, 0, ()) == 1
    assert held.finish == FinishReason("stop", matched="ab"), "it completes at token 5"
    past = progress(params)
    assert commit_row(past, [2, 2, 2, 3, 2, 2, 2], RowKind.VERIFY, 6, ()) == 7
    assert past.finish is None, "the string at token 4 is text, and stays text"


def test_a_finished_request_counts_nothing_more() -> None:
    done = progress(SamplingParams(max_new_tokens=5))
    done.end(FinishReason("abort", message="client"))
    done.end(LENGTH)
    before = done.stats()
    assert commit_row(done, [0, 0], RowKind.VERIFY, 1, ()) == 0
    assert commit_token(done, 0, None) == FinishReason("abort", message="client")
    assert done.stats() == before


def test_the_prefill_token_counts_in_no_accept_length() -> None:
    start = progress(SamplingParams(max_new_tokens=5))
    assert commit_row(start, [], RowKind.PREFILL, 0, ()) == 0
    assert commit_row(start, [0], RowKind.PREFILL_LAST, 0, ()) == 1
    stats = start.stats()
    assert (stats.verify_ct, stats.plain_ct, stats.verify_tokens) == (0, 0, 0)
    assert stats.completion_tokens == 1


@pytest.mark.parametrize(
    ("run", "kind", "proposed"),
    [
        ([], RowKind.VERIFY, 0),
        ([1, 1], RowKind.VERIFY, 0),
        ([1], RowKind.PREFILL, 0),
        ([], RowKind.PREFILL_LAST, 0),
        ([1], RowKind.PREFILL_LAST, 2),
    ],
)
def test_results_that_break_the_contract(run: list[int], kind: RowKind, proposed: int) -> None:
    with pytest.raises(ValueError, match="cannot emit"):
        commit_row(progress(SamplingParams()), run, kind, proposed, ())


def test_logprobs_must_be_there_and_belong() -> None:
    wanted = progress(SamplingParams(logprobs=0))
    with pytest.raises(ValueError, match="token 1"):
        commit_row(wanted, [1], RowKind.VERIFY, 0, ())
    with pytest.raises(ValueError, match="token 1"):
        commit_row(wanted, [1], RowKind.VERIFY, 0, [logprob(2)])
    assert not wanted.tokens
    unwanted = progress(SamplingParams())
    commit_row(unwanted, [1], RowKind.VERIFY, 0, [logprob(1)])
    assert not unwanted.logprobs


def test_take_new_gives_each_token_once() -> None:
    going = progress(SamplingParams(logprobs=0))
    commit_row(going, [1, 2], RowKind.VERIFY, 1, [logprob(1), logprob(2)])
    tokens, logprobs = going.take_new()
    assert tokens == going.tokens.tobytes()
    assert [entry.token for entry in logprobs] == [1, 2]
    assert going.take_new() == (b"", ())
    commit_row(going, [3], RowKind.VERIFY, 0, [logprob(3)])
    assert going.take_new() == (going.tokens[2:].tobytes(), (logprob(3),))


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        Progress(SamplingParams(stop=("a",)), 1, 10, EOS, None)


def test_kept_drafts() -> None:
    assert [kept_drafts(kept, 4) for kept in (1, 2, 3, 4)] == [1, 2, 3, 3]
