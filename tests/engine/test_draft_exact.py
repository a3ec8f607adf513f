"""Drafts of models through whole cores on a CPU: nothing but the number of steps changes."""

from pathlib import Path

import pytest

from outrider.engine_core import admission
from outrider.engine_core.draft_config import DraftAlgorithm, SpecShape
from outrider.engine_core.ids import i32
from outrider.engine_core.messages import GenerateRequest, RequestStats
from outrider.engine_core.sampling_params import SamplingParams

from .cores import drive, request, tokens_of
from .draft_checkpoints import write_standalone
from .draft_cores import (
    ALGORITHMS,
    CHAIN,
    TREE,
    VOCAB,
    DraftCore,
    Models,
    draft_core,
    write_models,
)

Tokens = dict[str, list[int]]

over_algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)
over_shapes = pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return write_models(tmp_path_factory.mktemp("drafts"))


def requests(name: str = "r", first: int = 0) -> list[GenerateRequest]:
    """Greedy and seeded ones of several lengths, some with the beginning of another."""
    out = []
    for i in range(first, first + 8):
        prompt = [(3 * j * j + i % 7 * 5 + j) % VOCAB for j in range(3 + 5 * i)]
        params = SamplingParams(
            temperature=(0.0, 0.8)[i % 2],
            seed=i,
            max_new_tokens=12 + i,
            ignore_eos=i % 3 > 0,
            stop_token_ids=(5,) if i == 4 else (),
            repetition_penalty=1.2 if i == 6 else 1.0,
        )
        out.append(request(f"{name}{i}", prompt, params))
    return out


def check_pages(made: DraftCore) -> None:
    """Every page is back."""
    cache = made.core.scheduler.cache
    assert cache.tree.locked_pages == 0
    assert cache.available == cache.total


def run(
    models: Models,
    algorithm: DraftAlgorithm | None,
    messages: list[list[GenerateRequest]],
    shape: SpecShape = CHAIN,
    **flags: object,
) -> tuple[Tokens, list[RequestStats]]:
    """Tokens and statistics of some waves of requests."""
    tokens: Tokens = {}
    stats: list[RequestStats] = []
    with draft_core(models, algorithm, shape, **flags) as made:
        for wave in messages:
            for rid, outputs in drive(made.core, wave).items():
                tokens[rid] = tokens_of(outputs)
                last = outputs[-1].stats
                assert last is not None
                stats.append(last)
        check_pages(made)
    return tokens, stats


def waves() -> list[list[GenerateRequest]]:
    return [requests(), requests("s", 6)[:3]]


@pytest.fixture(scope="module")
def plain(models: Models) -> Tokens:
    return run(models, None, waves())[0]


@over_shapes
@over_algorithms
@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"disable_overlap_schedule": True, "max_running_requests": 1},
        {"page_size": 1, "chunked_prefill_size": 5},
        {"page_size": 1, "max_running_requests": 1, "disable_overlap_schedule": True},
        {"page_size": 64, "disable_radix_cache": True, "max_running_requests": 3},
    ],
    ids=lambda mode: ",".join(mode) or "default",
)
def test_every_mode_gives_the_tokens_of_plain_decoding(
    models: Models, plain: Tokens, algorithm: DraftAlgorithm, shape: SpecShape,
    mode: dict[str, object],
) -> None:  # fmt: skip
    tokens, stats = run(models, algorithm, waves(), shape, **mode)
    assert tokens == plain
    accepted = sum(some.correct_drafts for some in stats)
    proposed = sum(some.proposed_drafts for some in stats)
    assert 0 < accepted < proposed
    # The last drafts before a request's end are fewer.
    most = (shape.num_draft_tokens - 1) * sum(some.verify_ct for some in stats)
    assert 0.8 * most < proposed < most


@over_algorithms
@pytest.mark.parametrize("shape", [SpecShape(1, 1, 2), SpecShape(2, 3, 6)], ids=["chain", "tree"])
def test_some_rows_accept_all_their_drafts(
    models: Models, plain: Tokens, algorithm: DraftAlgorithm, shape: SpecShape
) -> None:
    tokens, stats = run(models, algorithm, waves(), shape)
    assert tokens == plain
    lengths = [sum((*some.histogram, *[0] * 9)[n] for some in stats) for n in range(4)]
    lengths = lengths[: shape.steps + 1]
    assert min(lengths) > 0
    if algorithm != "EAGLE":
        assert lengths[-1] > 5


@over_shapes
def test_the_target_as_its_own_draft_is_nearly_always_right(
    models: Models, plain: Tokens, shape: SpecShape, tmp_path: Path
) -> None:
    same = Models(models.target, {"STANDALONE": write_standalone(tmp_path / "same", models.target)})
    tokens, stats = run(same, "STANDALONE", waves(), shape)
    assert tokens == plain
    greedy = [some for rid, some in zip(tokens, stats, strict=True) if int(rid[1:]) in (0, 2, 8)]
    emitted = sum(some.verify_tokens for some in greedy)
    # A tree spends its nodes on breadth where the draft is not sure.
    least = 3.3 if shape is CHAIN else 2.2
    assert emitted / sum(some.verify_ct for some in greedy) > least


@over_shapes
@over_algorithms
def test_retracted_requests_draft_on(
    models: Models, algorithm: DraftAlgorithm, shape: SpecShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 1)
    params = SamplingParams(temperature=0.0, max_new_tokens=18, ignore_eos=True)
    messages = [request(f"r{i}", [i, 1, 2, 3, i], params) for i in range(5)]
    wanted, _ = run(models, None, [messages])
    got: Tokens = {message.rid: [] for message in messages}
    with draft_core(models, algorithm, shape, page_size=1, max_total_tokens=60) as made:
        core = made.core
        for message in messages:
            assert core.submit(message) is None
        while core.has_work:
            for output in core.step():
                got[output.rid] += i32(output.tokens).tolist()
        counters = core.scheduler.counters
        assert counters.retractions > 0
        assert counters.spec_accepted_tokens > 0 or algorithm == "EAGLE3"
        check_pages(made)
    assert got == wanted


@over_shapes
@over_algorithms
def test_aborts_leave_the_others_alone(
    models: Models, plain: Tokens, algorithm: DraftAlgorithm, shape: SpecShape
) -> None:
    got: Tokens = {}
    with draft_core(models, algorithm, shape, chunked_prefill_size=16) as made:
        core = made.core
        for message in requests():
            assert core.submit(message) is None
        for step in range(400):
            if step in (3, 6):
                core.abort(f"r{step}")
            for output in core.step():
                got.setdefault(output.rid, []).extend(i32(output.tokens).tolist())
            if not core.has_work:
                break
        check_pages(made)
    for rid, tokens in got.items():
        wanted = plain[rid][: len(tokens)] if rid in ("r3", "r6") else plain[rid]
        assert tokens == wanted


@over_shapes
@over_algorithms
def test_simulated_acceptance_takes_the_drafts(
    models: Models, algorithm: DraftAlgorithm, shape: SpecShape
) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True)
    messages = [request(f"r{i}", [i, 2, 3], params) for i in range(3)]
    _, stats = run(models, algorithm, [messages], shape, simulate_accept_length=2.5)
    count = sum(some.verify_ct for some in stats)
    assert sum(some.verify_tokens for some in stats) == pytest.approx(2.5 * count, rel=0.15)


@pytest.mark.parametrize("algorithm", [None, *ALGORITHMS])
def test_a_context_is_filled_to_its_end(models: Models, algorithm: DraftAlgorithm | None) -> None:
    prompt = [i * i % VOCAB for i in range(480)]
    full = SamplingParams(temperature=0.0, max_new_tokens=99, ignore_eos=True)
    tokens, _ = run(models, algorithm, [[request("full", prompt, full)]], TREE)
    wanted, _ = run(models, None, [[request("full", prompt, full)]])
    assert tokens == wanted
    assert len(tokens["full"]) == 512 - 480
