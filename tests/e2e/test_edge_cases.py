"""Edge cases that other engines got wrong, through whole engines with NGRAM and without.

Every step drafts (policy "fixed"), so acceptance happens wherever text repeats; each test that
depends on accepted drafts asserts that there were some.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.engine.build import Engine, build_engine
from outrider.engine_core.config import EngineConfig
from outrider.engine_core.ids import i32
from outrider.engine_core.messages import GenerateRequest, RequestOutput, RequestStats
from outrider.engine_core.model_path import resolve_model
from outrider.engine_core.plan import TokenLogprobs
from outrider.engine_core.sampling_params import SamplingParams
from outrider.frontend.tokenizer import Tokenizer

from ..engine.tiny import write_checkpoint

CONTEXT, PAGE, CHUNK = 512, 16, 64
CODE = "self.width = width\n        self.height = height\n        "
REPEAT = "class Box:\n    def __init__(self, width, height):\n        " + CODE * 3
HA = "# repeat: ha ha ha ha ha ha ha ha\n# repeat: ha ha"
FLAT = "# "


Params = dict[str, Any]


def top(one: TokenLogprobs) -> list[float]:
    """The best log-probabilities at a position."""
    return [float(value) for value in np.frombuffer(one.top_values, np.float32)]


class Result:
    """What one request received."""

    def __init__(self, outputs: Sequence[RequestOutput]) -> None:
        self.tokens: list[int] = [t for o in outputs for t in i32(o.tokens).tolist()]
        self.logprobs = [one for o in outputs for one in o.logprobs]
        last = outputs[-1]
        assert last.finish is not None
        assert last.stats is not None
        self.finish = last.finish
        self.stats: RequestStats = last.stats
        assert last.stats.completion_tokens == len(self.tokens)


def config(model: str, algorithm: str | None, **fields: object) -> EngineConfig:
    values: dict[str, object] = {
        "model": model,
        "num_threads": 1,
        "context_length": CONTEXT,
        "page_size": PAGE,
        "chunked_prefill_size": CHUNK,
        "max_total_tokens": 24 * CONTEXT,
        "max_running_requests": 20,
        "speculative_algorithm": algorithm,
        "speculative_length_policy": "auto" if algorithm is None else "fixed",
    }
    if algorithm is not None:
        values["speculative_ngram_capacity"] = 200_000
    return EngineConfig(**values | fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    engine = build_engine(config("pycoder", None))
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def ngram() -> Iterator[Engine]:
    engine = build_engine(config("pycoder", "NGRAM"))
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model("pycoder"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", 24, scale=0.6)


def request(
    rid: str, prompt: Sequence[int], salt: str = "", speculative: bool = True, **params: object
) -> GenerateRequest:
    return GenerateRequest(
        rid,
        np.array(prompt, np.int32).tobytes(),
        SamplingParams(**params),  # type: ignore[arg-type]
        cache_salt=salt,
        stream=False,
        speculative=speculative,
    )


def run(engine: Engine, requests: Sequence[GenerateRequest]) -> list[Result]:
    """All at once; every page is free or cached afterwards."""
    outputs: dict[str, list[RequestOutput]] = {message.rid: [] for message in requests}
    assert len(outputs) == len(requests)
    for message in requests:
        assert engine.core.submit(message) is None
    while engine.core.has_work:
        for output in engine.core.step():
            outputs[output.rid].append(output)
    stats = engine.core.stats(0)
    assert stats.free_pages + stats.cached_pages == stats.total_pages
    return [Result(outputs[message.rid]) for message in requests]


def correct(results: Sequence[Result]) -> int:
    return sum(result.stats.correct_drafts for result in results)


def same_in_both(
    plain: Engine, ngram: Engine, requests: Sequence[GenerateRequest]
) -> tuple[list[Result], list[Result]]:
    without, with_drafts = run(plain, requests), run(ngram, requests)
    assert [r.tokens for r in with_drafts] == [r.tokens for r in without]
    assert [r.finish for r in with_drafts] == [r.finish for r in without]
    return without, with_drafts


def test_a_word_repeated_48_times(plain: Engine, ngram: Engine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("serving" * 48)
    message = request("serving", prompt, max_new_tokens=32, temperature=0.0)
    without, with_drafts = same_in_both(plain, ngram, [message])
    again = run(plain, [message])
    assert again[0].tokens == without[0].tokens
    assert correct(with_drafts) >= 5


def test_penalties_at_every_accepted_position(
    plain: Engine, ngram: Engine, tokenizer: Tokenizer
) -> None:
    prompts = [tokenizer.encode(text) for text in (HA, REPEAT)]
    penalties: list[Params] = [
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.7},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.2, "presence_penalty": -0.3, "repetition_penalty": 0.9},
        {"frequency_penalty": -0.5},
    ]
    requests = [
        request(f"{p}-{k}-{t}", prompt, max_new_tokens=28, temperature=t, seed=k, **values)
        for p, prompt in enumerate(prompts)
        for k, values in enumerate(penalties)
        for t in (0.0, 0.8)
    ]
    without, with_drafts = same_in_both(plain, ngram, requests)
    assert correct(with_drafts) > 30
    unpenalized = run(plain, [request("u", prompts[0], max_new_tokens=40, temperature=0.0)])
    assert unpenalized[0].tokens != without[0].tokens, "the penalty must matter here"


def test_a_forbidden_token_never_comes(plain: Engine, ngram: Engine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(REPEAT)
    [free] = run(plain, [request("free", prompt, max_new_tokens=40, temperature=0.0)])
    forbidden = set(free.tokens[:10:3])
    bias = dict.fromkeys(forbidden, -100.0)
    requests = [
        request(
            f"b{i}", prompt, max_new_tokens=40, temperature=float(i > 0), seed=i, logit_bias=bias
        )
        for i in range(8)
    ]
    without, with_drafts = same_in_both(plain, ngram, requests)
    assert correct(with_drafts) > 20
    for result in without:
        assert not forbidden & set(result.tokens)
    [forced] = run(ngram, [request("f", prompt, max_new_tokens=20, logit_bias={77: 100.0})])
    assert forced.tokens == [77] * 20
    assert forced.stats.correct_drafts > 5


def test_min_p_at_every_position(plain: Engine, ngram: Engine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(REPEAT)
    requests = [
        request(f"m{i}", prompt, max_new_tokens=40, min_p=0.5, seed=i, logprobs=1) for i in range(8)
    ]
    _, with_drafts = same_in_both(plain, ngram, requests)
    assert correct(with_drafts) > 20
    for result in with_drafts:
        for one in result.logprobs:
            assert one.value >= top(one)[0] + math.log(0.5) - 1e-5
    free = run(plain, [request(f"x{i}", prompt, max_new_tokens=40, seed=i, logprobs=1)
                       for i in range(8)])  # fmt: skip
    below = [one.value < top(one)[0] + math.log(0.5) for r in free for one in r.logprobs]
    assert sum(below) > 5, "without min_p such tokens do come"


def test_logprobs_with_drafts_are_those_without(
    plain: Engine, ngram: Engine, tokenizer: Tokenizer
) -> None:
    prompts = [tokenizer.encode(text) for text in (REPEAT, HA)]
    requests = [
        request(f"{i}-{t}", prompt, max_new_tokens=40, temperature=t, seed=3, logprobs=3)
        for i, prompt in enumerate(prompts)
        for t in (0.0, 0.9)
    ]
    without, with_drafts = same_in_both(plain, ngram, requests)
    assert correct(with_drafts) > 20
    for mine, theirs in zip(with_drafts, without, strict=True):
        assert len(mine.logprobs) == len(mine.tokens)
        assert [one.token for one in mine.logprobs] == mine.tokens
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert a.value == pytest.approx(b.value, abs=1e-4)
            assert a.top_ids == b.top_ids
            assert sum(map(math.exp, top(a))) <= 1.0 + 1e-6
        assert min(one.value for one in mine.logprobs) < -0.01


def test_a_seed_gives_the_same_alone_and_in_a_batch(
    plain: Engine, ngram: Engine, tokenizer: Tokenizer
) -> None:
    prompt, other = tokenizer.encode(REPEAT), tokenizer.encode(HA)
    for temperature in (2.0, 0.7):
        sampled: Params = {"max_new_tokens": 14, "temperature": temperature}
        mine = request("mine", prompt, seed=42, **sampled)
        crowd = [request(f"c{i}", other[: 3 + i], seed=i, **sampled) for i in range(15)]
        alone = run(ngram, [mine])[0].tokens
        assert run(ngram, [mine])[0].tokens == alone
        assert run(ngram, [*crowd[:7], mine, *crowd[7:]])[7].tokens == alone
        assert run(plain, [mine])[0].tokens == alone
        off = request("mine", prompt, seed=42, speculative=False, **sampled)
        [unaided] = run(ngram, [off])
        assert unaided.tokens == alone
        assert unaided.stats.proposed_drafts == 0
        assert unaided.stats.spec_off_reason == "request switched it off"


def test_seeded_and_seedless_requests_share_a_batch(ngram: Engine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(REPEAT)
    seeds = (None, 1, None, 2)
    batch = [request(f"s{i}", prompt, max_new_tokens=40, seed=s) for i, s in enumerate(seeds)]
    together = run(ngram, batch)
    for index in (1, 3):
        assert run(ngram, [batch[index]])[0].tokens == together[index].tokens
    assert together[0].tokens != together[2].tokens
    assert len({tuple(result.tokens) for result in together}) == 4
    for result in together:
        assert max(len(list(group)) for _, group in itertools.groupby(result.tokens)) <= 8


def test_temperature_has_an_effect(ngram: Engine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(FLAT)
    for temperature, low, high in ((1.5, 6, 50), (0.0, 1, 1), (1e-7, 1, 1)):
        batch = [
            request(f"t{i}", prompt, max_new_tokens=1, temperature=temperature, seed=i)
            for i in range(50)
        ]
        distinct = {result.tokens[0] for result in run(ngram, batch)}
        assert low <= len(distinct) <= high


def test_near_zero_temperatures_and_top_k_1_are_greedy(ngram: Engine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(REPEAT)
    same: list[Params] = [
        {"temperature": 0.0},
        {"temperature": 1e-7},
        {"temperature": 0.0, "top_k": 5, "top_p": 0.3},
        {"temperature": 1.3, "top_k": 1},
        {"temperature": 0.0, "seed": 9},
    ]
    hot: Params = {"temperature": 1.0, "seed": 1}
    results = run(ngram, [request(f"g{i}", prompt, max_new_tokens=24, **p)
                          for i, p in enumerate([*same, hot])])  # fmt: skip
    assert len({tuple(result.tokens) for result in results[:-1]}) == 1
    assert results[-1].tokens != results[0].tokens


def test_every_stop_and_every_cap_in_an_accepted_run(
    plain: Engine, ngram: Engine, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(REPEAT)
    [free] = run(plain, [request("free", prompt, max_new_tokens=30, temperature=0.0)])
    requests, expected = [], []
    for at in range(2, 28, 2):
        for cap in (at - 1, at + 1, at + 2):
            stop = free.tokens[at]
            first = free.tokens.index(stop)
            params: Params = {"max_new_tokens": cap, "stop_token_ids": (stop,), "temperature": 0.0}
            requests.append(request(f"{at}-{cap}", prompt, **params))
            stopped = first < cap
            expected.append((free.tokens[: first + 1 if stopped else cap], stopped))
    found: list[Result] = []
    for start in range(0, len(requests), 20):
        found += run(ngram, requests[start : start + 20])
    for (tokens, stopped), result in zip(expected, found, strict=True):
        assert result.tokens == tokens
        assert result.finish.kind == ("stop" if stopped else "length")
        assert result.finish.matched == (tokens[-1] if stopped else None)
    assert correct(found) > 100
    assert {stopped for _, stopped in expected} == {True, False}


def test_stop_strings_inside_an_accepted_run(
    plain: Engine, ngram: Engine, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(REPEAT)
    [free] = run(plain, [request("free", prompt, max_new_tokens=30, temperature=0.0)])
    text = tokenizer.decode(free.tokens)
    stops = [text[at : at + 5] for at in range(3, len(text) - 5, 9)] + ["not in the text"]
    requests = [
        request(f"{i}-{cap}", prompt, max_new_tokens=cap, temperature=0.0, stop=(stop,))
        for i, stop in enumerate(stops[:10])
        for cap in (6, 30)
    ]
    _, with_drafts = same_in_both(plain, ngram, requests)
    assert correct(with_drafts) > 20
    for message, result in zip(requests, with_drafts, strict=True):
        [stop] = message.params.stop
        stopped = result.finish.kind == "stop"
        assert (stop in tokenizer.decode(result.tokens)) == stopped
        assert stop not in tokenizer.decode(result.tokens[:-1])
        assert result.finish.matched == (stop if stopped else None)
    kinds = [result.finish.kind for result in with_drafts]
    assert min(kinds.count("stop"), kinds.count("length")) >= 4


def test_end_tokens_and_min_tokens_inside_accepted_runs(tiny: Path) -> None:
    """A tiny vocabulary meets its end token often; what comes after it counts nowhere."""
    prompts = [[1 + (i * 7 + j) % 23 for j in range(12)] for i in range(20)]
    sampled: Params = {"max_new_tokens": 40, "temperature": 0.7}
    free = [request(f"f{i}", p, ignore_eos=True, seed=i, **sampled) for i, p in enumerate(prompts)]
    bound = [request(f"b{i}", p, seed=i, **sampled) for i, p in enumerate(prompts)]
    late = [request(f"l{i}", p, seed=i, min_new_tokens=9, **sampled) for i, p in enumerate(prompts)]
    engine = build_engine(config(str(tiny), "NGRAM"))
    try:
        unbounded, ended, later = (run(engine, batch) for batch in (free, bound, late))
    finally:
        engine.shutdown()
    for whole, cut, held in zip(unbounded, ended, later, strict=True):
        if 0 in whole.tokens:
            assert cut.tokens == whole.tokens[: whole.tokens.index(0) + 1]
            assert (cut.finish.kind, cut.finish.matched) == ("stop", 0)
        else:
            assert cut.tokens == whole.tokens
            assert cut.finish.kind == "length"
        assert 0 not in held.tokens[:9]
        assert len(held.tokens) > 9
        stats = cut.stats
        assert stats.verify_tokens + stats.plain_ct <= len(cut.tokens)
        assert 0 <= stats.correct_drafts <= stats.proposed_drafts
        assert sum(stats.histogram) == stats.verify_ct
    assert sum(result.finish.kind == "stop" for result in ended) >= 5
    assert correct(ended) > 20


def test_prompts_around_page_and_chunk_borders(
    plain: Engine, ngram: Engine, tokenizer: Tokenizer
) -> None:
    text = tokenizer.encode(REPEAT * 6)
    lengths = (1, 2, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 300)
    for salt in ("together", "alone"):
        requests = [
            request(f"{salt}{n}", text[:n], salt + str(n), max_new_tokens=12, temperature=0.0)
            for n in lengths
        ]
        if salt == "together":
            without, _ = same_in_both(plain, ngram, requests)
            first = [result.tokens for result in without]
        else:
            assert [run(ngram, [one])[0].tokens for one in requests] == first


def test_the_context_is_a_cap_for_prompts_and_drafts(
    plain: Engine, ngram: Engine, tokenizer: Tokenizer
) -> None:
    text = (tokenizer.encode(REPEAT) * 20)[:CONTEXT]
    requests = [
        request(f"n{n}", text[: CONTEXT - n], max_new_tokens=99, temperature=0.0, ignore_eos=True)
        for n in (1, 2, 3, 7, 15)
    ]
    _, with_drafts = same_in_both(plain, ngram, requests)
    assert [len(result.tokens) for result in with_drafts] == [1, 2, 3, 7, 15]
    assert {result.finish.kind for result in with_drafts} == {"length"}
    refused = ngram.core.submit(request("full", text, max_new_tokens=1))
    assert refused is not None
    assert (refused.field, refused.status) == ("prompt", 413)
    [only] = run(ngram, [request("kv", text, max_new_tokens=0)])
    assert (only.tokens, only.finish.kind) == ([], "length")


def test_a_prompt_in_the_cache_is_still_computed_in_part(ngram: Engine) -> None:
    for length in (2 * PAGE, 2 * PAGE + 1, 3 * PAGE - 1):
        prompt = [(7 * i + length) % 8000 for i in range(length)]
        message = request("hit", prompt, max_new_tokens=4, temperature=0.0)
        [first], [second] = run(ngram, [message]), run(ngram, [message])
        assert second.tokens == first.tokens
        assert first.stats.cached_tokens == 0
        assert second.stats.cached_tokens == (length - 1) // PAGE * PAGE


def test_tenants_share_neither_pages_nor_drafts(ngram: Engine) -> None:
    prompt = [(11 * i) % 7919 + 5 for i in range(3 * PAGE)]
    params: Params = {"max_new_tokens": 30, "temperature": 0.0, "ignore_eos": True}
    [first] = run(ngram, [request("a", prompt, "tenant-a", **params)])
    [again] = run(ngram, [request("a", prompt, "tenant-a", **params)])
    [other] = run(ngram, [request("b", prompt, "tenant-b", **params)])
    [nobody] = run(ngram, [request("n", prompt, **params)])
    assert again.tokens == other.tokens == nobody.tokens == first.tokens
    assert again.stats.cached_tokens == 2 * PAGE
    assert again.stats.correct_drafts > first.stats.correct_drafts
    assert other.stats.cached_tokens == nobody.stats.cached_tokens == 0
    assert other.stats.correct_drafts == first.stats.correct_drafts
    assert other.stats.proposed_drafts == first.stats.proposed_drafts


def test_an_abort_ends_exactly_one_id(ngram: Engine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(FLAT)
    ids = ("1", "10", "100", "", "01")
    for rid in ids[:3]:
        assert ngram.core.submit(request(rid, prompt, max_new_tokens=12, ignore_eos=True)) is None
    for rid in ids[3:]:
        assert not ngram.core.abort(rid)
    ngram.core.step()
    assert ngram.core.abort("10")
    finished: dict[str, str] = {}
    while ngram.core.has_work:
        for output in ngram.core.step():
            if output.finish is not None:
                finished[output.rid] = output.finish.kind
    assert finished == {"1": "length", "10": "abort", "100": "length"}
    assert not ngram.core.abort("10")


def test_counters_of_requests_add_up_to_those_of_the_core(
    ngram: Engine, tokenizer: Tokenizer
) -> None:
    before = ngram.core.stats(0)
    results = run(ngram, [
        request(f"k{i}", tokenizer.encode(text), max_new_tokens=5 + 7 * i, seed=i, temperature=0.5)
        for i, text in enumerate((REPEAT, HA, REPEAT + CODE, FLAT, HA * 2))
    ])  # fmt: skip
    after = ngram.core.stats(0)
    stats = [result.stats for result in results]
    for counter, mine in (
        ("generated_tokens", sum(s.completion_tokens for s in stats)),
        ("spec_drafts", sum(s.verify_ct for s in stats)),
        ("spec_draft_tokens", sum(s.proposed_drafts for s in stats)),
        ("spec_accepted_tokens", sum(s.correct_drafts for s in stats)),
        ("spec_verify_tokens", sum(s.verify_tokens for s in stats)),
        ("plain_rows", sum(s.plain_ct for s in stats)),
    ):
        assert getattr(after, counter) - getattr(before, counter) == mine, counter
    assert correct(results) > 10
    for one in stats:
        if one.verify_ct:
            assert 1.0 <= one.verify_tokens / one.verify_ct <= 12.0


def test_a_flush_forgets_text_and_keeps_answers(ngram: Engine, tokenizer: Tokenizer) -> None:
    message = request("f", tokenizer.encode(REPEAT), max_new_tokens=16, temperature=0.0)
    [before] = run(ngram, [message])
    assert ngram.core.stats(0).ngram_nodes > 0
    assert ngram.core.flush_cache() is None
    stats = ngram.core.stats(0)
    assert (stats.ngram_nodes, stats.cached_pages) == (0, 0)
    assert stats.free_pages == stats.total_pages
    [after] = run(ngram, [message])
    assert after.tokens == before.tokens
    assert after.stats.cached_tokens == 0


@pytest.mark.parametrize(
    "flags",
    [
        {"speculative_num_draft_tokens": 2},
        {"speculative_ngram_capacity": 19},
        {"speculative_ngram_capacity": 60, "speculative_ngram_match_type": "PROB"},
        {"speculative_ngram_max_trie_depth": 2, "speculative_num_draft_tokens": 64},
        {"speculative_ngram_min_bfs_breadth": 10, "speculative_ngram_max_bfs_breadth": 10},
        {"speculative_num_draft_tokens": 3, "page_size": 1, "disable_radix_cache": True},
    ],
    ids=lambda flags: "-".join(f"{k.removeprefix('speculative_')}={v}" for k, v in flags.items()),
)
def test_extreme_drafters_change_nothing(tiny: Path, flags: Params) -> None:
    prompts = [[1 + (i * 5 + j * j) % 23 for j in range(4 + i)] for i in range(6)]
    requests = [
        request(f"{i}-{t}", p, max_new_tokens=60, temperature=t, seed=i, ignore_eos=True)
        for i, p in enumerate(prompts)
        for t in (0.0, 0.9)
    ]
    found = []
    for algorithm, more in ((None, {}), ("NGRAM", flags)):
        engine = build_engine(config(str(tiny), algorithm, **more))
        try:
            found.append(run(engine, requests))
        finally:
            engine.shutdown()
    without, with_drafts = found
    assert [r.tokens for r in with_drafts] == [r.tokens for r in without]
    proposed = sum(result.stats.proposed_drafts for result in with_drafts)
    assert proposed > 50
