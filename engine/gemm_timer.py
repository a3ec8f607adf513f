"""Times the matmuls of a model on its own weights, for the table of choices."""

# mypy: disable-error-code="no-untyped-call"

import itertools
import statistics
from collections.abc import Mapping, Sequence

import torch
import triton

from ..kernels.linear_config import shortlist
from ..kernels.linear_gpu import INTERLEAVE, LinearConfig, linear, linear_silu_mul
from ..kernels.split_workspace import SplitWorkspace
from ..kernels.stream_config import stream_shortlist
from .dependent_launch import launches_dependents
from .gemm_table import GemmKey, Machine

_GRAPH_BYTES = 400 << 20  # of weights that one timed graph streams: several times L2
_REPLAYS = 5


def this_machine() -> Machine:
    """The current CUDA device and the versions of torch and triton."""
    return Machine(torch.cuda.get_device_name(), str(torch.__version__), triton.__version__)


def candidates(key: GemmKey) -> Sequence[LinearConfig]:
    """What is worth measuring on the current CUDA device."""
    device = torch.cuda.get_device_properties()
    sms = device.multi_processor_count
    if device.major == 9:
        gated = key.epilogue == "silu_mul"
        return stream_shortlist(key.n, key.k, key.m_tier, gated=gated, sms=sms)
    return shortlist(key.n, key.k, key.m_tier, 2, sms)


class GemmTimer:
    """A ``Measure``: the median seconds of a matmul in a CUDA graph that cycles through weights.

    ``weights`` holds the model's matrices by shape (n, k), so that a shape's layers together are
    larger than L2 and no memory is needed for copies. ``block``: how gate and up rows are
    interleaved.
    """

    def __init__(
        self,
        weights: Mapping[tuple[int, int], Sequence[torch.Tensor]],
        block: int = INTERLEAVE,
    ) -> None:
        self._weights = weights
        self._block = block

    def __call__(self, key: GemmKey, config: LinearConfig | None) -> float:
        """Seconds of one call at the key's tier (at half of it for the lowest)."""
        weights = self._weights[key.n, key.k]
        count = max(4, _GRAPH_BYTES // (weights[0].numel() * weights[0].element_size()))
        rows = 8 if key.m_tier == 16 else key.m_tier
        x = torch.randn(rows, key.k, device=weights[0].device).to(weights[0].dtype)
        # Behind cuBLAS it is the norm that adds the residual, at next to no cost.
        adds = key.epilogue == "residual" and config is not None
        residual = x.new_zeros(rows, key.n) if adds else None
        pdl = launches_dependents(x.device)
        workspace = None
        if config is not None:
            need = SplitWorkspace.need(rows, key.n, key.k, config)
            workspace = SplitWorkspace(x.device, *need)

        def call(weight: torch.Tensor) -> None:
            if key.epilogue == "silu_mul":
                linear_silu_mul(
                    x, weight, block=self._block, config=config, workspace=workspace, pdl=pdl
                )
            else:
                linear(x, weight, None, residual, config=config, workspace=workspace, pdl=pdl)

        # Compiles and loads before the capture, which could not.
        call(weights[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in itertools.islice(itertools.cycle(weights), count):
                call(weight)
        graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
        return float(statistics.median(times)) / 1e3 / count
