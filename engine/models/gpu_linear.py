"""The linear layers of a decoder on a GPU: per shape, cuBLAS or the weight-streaming kernel."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from ...kernels.linear_config import MAX_ROWS, row_tier
from ...kernels.linear_gpu import LinearConfig, linear, linear_silu_mul
from ...kernels.split_workspace import SplitWorkspace
from ..dependent_launch import launches_dependents
from ..gemm_table import Epilogue, GemmKey, GemmTable
from ..gemm_timer import GemmTimer, Layer, candidates, this_machine


class GpuLinear:
    """Matmuls by ``choices``: a tier of rows without one, and more than 128 rows, go to cuBLAS.

    Float32 always does: its matmuls keep to IEEE arithmetic and are no one's bottleneck.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._name = str(dtype).removeprefix("torch.")
        self._pdl = launches_dependents(device)
        self._choices: dict[tuple[int, int, int, Epilogue], LinearConfig] = {}
        self._workspace: SplitWorkspace | None = None

    def choose(self, choices: Mapping[GemmKey, LinearConfig]) -> None:
        """Replace the choices; graphs of the old ones lose their workspace: never replay them."""
        self._choices.clear()
        needs = [(0, 0)]
        for key, config in choices.items():
            if self._dtype != torch.float32 and key.dtype == self._name:
                self._choices[key.n, key.k, key.m_tier, key.epilogue] = config
                needs.append(SplitWorkspace.need(key.m_tier, key.n, key.k, config))
        elements, tiles = (max(sizes) for sizes in zip(*needs, strict=True))
        self._workspace = SplitWorkspace(self._device, elements, tiles) if elements else None

    def tune(self, layers: Sequence[Layer], block: int, rows: Iterable[int]) -> None:
        """Choose for these layers' matrices at the tiers of ``rows``, by measurements kept on disk.

        ``block``: how gate and up rows are interleaved. Nothing to choose off a GPU and in float32.
        """
        if self._device.type != "cuda" or self._dtype == torch.float32:
            return
        tiers = sorted({row_tier(count) for count in rows if count <= MAX_ROWS})
        shapes = dict.fromkeys(
            (*weight.shape, epilogue) for layer in layers for epilogue, weight in layer
        )
        keys = [
            GemmKey(n, k, tier, self._name, epilogue) for tier in tiers for n, k, epilogue in shapes
        ]
        table = GemmTable(this_machine())
        if table.fill(keys, partial(candidates, block=block), GemmTimer(layers, block)):
            # The timed graphs' memory is theirs alone until it is given back.
            torch.cuda.empty_cache()
        found = {
            key: table.config(key.n, key.k, key.m_tier, key.dtype, key.epilogue) for key in keys
        }
        self.choose({key: config for key, config in found.items() if config is not None})

    def fuses_residual(self, rows: int, weight: torch.Tensor) -> bool:
        """Whether ``linear`` of so many rows adds a residual for nothing."""
        return self._config(rows, weight, "residual") is not None

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [M, K] @ weight [N, K]^T + bias [N] + residual [M, N]: ``out`` or a new [M, N]."""
        config = self._config(len(x), weight, "none" if residual is None else "residual")
        return linear(
            x, weight, bias, residual, config=config, out=out, workspace=self._workspace,
            pdl=self._pdl,
        )  # fmt: skip

    def linear_silu_mul(
        self, x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None, block: int
    ) -> torch.Tensor:
        """silu(gate) * up [M, N / 2] of a weight [N, K] interleaved in blocks of ``block``."""
        config = self._config(len(x), weight, "silu_mul")
        return linear_silu_mul(
            x, weight, bias, block=block, config=config, workspace=self._workspace, pdl=self._pdl
        )

    def _config(self, rows: int, weight: torch.Tensor, epilogue: Epilogue) -> LinearConfig | None:
        if not self._choices or not 0 < rows <= MAX_ROWS:
            return None
        n, k = weight.shape
        return self._choices.get((n, k, row_tier(rows), epilogue))
