"""What drafters leave behind a step: their KV is that of a fresh prefill of the accepted text."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from msgspec import structs

from outrider.engine_core import admission
from outrider.engine_core.controller import StepLengths
from outrider.engine_core.draft_config import DraftAlgorithm, SpecShape
from outrider.engine_core.grammar_spec import GrammarSpec
from outrider.engine_core.ids import I32, i32
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.sampling_params import SamplingParams

from .cores import drive, request, tokens_of
from .draft_cores import (
    ALGORITHMS,
    CHAIN,
    TREE,
    VOCAB,
    DraftCore,
    FreshDraft,
    Models,
    chain_passes,
    chain_trees,
    draft_core,
    draft_kv_of,
    write_models,
)
from .letters import write_tokenizer

over_algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)
over_shapes = pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return write_models(tmp_path_factory.mktemp("drafts"))


def requests(count: int) -> list[GenerateRequest]:
    """Greedy and seeded ones; no two prompts begin alike."""
    return [
        request(
            f"r{i}",
            [i, *((3 * j * j + i * 5 + j) % VOCAB for j in range(2 + 6 * i))],
            SamplingParams(temperature=0.8 * (i % 2), seed=i, max_new_tokens=16, ignore_eos=True),
        )
        for i in range(count)
    ]


def checked_steps(made: DraftCore, messages: list[GenerateRequest]) -> Iterator[int]:
    """Drive a core without overlap; after each step hold the draft KV of all that decode against
    fresh prefills. Yields the number of rows held.
    """
    core, state = made.core, made.runner.state
    for message in messages:
        assert core.submit(message) is None
    while core.has_work:
        core.step()
        held = 0
        for running in core.scheduler.batch.running:
            text = running.request.tokens().tolist()
            length = int(state.seq_lens[running.slot])
            if length != len(text) - 1 or length == 0:
                continue  # it still prefills
            got = draft_kv_of(made, running.slot, length)
            assert torch.allclose(got, FreshDraft(made, text).kv, atol=1e-5)
            held += 1
        yield held


@over_shapes
@over_algorithms
@pytest.mark.parametrize(
    "mode",
    [{}, {"page_size": 1, "chunked_prefill_size": 5}, {"page_size": 16, "max_running_requests": 1}],
    ids=["default", "chunks", "alone"],
)
def test_draft_kv_is_that_of_a_fresh_prefill(
    models: Models, algorithm: DraftAlgorithm, shape: SpecShape, mode: dict[str, object]
) -> None:
    flags = {"disable_overlap_schedule": True, "disable_radix_cache": True, **mode}
    with draft_core(models, algorithm, shape, **flags) as made:
        held = sum(checked_steps(made, requests(4)))
        accepted = made.core.scheduler.counters.spec_accepted_tokens
    assert held > 25
    assert accepted > 2


@over_shapes
@over_algorithms
def test_forced_drafts_keep_it_complete(
    models: Models, algorithm: DraftAlgorithm, shape: SpecShape, tmp_path: Path
) -> None:
    """What a grammar forces stands in rows of the drafter's, whoever drafted before or after."""
    texts = ("abcdabcdefghijkl(ab|ghij){2}lkjihgfedcba", "(a(bcdl|ef)(ghi|jk[a-c]{2})){3,6}")
    messages = [
        structs.replace(
            message,
            params=SamplingParams(
                temperature=message.params.temperature,
                seed=i,
                max_new_tokens=30,
                grammar=GrammarSpec("regex", texts[i % 2]),
            ),
        )
        for i, message in enumerate(requests(3))
    ]
    flags = {"disable_overlap_schedule": True, "disable_radix_cache": True}
    flags["tokenizer_path"] = str(write_tokenizer(tmp_path))  # type: ignore[assignment]
    with draft_core(models, algorithm, shape, **flags) as made:
        assert sum(checked_steps(made, [*messages, *requests(4)[3:]])) > 15
        counters = made.core.scheduler.counters
    assert counters.forced_drafts > 15
    assert counters.spec_accepted_tokens > counters.forced_drafts


@over_shapes
@over_algorithms
def test_steps_without_drafts_keep_it_complete(
    models: Models, algorithm: DraftAlgorithm, shape: SpecShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other step has none; a row's cap varies in the others."""
    flags = {"disable_overlap_schedule": True, "disable_radix_cache": True}
    with draft_core(models, algorithm, shape, **flags) as made:
        lengths = made.core.scheduler._planner._policy
        assert lengths is not None
        plan = lengths.plan
        seen: list[int] = []

        def varied(slots: I32, room: I32, batch_tokens: int) -> StepLengths:
            planned, cap = plan(slots, room, batch_tokens), (0, 1, 0, 3, 2)[len(seen) % 5]
            seen.append(cap)
            return planned._replace(caps=np.minimum(planned.caps, cap).astype(np.int32))

        monkeypatch.setattr(lengths, "plan", varied)
        assert sum(checked_steps(made, requests(3))) > 20
    assert set(seen) == {0, 1, 2, 3}


@over_algorithms
def test_requests_that_do_not_draft_keep_it_complete(
    models: Models, algorithm: DraftAlgorithm
) -> None:
    """Their pages serve those who do (decision 8)."""
    messages = [
        structs.replace(message, speculative=i == 0) for i, message in enumerate(requests(3))
    ]
    flags = {"disable_overlap_schedule": True, "disable_radix_cache": True}
    with draft_core(models, algorithm, CHAIN, **flags) as made:
        assert sum(checked_steps(made, messages)) > 20
        assert made.core.scheduler.counters.plain_rows > 10


@over_shapes
@over_algorithms
def test_retracted_requests_have_it_too(
    models: Models, algorithm: DraftAlgorithm, shape: SpecShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 1)
    flags = {
        "page_size": 1,
        "max_total_tokens": 50 if shape is CHAIN else 60,
        "disable_radix_cache": True,
    }
    with draft_core(models, algorithm, shape, disable_overlap_schedule=True, **flags) as made:
        assert sum(checked_steps(made, requests(4))) > 20
        assert made.core.scheduler.counters.retractions > 0


@over_shapes
@over_algorithms
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_cached_prefix_has_it_for_the_token_that_follows(
    models: Models, algorithm: DraftAlgorithm, shape: SpecShape, page_size: int
) -> None:
    """Prompts that begin alike and go on differently, at a page's end and inside one."""
    base = [(3 * j * j + j) % VOCAB for j in range(37)]
    params = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    prompts = [base, base[:32], [*base[:32], 1, 2], [*base[:20], 4, 5], [*base, 6, 7], base[:36]]
    flags = {"disable_overlap_schedule": True, "page_size": page_size, "chunked_prefill_size": 13}
    with draft_core(models, algorithm, shape, **flags) as made:
        for i, prompt in enumerate(prompts):
            before = made.core.scheduler.counters.cached_tokens
            assert sum(checked_steps(made, [request(f"r{i}", prompt, params)])) > 0
            cached = made.core.scheduler.counters.cached_tokens - before
            shared = (0, 32, 32, 20, 37, 36)[i]
            assert cached >= shared - page_size - 1 if i else cached == 0


@over_shapes
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_only_a_page_end_inside_a_cached_prefix_may_be_another_ones(
    models: Models, algorithm: DraftAlgorithm, shape: SpecShape
) -> None:
    """The second prompt leaves the first at a page's end, the third follows the second: its
    output is exact, and so is its draft KV but for that one position (decision 7)."""
    base = [(3 * j * j + j) % VOCAB for j in range(16)]
    follow = [(5 * j + 1) % VOCAB for j in range(17)]
    params = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    prompts = [[*base, 9, 8], [*base, *follow], [*base, *follow, 3, 3]]
    flags = {"disable_overlap_schedule": True, "page_size": 16}
    wanted = plain_tokens(models, [request("third", prompts[2], params)], **flags)
    with draft_core(models, algorithm, shape, **flags) as made:
        for i, prompt in enumerate(prompts[:2]):
            assert sum(checked_steps(made, [request(f"r{i}", prompt, params)])) > 0
        core, got, differs = made.core, list[int](), set[int]()
        assert core.submit(request("third", prompts[2], params)) is None
        while core.has_work:
            for output in core.step():
                got += i32(output.tokens).tolist()
            for running in core.scheduler.batch.running:
                length = int(made.runner.state.seq_lens[running.slot])
                text = running.request.tokens().tolist()
                if length == len(text) - 1:
                    kv = draft_kv_of(made, running.slot, length)
                    error = (kv - FreshDraft(made, text).kv).abs().amax(dim=(0, 1, 3, 4))
                    differs |= set((error > 1e-5).nonzero().flatten().tolist())
    assert got == wanted["third"]
    assert differs == {15}


def plain_tokens(
    models: Models, messages: list[GenerateRequest], **flags: object
) -> dict[str, list[int]]:
    """What the target alone says."""
    with draft_core(models, None, **flags) as made:
        return {rid: tokens_of(out) for rid, out in drive(made.core, messages).items()}


class Snapshot(NamedTuple):
    """A step's outputs, and lengths, accepted drafts and KV after it."""

    outputs: list[tuple[str, list[int]]]
    lens: list[int]
    accepted: int
    kv: list[torch.Tensor]


@over_algorithms
def test_a_chain_is_the_same_pass_by_pass_and_through_the_code_of_trees(
    models: Models, algorithm: DraftAlgorithm
) -> None:
    """Tokens, counts and the KV of both models, bit for bit, after every step."""
    shape, results = SpecShape(4, 1, 5), []
    makers = [f"{make.__module__}:{make.__name__}" for make in (chain_trees, chain_passes)]
    for make in (None, *makers):
        steps: list[Snapshot] = []
        with draft_core(models, algorithm, shape, make, disable_overlap_schedule=True) as made:
            core, draft = made.core, made.draft
            assert draft is not None
            for message in requests(4):
                assert core.submit(message) is None
            while core.has_work:
                outputs = [(o.rid, i32(o.tokens).tolist()) for o in core.step()]
                lens = made.runner.state.seq_lens.tolist()
                places = [slots_of(made, slot, length) for slot, length in enumerate(lens)]
                kv = [pool.data[:, :, p] for pool in (made.runner._kv, draft.kv) for p in places]
                accepted = core.scheduler.counters.spec_accepted_tokens
                steps.append(Snapshot(outputs, lens, accepted, kv))
            assert steps[-1].accepted > 3
        results.append(steps)
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            assert one[:3] == other[:3]
            assert all(map(torch.equal, one.kv, other.kv))


def slots_of(made: DraftCore, slot: int, length: int) -> torch.Tensor:
    """int64[length]: KV slots of a request slot's positions."""
    index, size = torch.arange(length), made.runner._kv.page_size
    return made.runner.state.page_table[slot][index // size].long() * size + index % size
