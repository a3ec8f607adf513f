"""The step driver over the GPU runner: on a GPU, or on a CPU in Triton's interpreter."""

from collections.abc import Iterable

import numpy as np
import torch

from outrider.engine.agreement import Ranks
from outrider.engine.gpu.device_step import DeviceStep
from outrider.engine.gpu.graphs import StepGraphs
from outrider.engine.gpu.packer import StepPacker
from outrider.engine.gpu.state import DeviceState
from outrider.engine.gpu.step_runner import GpuStepRunner
from outrider.engine.gpu.tiers import Tiers
from outrider.engine.kv_pool import KVPool
from outrider.engine.models import GpuModel
from outrider.engine.models.gpu_decoder import GpuDecoder
from outrider.engine.models.model import Reduce
from outrider.engine.weights import TensorSource
from outrider.engine_core.model_config import ModelConfig
from outrider.engine_core.plan import HostDrafts, StepPlan, StepResult

from ..driver import BigramModel, Driver

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class GpuBigram(BigramModel):
    """Logits that depend on the query token alone, on the device."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__(table.to(DEVICE))

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits(hidden)

    def tune(self, rows: Iterable[int]) -> None:
        """No matmuls."""


class GpuDriver(Driver):
    """Poisoned KV, and graphs where there is a GPU (unless ``graphs`` is False).

    ``recorder``: makes graphs without a GPU too. ``chunk``: most prompt tokens of a graph.
    """

    def __init__(
        self,
        source: TensorSource | GpuModel,
        config: ModelConfig,
        slots: int = 8,
        page_size: int = 4,
        max_tokens: int = 256 if DEVICE.type == "cuda" else 64,
        graphs: bool = True,
        dtype: torch.dtype = torch.float32,
        accept_length: float | None = None,
        reduce: Reduce | None = None,
        ranks: Ranks | None = None,
        recorder: type[StepGraphs] | None = None,
        width: int = 12,
        chunk: int = 0,
    ) -> None:
        self.pages = -(-max_tokens // page_size)
        self.kv = KVPool(slots * self.pages, page_size, config, dtype, DEVICE)
        self.kv.data.fill_(torch.nan)
        decides = ranks is None or ranks.leads
        model: GpuModel
        if isinstance(source, GpuModel):
            model = source
        else:
            model = GpuDecoder(source, config, dtype, DEVICE, reduce, decides)
        self.device_state = DeviceState(slots, self.pages, config.vocab_size, DEVICE, decides)
        step = DeviceStep(model, self.kv, self.device_state, accept_length, ranks=ranks)
        if recorder is None and DEVICE.type == "cuda":
            recorder = StepGraphs
        captured = recorder(step, DEVICE) if graphs and recorder is not None else None
        self.graphs, self.tiers = captured, Tiers(slots, width, chunk)
        self.gpu_runner = GpuStepRunner(
            step, StepPacker(slots, config.vocab_size), self.tiers, captured, DEVICE
        )
        self.step = 0
        order = np.random.default_rng(1).permutation(slots * self.pages) + 1
        self._order = order.reshape(slots, self.pages).tolist()

    @torch.inference_mode()
    def run(self, plan: StepPlan, drafts: HostDrafts | None = None) -> StepResult:
        self.step += 1
        return self.gpu_runner.result(self.gpu_runner.launch(plan, drafts, 0))

    def kv_of(self, slot: int) -> torch.Tensor:
        length = int(self.device_state.seq_lens[slot])
        index = torch.arange(length)
        pages = self.device_state.page_table[slot].cpu()[index // self.kv.page_size].long()
        return self.kv.data.cpu()[:, :, pages * self.kv.page_size + index % self.kv.page_size]
