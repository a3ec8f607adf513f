"""One rule of the scheduler at a time."""

from typing import Any

import numpy as np
import pytest

from outrider.engine_core import admission
from outrider.engine_core.admission import FLOOR_RATIO, INITIAL_RATIO, NewTokenRatio
from outrider.engine_core.checks import check_all
from outrider.engine_core.commit import Progress
from outrider.engine_core.controller import NO_MATCH, NO_ROOM, OFF_BY_REQUEST, LengthController
from outrider.engine_core.core import EngineCore
from outrider.engine_core.fast_rows import note_reason
from outrider.engine_core.host_drafter import HostProposal
from outrider.engine_core.ids import I32, RequestId, RowKind, i32
from outrider.engine_core.intake import derive_seed
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.plan import StepPlan, StepResult
from outrider.engine_core.request import Draining
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.scheduler import Committed
from outrider.engine_core.step_builder import Flight
from outrider.engine_core.step_times import StepTimes

from .core_fixtures import Got, assert_all_pages_back, expected, make_core, request, run_all, take
from .fake_worker import FakeWorker

NGRAM: dict[str, Any] = {"speculative_algorithm": "NGRAM"}


def record_plans(core: EngineCore) -> list[StepPlan]:
    """Every plan that the core launches from now on."""
    plans: list[StepPlan] = []
    launch = core._worker.launch

    def recording(plan: StepPlan) -> None:
        plans.append(plan)
        launch(plan)

    core._worker.launch = recording  # type: ignore[method-assign]
    return plans


def submit(core: EngineCore, *messages: GenerateRequest) -> None:
    for message in messages:
        assert core.submit(message) is None


def chunks(plan: StepPlan) -> dict[int, int]:
    """Prefill tokens by slot."""
    lengths = i32(plan.q_caps)
    return {
        int(slot): int(lengths[row])
        for row, slot in enumerate(i32(plan.slots))
        if plan.kinds[row] != RowKind.VERIFY
    }


# --- chunked prefill ---


def test_the_chunk_budget_is_shared_and_decode_rows_ride_along() -> None:
    core = make_core(FakeWorker(), chunked_prefill_size=10, disable_overlap_schedule=True)
    plans = record_plans(core)
    submit(core, request("a", range(1, 5), 20, ignore_eos=True))
    core.step()
    submit(core, request("b", range(10, 22), 4), request("c", range(22, 40), 4))
    core.step()
    core.step()
    assert [sum(chunks(plan).values()) for plan in plans] == [4, 10, 10]
    slots_b, slots_c = list(chunks(plans[2]))
    assert chunks(plans[1]) == {slots_b: 10}
    assert chunks(plans[2]) == {slots_b: 2, slots_c: 8}
    assert [plan.kinds.count(RowKind.VERIFY) for plan in plans] == [0, 1, 1]
    assert list(plans[2].kinds) == [RowKind.VERIFY, RowKind.PREFILL_LAST, RowKind.PREFILL]
    run_all(core)


def test_without_chunks_a_prompt_is_one_row() -> None:
    core = make_core(FakeWorker(), chunked_prefill_size=-1)
    plans = record_plans(core)
    submit(core, request("a", range(1, 50), 2), request("b", range(1, 40), 2))
    core.step()
    assert sorted(chunks(plans[0]).values()) == [39, 49]
    run_all(core)


def test_no_new_tokens_only_fills_the_cache() -> None:
    worker = FakeWorker(page_size=4)
    core = make_core(worker, chunked_prefill_size=8)
    plans = record_plans(core)
    submit(core, request("a", range(1, 22), 0))
    got = run_all(core)["a"]
    assert got.tokens == []
    assert got.finish is not None
    assert (got.finish.kind, got.outputs) == ("length", 1)
    assert {kind for plan in plans for kind in plan.kinds} == {RowKind.PREFILL}
    submit(core, request("b", range(1, 22), 1))
    last = run_all(core)["b"].last
    assert last is not None
    assert last.stats is not None
    assert last.stats.cached_tokens == 20
    assert_all_pages_back(core)


# --- radix reuse ---


@pytest.mark.parametrize(("page_size", "hit"), [(1, 20), (4, 20), (16, 16)])
def test_a_prompt_seen_before_is_reused_but_for_its_last_token(page_size: int, hit: int) -> None:
    worker = FakeWorker(num_pages=256 // page_size, page_size=page_size)
    core = make_core(worker)
    plans = record_plans(core)
    submit(core, request("a", range(1, 22), 1))
    run_all(core)
    submit(core, request("b", range(1, 22), 3))
    got = run_all(core)["b"]
    assert got.last is not None
    assert got.last.stats is not None
    assert got.last.stats.cached_tokens == hit
    init = next(plan.inits[0] for plan in plans[1:] if plan.inits)
    assert init.cached_len == hit
    assert core.stats(1).cached_tokens == hit


def test_a_prompt_is_shared_while_its_first_request_still_runs() -> None:
    core = make_core(FakeWorker(page_size=4))
    submit(core, request("a", range(1, 22), 40, ignore_eos=True))
    for _ in range(3):
        core.step()
    submit(core, request("b", range(1, 22), 2))
    got = run_all(core)
    last = got["b"].last
    assert last is not None
    assert last.stats is not None
    assert last.stats.cached_tokens == 20


def test_generated_text_is_reused_and_tenants_are_not_mixed() -> None:
    worker = FakeWorker(page_size=4)
    core = make_core(worker)
    submit(core, request("a", range(1, 6), 12, ignore_eos=True))
    tokens = run_all(core)["a"].tokens
    follow_up = [*range(1, 6), *tokens, 7]
    submit(
        core, request("b", follow_up, 1), request("c", follow_up, 1, cache_salt="another tenant")
    )
    got = run_all(core)
    cached = [got[rid].last.stats.cached_tokens for rid in "bc"]  # type: ignore[union-attr]
    assert cached == [16, 0]  # the newest token has no KV


def test_the_cache_can_be_switched_off() -> None:
    core = make_core(FakeWorker(page_size=4), disable_radix_cache=True)
    for rid in "ab":
        submit(core, request(rid, range(1, 22), 3))
        run_all(core)
    stats = core.stats(0)
    assert stats.cached_tokens == 0
    assert stats.free_pages == stats.total_pages


def test_duplicates_of_a_prompt_stay_private() -> None:
    core = make_core(FakeWorker(page_size=4))
    submit(core, request("a", range(1, 22), 9), request("b", range(1, 22), 9))
    got = run_all(core)
    assert got["a"].tokens == got["b"].tokens
    assert_all_pages_back(core)


# --- memory ---


def test_retraction_takes_the_fewest_generated_then_the_longest_prompt() -> None:
    worker = FakeWorker(num_pages=40, page_size=1)
    core = make_core(worker, disable_overlap_schedule=True)
    core.scheduler.admission.ratio.value = 0.0
    submit(core, request("old", range(1, 4), 30, min_new_tokens=30))
    got: dict[str, Got] = {}
    take(got, core.step())
    take(got, core.step())
    core.scheduler.admission.ratio.value = 0.0
    submit(core, request("short", [5, 6], 6), request("long", [7, 8, 9, 10, 11, 12], 6))
    batch, retracted = core.scheduler.batch, list[str]()
    leave = batch.leave

    def recording(running: object) -> None:
        if running.request.progress.finish is None:  # type: ignore[attr-defined]
            retracted.append(running.request.rid)  # type: ignore[attr-defined]
        leave(running)  # type: ignore[arg-type]

    batch.leave = recording  # type: ignore[method-assign]
    take(got, core.step())
    # All that is left goes away, so that the next decode step finds too few pages.
    hole = core.scheduler.cache.alloc(core.scheduler.cache.available)
    assert hole is not None
    core._check = False
    take(got, core.step())
    core.scheduler.cache.free(hole)
    core._check = True
    run_all(core, got)
    assert retracted == ["long"]
    assert got["long"].last is not None
    assert got["long"].last.stats is not None
    assert got["long"].last.stats.retractions == 1
    for rid, prompt, count in (("old", range(1, 4), 30), ("short", [5, 6], 6)):
        message = request(rid, prompt, count, min_new_tokens=30 if rid == "old" else 0)
        assert got[rid].tokens == expected(message, 256, 50)[0]
    assert core.stats(0).retractions == len(retracted)


def test_a_single_request_that_cannot_fit_ends_with_an_error() -> None:
    core = make_core(FakeWorker(num_pages=32, page_size=1), disable_overlap_schedule=True)
    submit(core, request("a", range(1, 10), 20, ignore_eos=True))
    got: dict[str, Got] = {}
    take(got, core.step())
    stolen = core.scheduler.cache.alloc(core.scheduler.cache.available - 1)
    assert stolen is not None
    core._check = False
    for _ in range(4):
        take(got, core.step())
    finish = got["a"].finish
    assert finish is not None
    assert (finish.kind, finish.status) == ("abort", 500)
    assert "out of KV memory" in (finish.message or "")
    core.scheduler.cache.free(stolen)
    assert_all_pages_back(core)


def test_the_last_request_gives_up_its_copies_of_cached_pages_before_its_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 1)
    core = make_core(FakeWorker(num_pages=32, page_size=1))
    shorter = request("shorter", range(1, 15), 12, ignore_eos=True)
    copies = request("copies", range(1, 16), 16, ignore_eos=True)
    submit(core, shorter, copies)  # prefilled in one step: the second one's pages are copies
    got = run_all(core)
    for message in (shorter, copies):
        assert got[message.rid].tokens == expected(message, 256, 50)[0]
    last = got["copies"].last
    assert last is not None
    assert last.stats is not None
    assert last.stats.retractions > 0
    assert_all_pages_back(core)


def test_drafts_give_way_before_requests_do() -> None:
    worker = FakeWorker(num_pages=30, page_size=1)
    core = make_core(worker, **NGRAM)
    submit(core, request("a", range(1, 11), 20, ignore_eos=True))
    got = run_all(core)["a"]
    stats = got.last.stats if got.last else None
    assert stats is not None
    assert stats.retractions == 0
    assert core.scheduler.counters.shrunk_steps > 0
    assert stats.spec_off_reason == "no KV pages for drafts"
    assert len(got.tokens) == 20


def test_the_last_step_before_the_cap_does_not_hide_why_drafts_were_off() -> None:
    core = make_core(FakeWorker(num_pages=256), **NGRAM)
    drafter = core._drafts._drafter  # type: ignore[union-attr]
    propose = drafter.propose

    def nothing(slots: I32, caps: I32) -> HostProposal:
        return propose(slots, np.zeros_like(caps))

    drafter.propose = nothing  # type: ignore[method-assign]
    noted: list[int] = []
    commit = core.scheduler._apply_rows

    def noting(flight: Flight, result: StepResult) -> Committed:
        noted.extend(flight.reasons.tolist())
        return commit(flight, result)

    core.scheduler._apply_rows = noting  # type: ignore[method-assign]
    submit(core, request("short", [1, 2, 3], 2, ignore_eos=True))
    submit(core, request("long", range(1, 11), 30, ignore_eos=True))
    texts = {rid: one.last.stats for rid, one in run_all(core).items() if one.last}
    assert noted.count(NO_ROOM) == 2
    assert noted[-1] == NO_ROOM
    assert noted.count(NO_MATCH) > 20
    assert texts["short"] is not None
    assert texts["long"] is not None
    assert texts["short"].spec_off_reason == "no room for drafts before the length cap"
    assert texts["long"].spec_off_reason == "no match"


@pytest.mark.parametrize("early", [True, False])
def test_a_weak_reason_never_hides_another(early: bool) -> None:
    progress = Progress(SamplingParams(), 1, 10, frozenset(), None)
    for code in (NO_ROOM, NO_MATCH) if early else (NO_MATCH, NO_ROOM):
        note_reason(progress, code)
    note_reason(progress, 0)
    assert progress.spec_off_reason == "no match"
    note_reason(progress, OFF_BY_REQUEST)
    assert progress.spec_off_reason == "request switched it off"


def test_the_new_token_ratio_falls_and_jumps() -> None:
    ratio = NewTokenRatio()
    assert ratio.value == INITIAL_RATIO
    for _ in range(700):
        ratio.decay()
    assert ratio.value == pytest.approx(FLOOR_RATIO)
    ratio.retracted(generated=30, allowed=99, running=2)
    assert ratio.value == pytest.approx(0.7)
    ratio.retracted(generated=90, allowed=99, running=5)
    assert ratio.value == 1.0
    ratio.reset()
    assert ratio.value == INITIAL_RATIO


def test_the_head_of_the_queue_is_not_overtaken_by_smaller_requests() -> None:
    core = make_core(FakeWorker(num_pages=64, page_size=1))
    submit(core, request("running", range(1, 9), 30, ignore_eos=True))
    core.step()
    submit(core, request("big", range(1, 30), 20), request("small", [1, 2], 2))
    core.step()
    assert [w.request.rid for w in core.scheduler.queue] == ["big", "small"]
    run_all(core)


# --- aborts ---


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("steps", range(7))
def test_abort_in_every_phase(overlap: bool, steps: int) -> None:
    core = make_core(
        FakeWorker(page_size=4), disable_overlap_schedule=not overlap, chunked_prefill_size=8
    )
    submit(core, request("a", range(1, 22), 20, ignore_eos=True), request("ab", range(2, 20), 3))
    got: dict[str, Got] = {}
    for _ in range(steps):
        take(got, core.step())
    assert not core.abort("b")
    assert core.abort("a")
    assert not core.abort("a")
    assert core.has_work
    take(got, core.step())
    assert got["a"].finish is not None
    assert got["a"].finish.kind == "abort"
    submit(core, request("a", range(1, 22), 2))  # the id is free at once
    again: dict[str, Got] = {"ab": got.get("ab", Got())}
    run_all(core, again)
    assert again["a"].finish is not None
    assert again["a"].finish.kind != "abort"
    assert again["ab"].tokens == expected(request("ab", range(2, 20), 3), 256, 50)[0]
    assert core.stats(0).aborts == 1
    assert_all_pages_back(core)


# --- refusals ---


def broken(**changes: object) -> GenerateRequest:
    return request("r", changes.pop("prompt", [1, 2]), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "field", "status"),
    [
        (broken(temperature=-1.0), "temperature", 400),
        (broken(n=2), "n", 400),
        (broken(prompt=[1, 50]), "prompt", 400),
        (broken(prompt=[-1]), "prompt", 400),
        (broken(prompt=[]), "prompt", 400),
        (broken(priority=3), "priority", 400),
        (broken(prompt=[1] * 256), "prompt", 413),
        (broken(prompt=[1] * 257, max_new=0), "prompt", 413),
        (broken(prompt=[1] * 130, max_new=0), "prompt", 413),
        (broken(prompt=[1] * 100, max_new=30), "max_new_tokens", 413),
        (GenerateRequest(rid="", prompt=b"\1\0\0\0", params=request("r", [1]).params), "rid", 400),
        (GenerateRequest(rid="r", prompt=b"\1\0", params=request("r", [1]).params), "prompt", 400),
    ],
)
def test_refusals_name_the_field(message: GenerateRequest, field: str, status: int) -> None:
    core = make_core(FakeWorker(num_pages=32, page_size=4))
    refused = core.submit(message)
    assert refused is not None
    assert (refused.field, refused.status) == (field, status)
    assert not core.has_work


def test_an_open_id_and_stop_strings_without_a_tokenizer_are_refused() -> None:
    core = make_core(FakeWorker())
    submit(core, request("a", [1], 4))
    refused = core.submit(request("a", [1], 4))
    assert refused is not None
    assert refused.field == "rid"
    bare = EngineCore(core.config, FakeWorker(), check=True)
    refused = bare.submit(request("b", [1], 4, stop=("x",)))
    assert refused is not None
    assert (refused.field, refused.status) == ("stop", 501)
    controller = LengthController(StepTimes([1, 2], [1e-3, 1e-3]), 4, 3)
    with pytest.raises(ValueError, match="come together"):
        EngineCore(core.config, FakeWorker(), controller=controller)


def test_a_full_queue_answers_503_and_gives_way_to_priority() -> None:
    worker = FakeWorker(max_slots=1)
    core = make_core(worker, max_queued_requests=2, enable_priority_scheduling=True)
    submit(core, request("run", [1], 30, ignore_eos=True))
    core.step()
    submit(core, request("low", [2], 3), request("mid", [3], 3, priority=1))
    refused = core.submit(request("low2", [4], 3))
    assert refused is not None
    assert refused.status == 503
    submit(core, request("high", [5], 3, priority=2))
    got = run_all(core)
    assert got["low"].finish is not None
    assert (got["low"].finish.kind, got["low"].finish.status) == ("abort", 503)
    assert got["high"].finish is not None
    assert got["high"].finish.kind != "abort"


# --- priority ---


@pytest.mark.parametrize(("priority", "preempted"), [(10, 0), (11, 1)])
def test_preemption_needs_more_than_the_threshold(priority: int, preempted: int) -> None:
    core = make_core(FakeWorker(max_slots=2), enable_priority_scheduling=True)
    low = request("low", [1, 2], 20, ignore_eos=True)
    other = request("other", [2, 3], 20, ignore_eos=True, priority=1)
    submit(core, low, other)
    for _ in range(4):
        core.step()
    vip = request("vip", [3, 4], 5, ignore_eos=True, priority=priority)
    submit(core, vip)
    got = run_all(core)
    assert core.scheduler.counters.preemptions == preempted
    assert got["low"].last is not None
    assert got["low"].last.stats is not None
    assert got["low"].last.stats.retractions == preempted
    assert got["vip"].tokens == expected(vip, 256, 50)[0]
    assert_all_pages_back(core)


def test_nobody_is_preempted_in_vain() -> None:
    worker = FakeWorker(num_pages=40, page_size=1)
    core = make_core(worker, enable_priority_scheduling=True)
    submit(core, request("same", range(1, 20), 10, ignore_eos=True, priority=50))
    submit(core, request("low", [1, 2], 4, ignore_eos=True))
    core.step()
    submit(core, request("vip", range(1, 30), 9, ignore_eos=True, priority=60))
    core.step()
    assert core.scheduler.counters.preemptions == 0
    run_all(core)


# --- sampling, streams, limits ---


def test_the_context_limit_clips_new_tokens() -> None:
    core = make_core(FakeWorker(context_length=32, page_size=4))
    message = request("a", range(1, 29), 100, ignore_eos=True)
    submit(core, message)
    got = run_all(core)["a"]
    assert got.tokens == expected(message, 32, 50)[0]
    assert len(got.tokens) == 4
    assert got.finish is not None
    assert got.finish.kind == "length"


def test_requests_without_a_seed_draw_one_from_the_configuration() -> None:
    def inits(random_seed: int) -> list[int]:
        core = make_core(FakeWorker(), random_seed=random_seed)
        plans = record_plans(core)
        for rid in "abc":
            seed = 42 if rid == "b" else None
            submit(core, request(rid, [1, 2], 1, temperature=1.0, seed=seed))
        run_all(core)
        return [init.seed for plan in plans for init in plan.inits]

    assert inits(7) == [derive_seed(7, 0), 42, derive_seed(7, 1)]
    assert inits(7) != inits(8)
    seeds = [derive_seed(0, i) for i in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("logprobs", [None, 0])
def test_streams_come_in_intervals_and_others_at_once(logprobs: int | None) -> None:
    core = make_core(FakeWorker(), stream_interval=4)
    submit(
        core,
        request("stream", [1, 2], 10, ignore_eos=True, logprobs=logprobs),
        request("whole", [1, 2], 10, ignore_eos=True, logprobs=logprobs, stream=False),
    )
    sizes: dict[str, list[int]] = {"stream": [], "whole": []}
    while core.has_work:
        for output in core.step():
            sizes[output.rid].append(len(output.tokens) // 4)
    assert sizes == {"stream": [1, 4, 4, 1], "whole": [10]}


def test_speculation_is_counted_and_can_be_switched_off_for_a_request() -> None:
    core = make_core(FakeWorker(num_pages=256), **NGRAM)
    submit(
        core,
        request("on", [1, 2, 3], 40, ignore_eos=True),
        request("off", [1, 2, 3], 40, ignore_eos=True, speculative=False),
    )
    got = run_all(core)
    on, off = got["on"].last, got["off"].last
    assert on is not None
    assert off is not None
    assert on.stats is not None
    assert off.stats is not None
    assert got["on"].tokens == got["off"].tokens
    assert off.stats.verify_ct == 0
    assert off.stats.plain_ct == 39
    assert off.stats.spec_off_reason == "request switched it off"
    assert on.stats.verify_ct > 0
    assert on.stats.verify_tokens + on.stats.plain_ct == 39
    assert on.stats.correct_drafts <= on.stats.proposed_drafts
    stats = core.stats(3)
    assert stats.spec_drafts == on.stats.verify_ct
    assert stats.spec_accepted_tokens == on.stats.correct_drafts
    assert sum(stats.spec_accepted_per_pos) == on.stats.correct_drafts
    assert stats.spec_drafted_per_pos[0] == on.stats.verify_ct
    assert stats.call == 3
    assert stats.finished == 2


def test_drafts_outside_the_vocabulary_are_cut_and_counted() -> None:
    core = make_core(FakeWorker(), **NGRAM)
    drafter = core._drafts._drafter  # type: ignore[union-attr]
    propose = drafter.propose

    def wrong(slots: I32, caps: I32) -> HostProposal:
        trees = propose(slots, caps)
        trees.tokens[0, 0] = 50
        return trees

    drafter.propose = wrong  # type: ignore[method-assign]
    submit(core, request("a", [1, 2], 10, ignore_eos=True), request("b", [3], 10, ignore_eos=True))
    got = run_all(core)
    assert got["a"].tokens == expected(request("a", [1, 2], 10, ignore_eos=True), 256, 50)[0]
    assert core.stats(0).draft_invalid > 0


def test_flush_needs_an_idle_core() -> None:
    worker = FakeWorker(page_size=4)
    core = make_core(worker, **NGRAM)
    submit(core, request("a", range(1, 22), 3))
    core.step()
    refused = core.flush_cache()
    assert refused is not None
    assert refused.status == 400
    run_all(core)
    assert core.stats(0).cached_pages > 0
    assert core.flush_cache() is None
    assert core.stats(0).cached_pages == 0
    assert worker.resets == 1


def test_commit_is_apply_and_outputs_in_one() -> None:
    worker = FakeWorker()
    scheduler = make_core(worker).scheduler
    assert scheduler.submit(request("a", [1, 2], 3, ignore_eos=True)) is None
    got: dict[str, Got] = {}
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        take(got, scheduler.commit(worker.run(plan, None)))
    assert len(got["a"].tokens) == 3


@pytest.mark.parametrize("aborted", [True, False])
def test_a_retracted_request_may_end_while_it_drains(aborted: bool) -> None:
    worker = FakeWorker(max_slots=1, page_size=4)
    core = make_core(worker, enable_priority_scheduling=True)
    scheduler = core.scheduler
    low = request("low", [1, 2], 30 if aborted else 3, ignore_eos=True)
    submit(core, low)
    first = scheduler.plan()
    assert first is not None
    got: dict[str, Got] = {}
    take(got, scheduler.commit(worker.run(first, None)))
    second = scheduler.plan()
    submit(core, request("vip", [3, 4], 4, ignore_eos=True, priority=20))
    third = scheduler.plan()
    assert isinstance(scheduler.batch.states[RequestId("low")], Draining)
    assert not aborted or core.abort("low")
    for plan in (second, third):
        assert plan is not None
        take(got, scheduler.commit(worker.run(plan, None)))
        check_all(scheduler)
    run_all(core, got)
    assert got["low"].finish is not None
    assert got["low"].finish.kind == ("abort" if aborted else "length")
    assert got["low"].tokens == expected(low, 256, 50)[0][: 1 if aborted else 3]
    assert len(got["vip"].tokens) == 4
    assert_all_pages_back(core)


def test_longest_prefix_match_is_admitted_first() -> None:
    core = make_core(FakeWorker(max_slots=1, page_size=4), schedule_policy="lpm")
    submit(core, request("seed", range(1, 14), 1))
    run_all(core)
    plans = record_plans(core)
    submit(core, request("cold", range(20, 40), 1), request("warm", range(1, 20), 1))
    run_all(core)
    firsts = [int(i32(init.prompt)[0]) for plan in plans for init in plan.inits]
    assert firsts == [1, 20]


def test_a_spent_budget_leaves_the_rest_for_the_next_step() -> None:
    core = make_core(FakeWorker(page_size=4), chunked_prefill_size=4)
    plans = record_plans(core)
    submit(core, request("a", range(1, 8), 1), request("b", range(10, 17), 1))
    run_all(core)
    assert [list(chunks(plan).values()) for plan in plans if chunks(plan)] == [
        [4],
        [3, 1],
        [4],
        [2],
    ]


def test_several_prefilling_requests_share_a_small_budget_in_turn() -> None:
    core = make_core(FakeWorker(page_size=4), chunked_prefill_size=6)
    plans = record_plans(core)
    submit(core, request("a", range(1, 8), 1), request("b", range(10, 25), 1))
    core.step()
    core.step()
    submit(core, request("c", [30, 31], 1, ignore_eos=True))
    run_all(core)
    assert [list(chunks(plan).values()) for plan in plans if chunks(plan)] == [
        [6],
        [1, 5],
        [6],
        [4, 2],
    ]
