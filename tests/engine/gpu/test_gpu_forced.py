"""Forced drafts on the GPU's steps: with every drafter of the device or none, ahead of results."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from outrider.engine.gpu import forced_ahead
from outrider.engine.gpu import worker as gpu_worker
from outrider.engine.gpu.worker import GpuWorker
from outrider.engine_core import admission
from outrider.engine_core.assembly import Assembly
from outrider.engine_core.core import EngineCore
from outrider.engine_core.draft_config import DraftAlgorithm, SpecShape
from outrider.engine_core.grammar_spec import GrammarSpec
from outrider.engine_core.ids import RowKind, i32, u8
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.plan import StepPlan, StepResult
from outrider.engine_core.sampling_params import SamplingParams

from ..cores import drive, request, tokens_of
from ..draft_cores import CHAIN, TREE, Models, draft_core, write_models
from ..draft_cores import FreshDraft as Fresh
from ..letters import write_tokenizer
from . import test_gpu_block_steps, test_gpu_draft_steps
from .eager_graphs import EagerGraphs

Tokens = dict[str, list[int]]
FREE, LOOP = "[a-l]{3}", "(a(bcdl|ef)(ghi|jk[a-c]{2})){2,3}"
LONG = "abcdabcdefghijkl(ab|ghij){2}lkjihgfedcba"


class Folders(NamedTuple):
    models: Models
    block_target: Path
    tokenizer: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("forced")
    (folder / "block").mkdir()
    return Folders(
        write_models(folder),
        test_gpu_block_steps.write_target(folder / "block"),
        write_tokenizer(folder / "tokenizer"),
    )


def requests(count: int = 3) -> list[GenerateRequest]:
    """Some forced from the start, some that choose often; the last has no grammar."""
    made = []
    for i in range(count):
        text = (LONG, LOOP, FREE)[i % 3]
        params = SamplingParams(
            temperature=0.8 * (i % 2),
            seed=i,
            max_new_tokens=(40, 40, 10)[i % 3],
            grammar=GrammarSpec("regex", text) if i < count - 1 or count == 1 else None,
            ignore_eos=i == count - 1 and count > 1,
        )
        made.append(request(f"r{i}", [(3 * j + i) % 12 + 1 for j in range(2 + 5 * i)], params))
    return made


class Seen(NamedTuple):
    tokens: Tokens
    steps: int
    forced: int
    accepted: int
    waited: int


@contextmanager
def started(
    folders: Folders, algorithm: str | None, shape: SpecShape = CHAIN, **flags: Any
) -> Iterator[tuple[Assembly, GpuWorker]]:
    flags = {"tokenizer_path": str(folders.tokenizer), **flags}
    made: AbstractContextManager[tuple[Assembly, GpuWorker]]
    if algorithm in ("DFLASH", "DSPARK"):
        with blocks(folders, algorithm, **flags) as made_of_blocks:
            yield made_of_blocks
        return
    with drafts(folders.models, algorithm, shape, **flags) as of_drafts:
        yield of_drafts


def blocks(
    folders: Folders, algorithm: str, **flags: Any
) -> AbstractContextManager[tuple[Assembly, GpuWorker]]:
    return test_gpu_block_steps.started(folders.block_target, algorithm.lower(), **flags)


def drafts(
    models: Models, algorithm: Any, shape: SpecShape, **flags: Any
) -> AbstractContextManager[tuple[Assembly, GpuWorker]]:
    return test_gpu_draft_steps.started(models, algorithm, shape, **flags)


def run(
    folders: Folders,
    algorithm: str | None,
    messages: Sequence[GenerateRequest],
    shape: SpecShape = CHAIN,
    **flags: Any,
) -> Seen:
    with started(folders, algorithm, shape, **flags) as (assembly, worker):
        waited = 0
        waits = worker._runner.waits

        def counted(plan: StepPlan) -> bool:
            nonlocal waited
            found = waits(plan)
            waited += found
            return found

        worker._runner.waits = counted  # type: ignore[method-assign]
        outputs = drive(assembly.core, messages)
        counters, cache = assembly.core.scheduler.counters, assembly.core.scheduler.cache
        assert cache.available == cache.total
        return Seen(
            {rid: tokens_of(some) for rid, some in outputs.items()},
            counters.steps,
            counters.forced_drafts,
            counters.spec_accepted_tokens,
            waited,
        )


def undrafted(messages: Sequence[GenerateRequest]) -> list[GenerateRequest]:
    return [msgspec.structs.replace(message, speculative=False) for message in messages]


@pytest.fixture(scope="module")
def plain(folders: Folders) -> Seen:
    """Decoded without any drafts."""
    seen = run(folders, None, undrafted(requests()))
    assert seen.forced == seen.accepted == seen.waited == 0
    return seen


@pytest.mark.parametrize(
    "flags",
    [{}, {"disable_overlap_schedule": True}, {"page_size": 1}, {"max_running_requests": 1}],
    ids=lambda flags: ",".join(flags) or "default",
)
def test_without_a_drafter(folders: Folders, plain: Seen, flags: dict[str, Any]) -> None:
    seen = run(folders, None, requests(), **flags)
    assert seen.tokens == plain.tokens
    assert seen.forced == seen.accepted > 20  # nothing else could have been drafted
    assert seen.steps < plain.steps or "max_running_requests" in flags
    assert (seen.waited > 0) != ("disable_overlap_schedule" in flags)
