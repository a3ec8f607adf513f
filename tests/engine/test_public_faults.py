"""Faults of sampling under speculation that were reported of other engines, tried on every drafter.

Each test names the report that it stands for. The drafters' models are tiny; all of them draft for
the same target, whose plain core is what they are held against.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch

from outrider.engine_core.commit import Progress, commit_row
from outrider.engine_core.core import EngineCore
from outrider.engine_core.draft_config import DraftAlgorithm
from outrider.engine_core.ids import RowKind, f32, i32
from outrider.engine_core.intake import derive_seed
from outrider.engine_core.messages import FinishReason, RequestOutput, RequestStats
from outrider.engine_core.plan import TokenLogprobs
from outrider.engine_core.sampling_params import SamplingParams

from ..reference import sampling_ref as ref
from .block_cores import block_core
from .cores import drive, random_draft_core, request, running_engine, tiny_config, tokens_of
from .draft_cores import ALGORITHMS, VOCAB, Models, draft_core, write_models
from .driver import BigramModel, Driver, chain
from .joint_law import DRAWS, LEAST_P, draw, folder_of, joint_of
from .tiny import bigram_config

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
DRAFTERS = ("NGRAM", *ALGORITHMS, "DFLASH", "DSPARK")
Outputs = dict[str, list[RequestOutput]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return write_models(tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="module")
def plain(models: Models) -> Iterator[EngineCore]:
    """The target without drafts."""
    with draft_core(models, None) as made:
        yield made.core


@pytest.fixture(scope="module", params=DRAFTERS)
def core(request: pytest.FixtureRequest, models: Models) -> Iterator[EngineCore]:
    """The target with one of the drafters."""
    name = request.param
    with ExitStack() as stack:
        if name == "NGRAM":
            yield stack.enter_context(running_engine(tiny_config(models.target, name))).core
        elif name in ALGORITHMS:
            yield stack.enter_context(draft_core(models, name)).core
        else:
            yield stack.enter_context(block_core(models.target, name.lower())).core


def params(**fields: object) -> SamplingParams:
    values: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
    return SamplingParams(**(values | fields))


def tokens_by_rid(outputs: Outputs) -> dict[str, list[int]]:
    return {rid: tokens_of(some) for rid, some in outputs.items()}


def stats_of(outputs: Outputs) -> list[RequestStats]:
    found = [some[-1].stats for some in outputs.values()]
    return [stats for stats in found if stats is not None]


def entries_of(some: list[RequestOutput]) -> list[TokenLogprobs]:
    return [entry for output in some for entry in output.logprobs]


def accepted_of(outputs: Outputs) -> int:
    return sum(stats.correct_drafts for stats in stats_of(outputs))


def test_every_drafter_is_tried() -> None:
    assert set(DRAFTERS) - {"NGRAM"} == set(get_args(DraftAlgorithm))


def test_a_biased_token_appears_at_no_position(core: EngineCore, plain: EngineCore) -> None:
    """vllm#42744: logit_bias held for the bonus token alone."""
    [likes] = tokens_by_rid(drive(plain, [request("f", PROMPT, params())])).values()
    favourite = max(set(likes), key=likes.count)
    asked = params(temperature=1.0, max_new_tokens=50, logit_bias={favourite: -100.0})
    messages = [
        request(f"r{seed}", PROMPT, msgspec.structs.replace(asked, seed=seed)) for seed in range(40)
    ]
    outputs = drive(core, messages)
    found = [token for some in outputs.values() for token in tokens_of(some)]
    assert (len(found), found.count(favourite)) == (2000, 0)
    assert accepted_of(outputs) > 20


def test_min_p_holds_at_every_position(core: EngineCore) -> None:
    """vllm#42744: min_p held for the bonus token alone."""
    asked = params(temperature=1.0, min_p=0.5, max_new_tokens=60, logprobs=1)
    messages = [
        request(f"r{seed}", PROMPT, msgspec.structs.replace(asked, seed=seed)) for seed in range(12)
    ]
    outputs = drive(core, messages)
    entries = [entry for some in outputs.values() for entry in entries_of(some)]
    assert all(e.value >= f32(e.top_values)[0] + math.log(0.5) - 1e-4 for e in entries)
    assert sum(entry.token != i32(entry.top_ids)[0] for entry in entries) > 0
    assert accepted_of(outputs) > 10


def test_min_p_follows_the_truncated_joint_law(tmp_path: Any) -> None:
    """vllm#42744: the distribution of three tokens, drafts before each, under min_p 0.5."""
    folder, wanted = folder_of(tmp_path, 6), ref.Params(temperature=1.5, min_p=0.5)
    law = {path: p for path, p in joint_of(folder, 6, wanted=wanted).items() if p > 0}
    config = tiny_config(
        folder, "NGRAM", max_running_requests=64, max_total_tokens=8192,
        speculative_num_draft_tokens=6,
    )  # fmt: skip
    with random_draft_core(config, tree=False) as core:
        found = Counter(draw(core, 3, wanted))
        assert core.stats(0).spec_accepted_tokens > 1_000
    assert set(found) <= set(law)
    likely = [path for path, p in law.items() if p * DRAWS >= 20]
    rare = DRAWS - sum(found[path] for path in likely)
    expected = [law[path] * DRAWS for path in likely]
    cells = ([found[path] for path in likely], expected)
    if DRAWS - sum(expected) >= 20:
        cells = ([*cells[0], rare], [*expected, DRAWS - sum(expected)])
    assert len(likely) > 8
    assert ref.chi_square_p(*cells) > LEAST_P


def test_a_seed_gives_its_tokens_alone_and_in_a_batch(core: EngineCore, plain: EngineCore) -> None:
    """vllm#6038: the seed of a request was ignored."""
    asked = params(temperature=2.0, seed=42)
    [expected] = tokens_by_rid(drive(plain, [request("a", PROMPT, asked)])).values()
    for rid in ("b", "c"):
        assert tokens_of(drive(core, [request(rid, PROMPT, asked)])[rid]) == expected
    others = [
        request(f"o{i}", PROMPT[i % 5 :], params(temperature=2.0, seed=i, max_new_tokens=9 + i))
        for i in range(15)
    ]
    batch = drive(core, [*others[:7], request("d", PROMPT, asked), *others[7:]])
    assert tokens_of(batch["d"]) == expected


def test_seeded_and_seedless_requests_do_not_disturb_each_other(
    models: Models, plain: EngineCore
) -> None:
    """vllm#9441 and #10863: such a batch gave one token over and over."""
    seeds = [None, 1, None, 2]
    derived = [derive_seed(tiny_config(models.target).random_seed, i) for i in range(2)]
    solo = [derived[0], 1, derived[1], 2]
    alone = [
        tokens_of(drive(plain, [request("s", PROMPT, params(temperature=1.0, seed=seed))])["s"])
        for seed in solo
    ]
    for algorithm in (None, *ALGORITHMS):
        with draft_core(models, algorithm) as made:
            messages = [
                request(f"r{i}", PROMPT, params(temperature=1.0, seed=seed))
                for i, seed in enumerate(seeds)
            ]
            assert list(tokens_by_rid(drive(made.core, messages)).values()) == alone
    assert len({tuple(tokens) for tokens in alone}) == 4


def progress(**fields: object) -> Progress:
    return Progress(params(**fields), 4, 100, frozenset({7}), None)


@pytest.mark.parametrize(
    ("run", "kind", "kept"),
    [([10, 11, 7, 20, 21, 22], "stop", 3), ([10, 11, 20, 21, 22, 7], "length", 5)],
)
def test_a_stop_is_seen_before_the_cap(run: list[int], kind: str, kept: int) -> None:
    """sglang#31599: a run with a stop that also crossed the cap leaked tokens after the stop."""
    going = progress(max_new_tokens=5, ignore_eos=False)
    assert commit_row(going, run, RowKind.VERIFY, 5, ()) == kept
    assert going.tokens.tolist() == run[:kept]
    assert going.finish == FinishReason(kind, 7 if kind == "stop" else None)  # type: ignore[arg-type]


def test_nothing_counts_that_comes_after_eos() -> None:
    """sglang#39826: a counter took drafts behind EOS for output."""
    going = progress(max_new_tokens=50, ignore_eos=False)
    commit_row(going, [10, 7, 20, 21], RowKind.VERIFY, 3, ())
    one = progress(max_new_tokens=50, ignore_eos=False)
    for token in (10, 7):
        commit_row(one, [token], RowKind.VERIFY, 0, ())
    assert going.tokens == one.tokens
    stats = going.stats()
    assert (stats.completion_tokens, stats.verify_tokens) == (2, 2)
    assert stats.correct_drafts <= stats.verify_tokens


def test_counters_add_up_where_requests_stop_inside_runs(
    core: EngineCore, plain: EngineCore
) -> None:
    """sglang#39826: usage is what one token at a time would have counted."""
    messages = [
        request(f"r{i}", PROMPT[i % 4 :], params(stop_token_ids=(stop,), max_new_tokens=40))
        for i, stop in enumerate(range(VOCAB))
    ]
    expected = drive(plain, messages)
    outputs = drive(core, messages)
    assert tokens_by_rid(outputs) == tokens_by_rid(expected)
    stopped = 0
    for rid, some in outputs.items():
        stats = some[-1].stats
        assert stats is not None
        assert stats.completion_tokens == len(tokens_of(some))
        assert 1 + stats.verify_tokens + stats.plain_ct == stats.completion_tokens
        assert some[-1].finish == expected[rid][-1].finish
        stopped += some[-1].finish == FinishReason("stop", tokens_of(some)[-1])
    assert stopped > 3


def test_every_accepted_token_is_counted_for_penalties() -> None:
    """sglang#33643: the last token of a step alone fed the penalties."""
    table = torch.randn(23, 23, generator=torch.Generator().manual_seed(1))
    driver = Driver(BigramModel(table), bigram_config(23), accept_length=4.0)
    emitted = [driver.enter(0, [3, 5], params(frequency_penalty=0.5))]
    rng = random.Random(2)
    while len(emitted) < 40:
        step = driver.verify({0: chain([rng.randrange(23) for _ in range(6)])})[0][0]
        assert len(step) == 4
        emitted += step
    counts = driver.state.edits.counts
    histogram = counts.output[int(counts.row_of[0])].tolist()
    assert histogram == np.bincount(emitted, minlength=23).tolist()


@pytest.mark.parametrize("least", [1, 6, 11])
def test_eos_is_legal_from_the_token_after_min_new_tokens(core: EngineCore, least: int) -> None:
    """sglang#33643: min_new_tokens counted steps."""
    asked = params(ignore_eos=False, min_new_tokens=least, logit_bias={0: 100.0})
    [tokens] = tokens_by_rid(drive(core, [request("m", PROMPT, asked)])).values()
    assert 0 not in tokens[:least]
    assert tokens[least:] == [0]


PENALTIES: list[dict[str, float]] = [
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.7},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.2},
]


@pytest.mark.parametrize("some", PENALTIES[:2], ids=lambda some: ",".join(some))
def test_penalties_count_the_drafts_before_each_position(
    core: EngineCore, some: dict[str, float]
) -> None:
    """TensorRT-LLM#17701, sglang#28180: against the scalar reference, from the raw law."""
    asked = params(max_new_tokens=60, logprobs=VOCAB, **some)
    [outputs] = drive(core, [request("p", PROMPT, asked)]).values()
    tokens = tokens_of(outputs)
    scalar = ref.Params(
        frequency=some.get("frequency_penalty", 0.0), presence=some.get("presence_penalty", 0.0)
    )
    for place, entry in enumerate(entries_of(outputs)):
        row = np.zeros(VOCAB)
        row[i32(entry.top_ids)] = f32(entry.top_values)
        values = ref.process(row.tolist(), scalar, PROMPT, tokens[:place])
        assert values[tokens[place]] >= max(values) - 1e-4
    assert len(tokens) == 60


@pytest.mark.parametrize("some", PENALTIES, ids=lambda some: ",".join(some))
def test_penalized_tokens_are_those_of_plain_decoding(
    core: EngineCore, plain: EngineCore, some: dict[str, float]
) -> None:
    """TensorRT-LLM#17701, sglang#21258: greedy and seeded, and drafts are accepted meanwhile."""
    messages = [
        request(f"r{i}", PROMPT[i:], params(temperature=0.7 * (i % 2), seed=i, **some))
        for i in range(6)
    ]
    outputs = drive(core, messages)
    assert tokens_by_rid(outputs) == tokens_by_rid(drive(plain, messages))
    assert sum(stats.verify_ct for stats in stats_of(outputs)) > 0


def test_a_repetition_penalty_of_zero_is_refused() -> None:
    """sglang#21258: it divided by zero."""
    refused = params(repetition_penalty=0.0).refuse(VOCAB)
    assert refused is not None
    assert refused.field == "repetition_penalty"


def test_logprobs_come_with_every_token_and_are_those_of_plain_decoding(
    core: EngineCore, plain: EngineCore
) -> None:
    """llama.cpp#27972, vllm#17876: all were 0; sglang#10660: none came; vllm#34497: asking for
    them switched speculation off."""
    messages = [
        request(f"r{i}", PROMPT[i:], params(temperature=0.7 * (i % 2), seed=i, logprobs=3,
                                            max_new_tokens=40))
        for i in range(6)
    ]  # fmt: skip
    outputs, expected = drive(core, messages), drive(plain, messages)
    values: list[float] = []
    for rid, some in outputs.items():
        entries, plain_entries = entries_of(some), entries_of(expected[rid])
        assert [entry.token for entry in entries] == tokens_of(some) == tokens_of(expected[rid])
        for one, other in zip(entries, plain_entries, strict=True):
            assert one.value == pytest.approx(other.value, abs=1e-4)
            assert sum(np.exp(f32(one.top_values))) <= 1 + 1e-5
            values.append(one.value)
    assert min(values) < -0.5
    stats = stats_of(outputs)
    verified = sum(one.verify_ct for one in stats)
    assert sum(one.verify_tokens for one in stats) / verified > 1.0
    partly = [
        sum(one.histogram[1:3]) for one in stats
    ]  # blocks of which some drafts held and some did not
    assert sum(partly) > 0
