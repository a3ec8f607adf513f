"""Times the matmuls of a model on its own weights, for the table of choices."""

# mypy: disable-error-code="no-untyped-call"

import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton

from ..kernels.linear_config import shortlist
from ..kernels.linear_gpu import INTERLEAVE, LinearConfig, linear, linear_silu_mul
from ..kernels.split_workspace import SplitWorkspace
from ..kernels.stream_config import stream_shortlist
from .dependent_launch import launches_dependents
from .gemm_table import Choices, Epilogue, GemmKey, Machine

_GRAPH_BYTES = 400 << 20  # of weights that one timed graph streams: several times L2
_MOST_LAYERS = 512  # in it: those of tiny models are all launches, and would be 100,000
_REPLAYS = 5

Layer = Sequence[tuple[Epilogue, torch.Tensor]]


def this_machine() -> Machine:
    """The current CUDA device and the versions of torch and triton."""
    return Machine(torch.cuda.get_device_name(), str(torch.__version__), triton.__version__)


def candidates(key: GemmKey, block: int = INTERLEAVE) -> Sequence[LinearConfig]:
    """What is worth measuring on the current CUDA device.

    ``block``: how gate and up rows are interleaved; Hopper's kernel takes one size of it only.
    """
    device = torch.cuda.get_device_properties()
    sms = device.multi_processor_count
    gated = key.epilogue == "silu_mul"
    if device.major == 9 and not (gated and block != INTERLEAVE):
        return stream_shortlist(key.n, key.k, key.m_tier, gated=gated, sms=sms)
    return shortlist(key.n, key.k, key.m_tier, 2, sms)


class GemmTimer:
    """A ``Measure``: the median seconds of a layer's matmuls in a CUDA graph of many layers.

    ``layers``: the matmuls of each layer in the order of their launches; together larger than L2.
    ``block``: how gate and up rows are interleaved.
    """

    def __init__(self, layers: Sequence[Layer], block: int = INTERLEAVE) -> None:
        self._layers = layers
        self._block = block
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, key: GemmKey, config: LinearConfig | None, others: Choices) -> float:
        """Seconds of one layer at the key's tier (at half of it for the lowest)."""
        chosen = {**others, key: config}
        layers = [layer for layer in self._layers if any(_is(key, *one) for one in layer)]
        size = sum(weight.numel() * weight.element_size() for _, weight in layers[0])
        count = min(max(4, _GRAPH_BYTES // size), _MOST_LAYERS)
        rows = 8 if key.m_tier == 16 else key.m_tier
        calls = [self._calls(layer, rows, key, chosen) for layer in layers[:count]]
        # Compiles and loads before the capture, which could not.
        for call in calls[0]:
            call()
        torch.cuda.synchronize()
        # In the last graph's pool, which lives while that graph does: pools of their own add up.
        graph = torch.cuda.CUDAGraph()
        pool = None if self._graph is None else self._graph.pool()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            for layer in itertools.islice(itertools.cycle(calls), count):
                for call in layer:
                    call()
        self._graph = graph
        graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
        return float(statistics.median(times)) / 1e3 / count

    def _calls(
        self, layer: Layer, rows: int, key: GemmKey, chosen: Choices
    ) -> list[Callable[[], object]]:
        calls: list[Callable[[], object]] = []
        for epilogue, weight in layer:
            n, k = weight.shape
            config = chosen.get(GemmKey(n, k, key.m_tier, key.dtype, epilogue))
            x = torch.randn(rows, k, device=weight.device).to(weight.dtype)
            workspace = None
            if config is not None:
                need = SplitWorkspace.need(rows, n, k, config)
                workspace = SplitWorkspace(x.device, *need)
            pdl = launches_dependents(x.device)
            if epilogue == "silu_mul":
                call = partial(linear_silu_mul, x, weight, block=self._block)
            else:
                # Behind cuBLAS it is the norm that adds the residual, at next to no cost.
                adds = epilogue == "residual" and config is not None
                call = partial(linear, x, weight, residual=x.new_zeros(rows, n) if adds else None)
            calls.append(partial(call, config=config, workspace=workspace, pdl=pdl))
        return calls


def _is(key: GemmKey, epilogue: Epilogue, weight: torch.Tensor) -> bool:
    return (key.n, key.k) == tuple(weight.shape) and key.epilogue == epilogue
