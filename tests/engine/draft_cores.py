"""Whole cores on a CPU whose drafts come from tiny draft models."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.forward_batch import ForwardBatch
from outrider.engine.kv_pool import KVPool
from outrider.engine.models.draft_net import DraftHidden
from outrider.engine.rank_worker import find_site, load_rank, make_worker
from outrider.engine.speculative.device_drafter import DrafterContext, LoadedDraft
from outrider.engine.speculative.eagle_drafter import EagleDrafter
from outrider.engine.speculative.standalone_drafter import StandaloneDrafter
from outrider.engine.step import StepRunner
from outrider.engine.worker import TorchWorker
from outrider.engine_core.assembly import assemble
from outrider.engine_core.config import resolve_config
from outrider.engine_core.core import EngineCore
from outrider.engine_core.draft_config import DraftAlgorithm, SpecShape
from outrider.engine_core.model_config import ModelConfig
from outrider.engine_core.refusal import Refused
from outrider.engine_core.step_times import StepTimes

from .cores import tiny_config
from .draft_checkpoints import write_eagle, write_eagle3, write_standalone
from .tiny import write_checkpoint

CPU = torch.device("cpu")
ALGORITHMS: tuple[DraftAlgorithm, ...] = ("STANDALONE", "EAGLE", "EAGLE3")
VOCAB = 16
CHAIN, TREE = SpecShape(3, 1, 4), SpecShape(3, 4, 8)


def chain_trees(context: DrafterContext) -> EagleDrafter | StandaloneDrafter:
    """Drafters that draft chains through the code of trees."""
    assert isinstance(context.draft, LoadedDraft)
    if context.draft.net.config.algorithm == "STANDALONE":
        return StandaloneDrafter(context, context.draft, trees=True)
    return EagleDrafter(context, context.draft, trees=True)


def chain_passes(context: DrafterContext) -> EagleDrafter | StandaloneDrafter:
    """Drafters that run their nets pass by pass, whatever these can do at once."""
    assert isinstance(context.draft, LoadedDraft)
    if context.draft.net.config.algorithm == "STANDALONE":
        return StandaloneDrafter(context, context.draft)
    drafter = EagleDrafter(context, context.draft)
    assert drafter._native is not None
    drafter._native = None
    return drafter


class Models(NamedTuple):
    """A target's folder, and its drafts' by algorithm."""

    target: Path
    drafts: dict[DraftAlgorithm, Path]


def write_models(folder: Path) -> Models:
    """A target over VOCAB tokens and drafts that are sometimes right."""
    target = _weaken(write_checkpoint(folder / "target", VOCAB, scale=0.4))
    return Models(
        target,
        {
            "STANDALONE": write_standalone(folder / "standalone", target, noise=0.3),
            "EAGLE": write_eagle(folder / "eagle", target, agrees=True),
            "EAGLE3": write_eagle3(folder / "eagle3", target, draft_vocab=12, seed=7),
        },
    )


def _weaken(target: Path) -> Path:
    """Make what a target's layers add small beside the embedding, so that tokens tell much."""
    path = target / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name] *= 0.15
    save_file(tensors, path)
    return target


class DraftCore(NamedTuple):
    """A core, its worker, and what the worker runs on."""

    core: EngineCore
    worker: TorchWorker
    runner: StepRunner
    model_config: ModelConfig
    draft: LoadedDraft | None

    @property
    def drafter(self) -> EagleDrafter | StandaloneDrafter:
        drafts = self.runner._drafts
        assert drafts is not None
        assert isinstance(drafts.drafter, EagleDrafter | StandaloneDrafter)
        return drafts.drafter


def draft_flags(models: Models, algorithm: DraftAlgorithm, shape: SpecShape) -> dict[str, object]:
    """What names a draft, and how much it drafts."""
    return {
        "speculative_draft_model_path": str(models.drafts[algorithm]),
        "speculative_num_steps": shape.steps,
        "speculative_eagle_topk": shape.topk,
        "speculative_num_draft_tokens": shape.num_draft_tokens,
    }


@contextmanager
def draft_core(
    models: Models,
    algorithm: DraftAlgorithm | None,
    shape: SpecShape = CHAIN,
    make: str | None = None,
    /,
    **flags: object,
) -> Iterator[DraftCore]:
    """A core that drafts with ``algorithm``, or with none; ``make`` names its drafter's maker."""
    if algorithm is not None:
        flags = {**draft_flags(models, algorithm, shape), **flags}
    site = find_site(tiny_config(models.target, algorithm, **flags))
    worker = make_worker(load_rank(site), site.plan.num_pages)
    assert isinstance(worker, TorchWorker)
    try:
        resolved = resolve_config(site.config, worker.info())
        assert not isinstance(resolved, Refused), str(resolved)
        if make is not None and resolved.drafter is not None:
            drafter = msgspec.structs.replace(resolved.drafter, implementation=make)
            resolved = msgspec.structs.replace(resolved, drafter=drafter)
        worker.prepare(resolved)
        made = assemble(resolved, worker, StepTimes([1, 64], [1e-3, 2e-3]), None, None)
        draft = worker._draft
        assert draft is None or isinstance(draft, LoadedDraft)
        yield DraftCore(made.core, worker, worker._runner, site.whole, draft)
    finally:
        worker.shutdown()


class FreshDraft:
    """The draft model over a text of its own: one prefill, and tokens drafted behind it.

    ``tokens``: N and, behind them, the newest one, whose KV the target does not have yet. ``kv``
    [layers, 2, N, heads, head_dim]: draft KV of positions 0..N-1.
    """

    def __init__(self, made: DraftCore, tokens: Sequence[int]) -> None:
        assert made.draft is not None
        self.net, size = made.draft.net, made.draft.kv.page_size
        ids, self._count = torch.tensor(tokens), len(tokens) - 1
        self._pool = KVPool(
            -(-len(ids) // size) + 2, size, self.net.config.model, self.net.dtype, CPU
        )
        batch, hidden = self._row(ids[:-1], 0), None
        if self.net.config.algorithm != "STANDALONE":
            target, site = made.runner._model, made.model_config
            scratch = KVPool(self._pool.num_pages, size, site, torch.float32, CPU)
            layers = self.net.config.feature_layers
            final, features = target.forward_capture(batch, scratch, layers)
            hidden = self.net.fuse(features if layers else final)
            batch.input_ids = ids[1:]
        self._answer = self._keep(self.net.forward(batch, hidden, self._pool))
        self._newest = int(ids[-1])
        self.kv = self._pool.data[:, :, batch.kv_slots].clone()

    def best(self, path: tuple[int, ...], width: int) -> list[tuple[int, float]]:
        """The likeliest tokens behind the text and ``path``, with their probabilities."""
        recurrent, head_input = self._answer
        alone = self.net.config.algorithm == "STANDALONE"
        for i, token in enumerate((self._newest, *path) if alone else path):
            batch = self._row(torch.tensor([token]), self._count + i)
            out = self.net.forward(batch, None if alone else recurrent, self._pool)
            recurrent, head_input = self._keep(out)
        probs = torch.softmax(self.net.logits(head_input).float()[0], 0)
        ids = torch.sort(probs, descending=True, stable=True).indices[:width]
        names = ids if self.net.token_ids is None else self.net.token_ids[ids]
        return list(zip(names.tolist(), probs[ids].tolist(), strict=True))

    def _keep(self, out: DraftHidden) -> tuple[torch.Tensor, torch.Tensor]:
        return out.recurrent[-1:].clone(), out.head_input[-1:].clone()

    def _row(self, ids: torch.Tensor, start: int) -> ForwardBatch:
        """One plain row from position ``start`` on; pages 1, 2, ... in order."""
        place = start + torch.arange(len(ids))
        return ForwardBatch(
            input_ids=ids,
            positions=place,
            kv_slots=self._pool.page_size + place,
            cu_q=torch.tensor([0, len(ids)], dtype=torch.int32),
            kv_lens=torch.tensor([start + len(ids)], dtype=torch.int32),
            page_table=torch.arange(1, self._pool.num_pages + 1, dtype=torch.int32)[None],
            tree_bits=torch.zeros(len(ids), dtype=torch.int64),
            is_tree=torch.zeros(1, dtype=torch.uint8),
            logits_index=torch.tensor([len(ids) - 1]),
        )


def draft_kv_of(made: DraftCore, slot: int, count: int) -> torch.Tensor:
    """[layers, 2, count, heads, head_dim]: what the drafter holds of a slot's first positions."""
    assert made.draft is not None
    index, size = torch.arange(count), made.draft.kv.page_size
    pages = made.runner.state.page_table[slot][index // size].long()
    return made.draft.kv.data[:, :, pages * size + index % size].clone()


def text_of(made: DraftCore, slot: int) -> list[int]:
    """All tokens that the core knows of a running request in a slot."""
    for running in made.core.scheduler.batch.running:
        if running.slot == slot:
            return [int(token) for token in running.request.tokens()]
    raise AssertionError(f"nobody runs in slot {slot}")
