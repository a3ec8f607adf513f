"""What drafters leave behind a step: their KV is that of a fresh prefill of the accepted text."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch

from outrider.engine_core import admission
from outrider.engine_core.controller import StepLengths
from outrider.engine_core.draft_config import DraftAlgorithm, SpecShape
from outrider.engine_core.ids import I32, i32
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.sampling_params import SamplingParams

from .cores import request
from .draft_cores import (
    ALGORITHMS,
    CHAIN,
    TREE,
    VOCAB,
    DraftCore,
    FreshDraft,
    Models,
    chain_trees,
    draft_core,
    draft_kv_of,
    write_models,
)

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
def test_pages_that_the_prefix_cache_gives_are_complete(
    models: Models, algorithm: DraftAlgorithm, shape: SpecShape, page_size: int
) -> None:
    """Prompts that share a beginning and go on differently, and one that is another's begin."""
    start = [(j * j + 3 * j) % VOCAB for j in range(38)]
    prompts = [start, [*start[:33], 1, 2, 3], [*start, 4, 5], start[:33], start]
    params = SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True)
    flags = {"disable_overlap_schedule": True, "page_size": page_size}
    with draft_core(models, algorithm, shape, **flags) as made:
        for i, prompt in enumerate(prompts):
            assert sum(checked_steps(made, [request(f"r{i}", prompt, params)])) > 2
        assert made.core.scheduler.counters.cached_tokens > 100


class Snapshot(NamedTuple):
    """A step's outputs, and lengths, accepted drafts and KV after it."""

    outputs: list[tuple[str, list[int]]]
    lens: list[int]
    accepted: int
    kv: list[torch.Tensor]


@over_algorithms
def test_a_chain_through_the_code_of_trees_is_the_same(
    models: Models, algorithm: DraftAlgorithm
) -> None:
    """Tokens, counts and the KV of both models, bit for bit, after every step."""
    shape, results = SpecShape(4, 1, 5), []
    for make in (None, f"{chain_trees.__module__}:{chain_trees.__name__}"):
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
    assert len(results[0]) == len(results[1])
    for one, other in zip(*results, strict=True):
        assert one[:3] == other[:3]
        assert all(map(torch.equal, one.kv, other.kv))


def slots_of(made: DraftCore, slot: int, length: int) -> torch.Tensor:
    """int64[length]: KV slots of a request slot's positions."""
    index, size = torch.arange(length), made.runner._kv.page_size
    return made.runner.state.page_table[slot][index // size].long() * size + index % size
