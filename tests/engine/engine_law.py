"""The joint law of tokens of engines put together by their own builder, on any device.

An engine that computes in bfloat16 is held to its own law: log-probabilities of each prefix, by
plain decoding. What is left between the two is rounding by other shapes, as a row's bits depend on
the tokens beside it. The logits' standard deviation is about 0.5, so a last bit of the largest is
2**-7 and an error of 0.01 at temperature 1.5 puts a probability off by 0.7 %. Were all of three
tokens' cells off by that much, and always the same way, the chi-square of 9,000 draws would grow
by 9,000 * 3 * 0.007**2 = 1.3, where its own standard deviation is 20 (of 215 cells).
Filters are left out: at a cut a last bit decides whether a token is possible at all.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import pytest
import torch

from outrider.engine.models.cpu_decoder import NativeDecoder
from outrider.engine.models.cpu_draft import NativeDraft
from outrider.engine.models.torch_decoder import TorchDecoder
from outrider.engine.models.torch_draft import TorchDraft
from outrider.engine.worker import GraphWorker, TorchWorker
from outrider.engine_core.config import EngineConfig
from outrider.engine_core.core import EngineCore
from outrider.engine_core.draft_config import DraftAlgorithm, SpecShape
from outrider.engine_core.worker import Worker

from .block_checkpoints import write_block
from .cores import random_draft_core, running_engine, tiny_config
from .draft_checkpoints import write_eagle, write_eagle3, write_standalone
from .draft_cores import CHAIN, Models, draft_flags
from .drafted_law import Drawn
from .joint_law import WARM, Prefix, behind_the_first, draw, folder_of, joint_of

# Random chains and trees of the host, its n-grams, and draft models.
Drafts = Literal["random-chain", "random-tree", "NGRAM"] | DraftAlgorithm
MODELS: tuple[DraftAlgorithm, ...] = get_args(DraftAlgorithm)
LENGTHS = {6: 4, 16: 3}  # tokens of a vocabulary's cells, and the one before, which nobody drafts
MORE = 2  # tokens behind them, so that few rows are short of room
SIZES = {"hidden": 64, "inner": 96, "heads": 4, "kv_heads": 2, "head_dim": 16}


class Machine(NamedTuple):
    """Where an engine runs, and what it computes in. ``rounded``: a CPU's logits, those of the
    target and those that drafts are drawn by, are rounded to bfloat16."""

    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    rounded: bool = False

    def flags(self) -> dict[str, object]:
        """Graphs of the GPU hold every step: 64 verify rows, or 32 prompts of three tokens."""
        return {
            "device": self.device, "dtype": self.dtype, "max_running_requests": 64,
            "max_total_tokens": 8192, "chunked_prefill_size": 96,
        }  # fmt: skip


@contextmanager
def rounded_logits() -> Iterator[Counter[str]]:
    """Meanwhile CPU models round their logits; counts how often, by class."""
    seen: Counter[str] = Counter()

    def rounding(true: Callable[..., torch.Tensor]) -> object:
        def logits(net: object, rows: torch.Tensor) -> torch.Tensor:
            found = true(net, rows)
            seen[type(net).__name__] += 1
            return found.copy_(found.bfloat16())

        return logits

    with pytest.MonkeyPatch.context() as patched:
        for owner in (TorchDecoder, NativeDecoder, TorchDraft, NativeDraft):
            patched.setattr(owner, "logits", rounding(owner.logits))
        yield seen


@lru_cache
def write_models(place: Path, vocab: int) -> Models:
    """A target and drafts of all kinds, right often enough and wrong often enough."""
    target = folder_of(place, vocab, **SIZES)
    block = partial(write_block, target=target, layer_ids=(0, 1), layers=1)
    return Models(
        target,
        {
            "STANDALONE": write_standalone(place / f"standalone{vocab}", target, noise=1.0),
            "EAGLE": write_eagle(place / f"eagle{vocab}", target),
            "EAGLE3": write_eagle3(place / f"eagle3{vocab}", target, draft_vocab=vocab * 3 // 4),
            "DFLASH": block(place / f"dflash{vocab}", algorithm="DFLASH", size=4),
            "DSPARK": block(place / f"dspark{vocab}", algorithm="DSPARK", size=3, rank=8),
        },
    )


@lru_cache
def law_of(machine: Machine, place: Path, vocab: int) -> dict[Prefix, float]:
    """That of all tokens behind the first, by the machine's engine without drafts."""
    target = write_models(place, vocab).target
    return behind_the_first(joint_of(target, vocab, LENGTHS[vocab], WARM, **machine.flags()))


def engine_config(
    machine: Machine, models: Models, drafts: Drafts, shape: SpecShape, **flags: object
) -> EngineConfig:
    """One of the machine's engines that drafts; ``flags`` ask for its rule."""
    flags = {**machine.flags(), **flags}
    if drafts not in MODELS:
        return tiny_config(models.target, "NGRAM", speculative_num_draft_tokens=6, **flags)
    return tiny_config(models.target, drafts, **draft_flags(models, drafts, shape), **flags)


@contextmanager
def opened(config: EngineConfig, drafts: Drafts) -> Iterator[EngineCore]:
    """The running core; NGRAM's proposer gives way to random drafts."""
    if drafts in ("random-chain", "random-tree"):
        with random_draft_core(config, drafts == "random-tree") as core:
            yield core
    else:
        with running_engine(config) as engine:
            yield engine.core


def drawn(
    machine: Machine,
    place: Path,
    drafts: Drafts,
    vocab: int,
    shape: SpecShape = CHAIN,
    share: float | None = None,
    /,
    **flags: object,
) -> Drawn:
    """Pairs of a vocabulary of 16, triples of one of 6, behind the first token.

    ``share``: so many of all drafts are verified, those of which confidence is surest.
    """
    models = write_models(place, vocab)
    if not machine.rounded:
        return drawn_as_it_is(machine, models, place, drafts, vocab, shape, share, **flags)
    with rounded_logits() as seen:
        found = drawn_as_it_is(machine, models, place, drafts, vocab, shape, share, **flags)
    assert seen.total() > 500
    return found


def drawn_as_it_is(
    machine: Machine,
    models: Models,
    place: Path,
    drafts: Drafts,
    vocab: int,
    shape: SpecShape,
    share: float | None,
    /,
    **flags: object,
) -> Drawn:
    """``drawn``, with logits as models make them now."""
    law = law_of(machine, place, vocab)
    with opened(engine_config(machine, models, drafts, shape, **flags), drafts) as core:
        assert_computes(core._worker, machine, drafts in MODELS)
        if share is not None:
            assert core.scheduler.verify is not None
            core.scheduler.verify.planner.force(share)
        length = LENGTHS[vocab]
        found = Counter(tokens[1:] for tokens in draw(core, length, more=MORE))
        counters = core.scheduler.counters
        assert_replayed(core._worker, machine)
    assert counters.spec_accepted_tokens > 1_000
    assert counters.spec_draft_tokens > 1_000 + counters.spec_accepted_tokens
    return Drawn(found, law, counters)


def assert_computes(worker: Worker, machine: Machine, has_draft: bool) -> None:
    """The worker's weights, its KV and those of its draft are of the machine's type, there."""
    assert (worker.info().device, worker.info().dtype) == machine[:2]
    dtype: torch.dtype = getattr(torch, machine.dtype)
    if machine.device == "cpu":
        assert isinstance(worker, TorchWorker)
        return
    # Loads triton, which machines without a GPU need not have.
    from outrider.engine.gpu.worker import GpuWorker
    from outrider.engine.models.gpu_decoder import GpuDecoder

    assert isinstance(worker, GpuWorker)
    assert isinstance(worker._model, GpuDecoder)
    tensors = [worker._model.embedding, worker._model.output_head, worker._kv.data]
    assert has_draft == (worker._draft is not None)
    if worker._draft is not None:
        tensors.append(worker._draft.kv.data)
        assert worker._draft.net.dtype == dtype
    assert all(tensor.dtype == dtype and tensor.is_cuda for tensor in tensors)


def assert_replayed(worker: Worker, machine: Machine) -> None:
    """On a GPU nearly all steps were CUDA graphs', those beside prompts too."""
    if machine.device == "cuda":
        assert isinstance(worker, GraphWorker)
        counts = worker.counts
        steps = counts.decode_steps + counts.prefill_steps
        assert counts.replays + counts.prefill_replays > 0.9 * steps > 100, counts
