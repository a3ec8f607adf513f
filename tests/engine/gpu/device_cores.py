"""Whole cores over the GPU worker, on a GPU or in the interpreter, with a model that reads KV."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch

from outrider.engine.agreement import Ranks
from outrider.engine.forward_batch import ForwardBatch
from outrider.engine.gpu.worker import GpuWorker
from outrider.engine.kv_pool import KVPool
from outrider.engine.models import GpuModel
from outrider.engine.models.block_net import BlockNet
from outrider.engine.models.draft_net import DraftNet
from outrider.engine.speculative import block_drafter, eagle_drafter, standalone_drafter
from outrider.engine.speculative.device_drafter import LoadedModel, loaded_model
from outrider.engine.speculative.gpu_draft_ops import gpu_draft_ops
from outrider.engine.window_pages import WindowPages
from outrider.engine_core.assembly import Assembly, assemble
from outrider.engine_core.config import EngineConfig, resolve_config
from outrider.engine_core.draft_config import SpecShape
from outrider.engine_core.draft_window import window_pool
from outrider.engine_core.model_config import ModelConfig
from outrider.engine_core.refusal import Refused
from outrider.engine_core.step_times import StepTimes
from outrider.engine_core.trace import TraceWriter
from outrider.engine_core.worker import WorkerInfo

from .gpu_driver import DEVICE

CONTEXT, SLOTS, SPARE_TOKENS = 120, 8, 40


class KvModel:
    """Logits are a hash of the last three tokens, which it reads back from the KV pool.

    So a wrong page, position or unmoved entry shows in the tokens. Its texts soon repeat.
    """

    weight_bytes = 1
    dtype = torch.float32

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.table = torch.randn(97, vocab_size, generator=torch.Generator().manual_seed(11))

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        assert batch.slots is not None
        cache, size = kv.data[0, 0, :, 0, 0], kv.page_size
        cache[batch.kv_slots] = batch.input_ids.float()
        out = torch.zeros(len(batch.input_ids), 1, device=cache.device)
        bounds, ids = batch.cu_q.tolist(), batch.input_ids.tolist()
        for row, slot in enumerate(batch.slots.tolist()):
            begin, end = bounds[row], bounds[row + 1]
            start = int(batch.kv_lens[row]) - (end - begin)
            tail = range(max(0, start - 3), start)
            pages = batch.page_table[slot].tolist()
            before = [int(cache[pages[i // size] * size + i % size]) for i in tail]
            for i in range(end - begin):
                bits = int(batch.tree_bits[begin + i]) if batch.is_tree[row] else -1
                own = [ids[begin + j] for j in range(i + 1) if bits >> j & 1]
                assert int(batch.positions[begin + i]) == start + len(own) - 1
                a, b, c = [0, 0, *before, *own][-3:]
                out[begin + i] = (a * 31 + b * 7 + c * 3) % 97
        return out

    def forward_capture(
        self, batch: ForwardBatch, kv: KVPool, capture_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("no drafter reads hidden states here")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.raw_logits(hidden)

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.table.to(hidden.device)[hidden[:, 0].long()].contiguous()

    def tune(self, rows: Iterable[int]) -> None:
        pass


@contextmanager
def drafting_on_the_gpu() -> Iterator[None]:
    """Drafters that are made meanwhile draft with the GPU's kernels, also in the interpreter.

    A CPU's core belongs outside: where there is a GPU, those kernels take nothing of a CPU.
    """
    with pytest.MonkeyPatch.context() as patched:
        for module in (block_drafter, eagle_drafter, standalone_drafter):
            patched.setattr(module, "draft_ops", gpu_draft_ops)
        yield


@contextmanager
def device_core(
    model: GpuModel,
    model_config: ModelConfig,
    *,
    page_size: int = 16,
    pool_tokens: int = 640,
    trace: TraceWriter | None = None,
    ranks: Ranks | None = None,
    draft: tuple[DraftNet | BlockNet, SpecShape] | None = None,
    **flags: object,
) -> Iterator[tuple[Assembly, GpuWorker]]:
    """An assembled core on a GpuWorker; the step times say that drafts are cheap.

    ``draft``: the draft model of the flags' algorithm, and how it drafts.
    """
    fields: dict[str, object] = {
        "max_running_requests": SLOTS // 2,
        "speculative_length_policy": "fixed" if "speculative_algorithm" in flags else "auto",
        **flags,
    }
    config = EngineConfig(model="m", page_size=page_size, **fields)  # type: ignore[arg-type]
    kv = KVPool(pool_tokens // page_size, page_size, model_config, model.dtype, DEVICE)
    kv.data.fill_(torch.nan)
    info = WorkerInfo(
        vocab_size=model_config.vocab_size,
        context_length=CONTEXT,
        num_pages=kv.num_pages,
        page_size=page_size,
        max_slots=SLOTS,
        eos_ids=(0,),
        weight_bytes=1,
        kv_bytes_per_token=8,
        num_threads=1,
        device=DEVICE.type,
        dtype="float32",
    )
    pages = -(-(CONTEXT + SPARE_TOKENS) // page_size)
    loaded: LoadedModel | None = None
    if draft is not None:
        net, shape = draft
        width, count = shape.num_draft_tokens, kv.num_pages
        pool, window = window_pool(config, CONTEXT, page_size, width), None
        if pool is not None:
            window = WindowPages(pool, width, count, page_size, SLOTS + 1, DEVICE)
            count = pool.pages - 1
        drafts = KVPool(count, page_size, net.config.model, net.dtype, DEVICE)
        # Rows that do not draft read what was never written: no NaN, which the interpreter refuses.
        drafts.data.fill_(100.0)
        loaded = loaded_model(net, drafts, shape, window)
    worker = GpuWorker(info, config, model, kv, pages, ranks, loaded)
    resolved = resolve_config(config, info)
    assert not isinstance(resolved, Refused), str(resolved)
    worker.prepare(resolved)
    times = StepTimes([1, 100], [1e-3, 1.1e-3])
    try:
        yield assemble(resolved, worker, times, None, trace), worker
    finally:
        worker.shutdown()
