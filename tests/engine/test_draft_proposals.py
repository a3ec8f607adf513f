"""What drafters propose, against trees from their definition over a draft model run afresh."""

from functools import partial
from typing import NamedTuple

import pytest

from outrider.engine.speculative.device_drafter import DraftRows
from outrider.engine_core.draft_config import DraftAlgorithm, SpecShape
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.sampling_params import SamplingParams

from ..reference import draft_tree_ref as ref
from .cores import request
from .draft_cores import (
    ALGORITHMS,
    VOCAB,
    DraftCore,
    FreshDraft,
    Models,
    draft_core,
    text_of,
    write_models,
)


class Proposed(NamedTuple):
    """A row's drafts, as the drafter left them, and the text that they continue."""

    text: list[int]
    cap: int
    tokens: list[int]
    parents: list[int]
    depth: int


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return write_models(tmp_path_factory.mktemp("drafts"))


def requests() -> list[GenerateRequest]:
    return [
        request(
            f"r{i}",
            [(i * j + j + 1) % VOCAB for j in range(4 + 7 * i)],
            SamplingParams(temperature=0.0, max_new_tokens=9 + i, ignore_eos=True),
        )
        for i in range(3)
    ]


def proposals(made: DraftCore, monkeypatch: pytest.MonkeyPatch) -> list[Proposed]:
    """Everything that a core's drafter proposes for some requests; their pages must reach."""
    found: list[Proposed] = []
    drafter = made.drafter
    propose = drafter.propose

    def watched(rows: DraftRows) -> None:
        propose(rows)
        bounds = rows.cu_q.tolist()
        for row, slot in enumerate(rows.slots.tolist()):
            count, depth = int(rows.proposed[row]), int(rows.depths[row])
            begin = bounds[row] + 1
            place = slice(begin, begin + count)
            text = text_of(made, slot)
            assert int(rows.seq_lens[slot]) == len(text) - 1
            tokens, parents = rows.tokens[place].tolist(), rows.parents[place].tolist()
            found.append(Proposed(text, int(rows.caps[row]), tokens, parents, depth))

    monkeypatch.setattr(drafter, "propose", watched)
    core = made.core
    for message in requests():
        assert core.submit(message) is None
    while core.has_work:
        core.step()
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "shape",
    [SpecShape(1, 1, 2), SpecShape(4, 1, 5), SpecShape(1, 3, 4), SpecShape(3, 2, 6),
     SpecShape(3, 4, 10), SpecShape(4, 3, 16)],
    ids=str,
)  # fmt: skip
def test_drafts_are_those_of_their_definition(
    models: Models, algorithm: DraftAlgorithm, shape: SpecShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"disable_overlap_schedule": True, "page_size": 64}
    with draft_core(models, algorithm, shape, **flags) as made:
        found = proposals(made, monkeypatch)
        branching = 0
        for text, cap, tokens, parents, depth in found:
            fresh = FreshDraft(made, text)
            best = partial(fresh.best, width=shape.topk)
            steps = min(shape.steps, cap)
            if shape.topk == 1:
                assert tokens == ref.chain(best, steps)
                assert (parents, depth) == (list(range(steps)), steps)
            else:
                candidates = ref.grow(best, shape.steps, shape.topk)
                assert (tokens, parents, depth) == ref.choose(candidates, cap)
                branching += len(set(parents)) < len(parents)
    assert len({some.cap for some in found}) > 1 or shape.num_draft_tokens == 2
    assert len(found) > 10
    assert branching > 8 or shape.topk == 1
