"""The parts of a dense decoder's layer on Triton kernels, for targets and drafts."""

import math
from collections.abc import Iterable

import torch

from ...engine_core.model_config import ModelConfig
from ...kernels.add_rms_norm_gpu import add_rms_norm
from ...kernels.linear import interleave_gate_up
from ...kernels.linear_gpu import INTERLEAVE
from ...kernels.paged_attention_gpu import paged_attention
from ...kernels.qk_rope_write_gpu import qk_norm_rope_write
from ...kernels.rms_norm_gpu import rms_norm
from ..dependent_launch import launches_dependents
from ..forward_batch import ForwardBatch, RowGroup, RowMask
from ..gemm_table import Epilogue
from ..gemm_timer import Layer
from ..kv_pool import KVPool
from ..rotary import RotaryTable
from .decoder_weights import LayerBody
from .gpu_linear import GpuLinear
from .model import Reduce


class GpuLayers:
    """What the layers of one model have in common: its shapes, its rotary table, its matmuls.

    A pass that uses nothing else can be captured in a CUDA graph: launches depend on shapes and on
    the batch's ``groups`` alone. ``reduce`` sums what o and down give over the ranks that share
    them. ``pdl``: kernels are launched while the one before them ends.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        reduce: Reduce | None = None,
    ) -> None:
        self._config = config
        self._reduce = reduce
        self.pdl = launches_dependents(device)
        self.linear = GpuLinear(device, dtype)
        self._block = math.gcd(config.intermediate_size, INTERLEAVE)
        self.rotary = RotaryTable(config.rope, config.head_dim, config.context_length, device)
        # A table that grew would move away from under captured graphs.
        self.rotary.reserve(config.context_length)

    def adopt(self, layer: LayerBody) -> None:
        """Reorder the layer's rows, so that a gate and its up fall into one tile of a matmul."""
        layer.gate_up = interleave_gate_up(layer.gate_up, self._block)
        if layer.gate_up_bias is not None:
            layer.gate_up_bias = interleave_gate_up(layer.gate_up_bias, self._block)

    def matmuls(self, layer: LayerBody) -> list[tuple[Epilogue, torch.Tensor]]:
        """A layer's matmuls in the order of their launches."""
        # Of several ranks' sums the residual is no part.
        mixing: Epilogue = "residual" if self._reduce is None else "none"
        return [
            ("none", layer.qkv),
            (mixing, layer.o),
            ("silu_mul", layer.gate_up),
            (mixing, layer.down),
        ]

    def tune(self, chain: list[Layer], rows: Iterable[int]) -> None:
        """Choose the matmuls of ``chain`` for these numbers of tokens."""
        with torch.inference_mode():
            self.linear.tune(chain, self._block, rows)

    def gated(self, layer: LayerBody, normed: torch.Tensor) -> torch.Tensor:
        """What the down projection takes in, [T, I], of the MLP's input [T, H]."""
        return self.linear.linear_silu_mul(
            normed, layer.gate_up, bias=layer.gate_up_bias, block=self._block
        )

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The RMS norm of rows [T, H]."""
        return rms_norm(x, weight, self._config.rms_norm_eps, pdl=self.pdl)

    def add(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stream: torch.Tensor,
        norm: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream [T, H] with x @ weight^T + bias added, and that normed (or not).

        The sum is ``out``, whose rows may lie apart, else a new tensor or ``stream``, changed.
        """
        eps = self._config.rms_norm_eps
        if self._reduce is None and self.linear.fuses_residual(len(x), weight):
            total = self.linear.linear(x, weight, bias=bias, residual=stream, out=out)
            return total, total if norm is None else self.norm(total, norm)
        mixed = self.linear.linear(x, weight, bias=bias)
        # The kernel ahead of a sum over ranks is the collective's, which is not one of ours.
        pdl = self.pdl and self._reduce is None
        if self._reduce is not None:
            mixed = self._reduce(mixed)
        total = stream if out is None else out
        if norm is None:
            torch.add(stream, mixed, out=total)
            return total, total
        return total, add_rms_norm(mixed, stream, norm, eps, total=out, pdl=pdl)

    def attention(
        self,
        index: int,
        layer: LayerBody,
        normed: torch.Tensor,
        batch: ForwardBatch,
        kv: KVPool,
        mask: RowMask | None = None,
    ) -> torch.Tensor:
        """What each token's heads saw [T, heads * D]; writes the step's keys and values.

        ``mask``: the layer's own, else the batch's rule and the model's window hold.
        """
        config = self._config
        mask = mask or batch.mask(config.sliding_windows[index])
        key_cache, value_cache = kv.layer(index)
        query = qk_norm_rope_write(
            self.linear.linear(normed, layer.qkv),
            layer.q_norm,
            layer.k_norm,
            config.rms_norm_eps,
            self.rotary.cos,
            self.rotary.sin,
            batch.rotated,
            batch.kv_slots,
            key_cache,
            value_cache,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=layer.qkv_bias,
            pdl=self.pdl,
        )
        context = torch.empty_like(query)
        groups = batch.groups or (RowGroup(0, len(batch.kv_lens), len(query)),)
        for group in groups:
            paged_attention(
                query,
                key_cache,
                value_cache,
                mask.positions,
                batch.cu_q[group.begin : group.end + 1],
                batch.kv_lens[group.begin : group.end],
                batch.page_table,
                mask.tree_bits,
                mask.is_tree[group.begin : group.end],
                kv.page_size,
                config.head_dim**-0.5,
                mask.window,
                slots=None if batch.slots is None else batch.slots[group.begin : group.end],
                max_q=group.max_q,
                max_tokens=group.max_tokens,
                max_kv=batch.page_table.shape[1] * kv.page_size,
                out=context,
                clear=group is groups[-1],  # the padding behind all rows
                pdl=self.pdl,
            )
        return context.flatten(1)
