"""Whole cores on a CPU whose drafts come from tiny block drafts, built without a folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.kv_pool import KVPool
from outrider.engine.models import TargetModel
from outrider.engine.models.block_weights import BlockWeights, MarkovWeights
from outrider.engine.models.torch_block import TorchBlock
from outrider.engine.rank_worker import Site, find_site, load_rank, make_worker
from outrider.engine.speculative.block_drafter import BlockDrafter
from outrider.engine.step import StepRunner
from outrider.engine.worker import TorchWorker
from outrider.engine_core.assembly import assemble
from outrider.engine_core.config import EngineConfig, is_speculation, resolve_config
from outrider.engine_core.core import EngineCore
from outrider.engine_core.draft_config import DraftConfig, SpecShape
from outrider.engine_core.draft_source import DraftSource
from outrider.engine_core.model_config import ModelConfig, load_model_config
from outrider.engine_core.refusal import Refused
from outrider.engine_core.step_times import StepTimes

from .block_nets import block_config, random_tensors, weights_of
from .cores import tiny_config
from .steps import Pages, Query, Sequence, make_batch
from .tiny import write_checkpoint

CPU = torch.device("cpu")
VOCAB = 16
TIMES = StepTimes([1, 64], [1e-3, 2e-3])
DRAFTS = ("dflash", "dspark", "random-dspark")


def write_target(folder: Path) -> Path:
    """A target whose next token follows mostly from the newest one."""
    path = write_checkpoint(folder, VOCAB, scale=0.4) / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name] *= 0.15
    save_file(tensors, path)
    return folder


def draft_config(name: str, target: ModelConfig, drafts: int = 3) -> DraftConfig:
    model = msgspec.structs.replace(target, context_length=target.context_length + 128)
    if name == "dflash":
        return block_config((0, 9), (False, True), drafts, 1, None, (1, 2), model)
    return block_config(
        (0,), (False,), drafts, 0, "vanilla", (1, 2), model, confidence=True,
        confidence_with_markov=True,
    )  # fmt: skip


def draft_weights(name: str, config: DraftConfig, target: TargetModel) -> BlockWeights:
    """Random ones; "dspark"'s Markov head knows which token the target puts behind each."""
    weights = weights_of(config, random_tensors(config))
    if name != "dspark":
        return weights
    scratch = msgspec.structs.replace(config.model, num_hidden_layers=2)
    vocab = config.model.vocab_size
    rows = []
    for token in range(vocab):
        kv = KVPool(1, 16, scratch, torch.float32, CPU)
        batch = make_batch([Query(Sequence(), [token])], Pages(1, 16, 0))
        rows.append(target.logits(target.forward(batch, kv))[0].clone())
    table = torch.stack(rows)
    weights.markov = MarkovWeights(torch.eye(vocab), 20 * table.t().contiguous())
    assert weights.confidence is not None
    weights.confidence.weight = torch.ones(config.model.hidden_size + vocab)
    return weights


class BlockCore:
    """A core, its worker and what they draft with."""

    def __init__(self, core: EngineCore, worker: TorchWorker) -> None:
        self.core = core
        self.worker = worker

    @property
    def runner(self) -> StepRunner:
        return self.worker._runner

    @property
    def drafter(self) -> BlockDrafter:
        drafts = self.runner._drafts
        assert drafts is not None
        assert isinstance(drafts.drafter, BlockDrafter)
        return drafts.drafter


Change = Callable[[BlockWeights], None]


@contextmanager
def block_core(
    target: Path,
    name: str | None,
    drafts: int = 3,
    change: Change | None = None,
    times: StepTimes = TIMES,
    /,
    **flags: object,
) -> Iterator[BlockCore]:
    """A core that drafts with one of DRAFTS, or with none; ``change`` edits its weights."""
    plain = {flag: value for flag, value in flags.items() if not is_speculation(flag)}
    site: Site = find_site(tiny_config(target, None, **plain))
    loaded = load_rank(site)
    config: EngineConfig = site.config
    if name is not None:
        made = draft_config(name, load_model_config(target), drafts)
        assert made.block is not None
        count = made.block.drafts
        shape = SpecShape(count, 1, count + 1)
        weights = draft_weights(name, made, loaded.model)
        if change is not None:
            change(weights)
        net = TorchBlock(weights, made, loaded.model, torch.float32, CPU)
        config = tiny_config(
            target,
            made.algorithm,
            speculative_draft_model_path=str(target),
            speculative_num_steps=count,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=count + 1,
            **flags,
        )
        source = DraftSource(target, made, shape, "auto", {}, "", None)
        site = replace(site, config=config, draft=source)
        loaded = replace(loaded, site=site, draft=net)
    worker = make_worker(loaded, site.plan.num_pages)
    assert isinstance(worker, TorchWorker)
    try:
        resolved = resolve_config(config, worker.info())
        assert not isinstance(resolved, Refused), str(resolved)
        worker.prepare(resolved)
        made_core = assemble(resolved, worker, times, None, None)
        yield BlockCore(made_core.core, worker)
    finally:
        worker.shutdown()
