"""The dense decoder on native CPU kernels, in float32."""

import numpy as np
import torch
from numpy.typing import NDArray

from ...engine_core.model_config import ModelConfig
from ...kernels.decoder_cpu import CpuDecoder
from ...kernels.matrices_cpu import Arena, PackedMatrix
from ..forward_batch import ForwardBatch
from ..kv_pool import KVPool
from ..rotary import RotaryTable
from ..weights import TensorSource
from .cpu_arrays import (
    InstructionSet,
    Rows,
    SeenArrays,
    array_of,
    bits,
    body_bytes,
    floats,
    item_bytes,
    pack,
    pack_body,
    packed_bytes,
    table_array,
)
from .decoder_weights import HeadWeights, LayerWeights, read_head, read_layer

_NO_LAYERS = np.empty(0, dtype=np.int64)
_NO_CAPTURE = np.empty((0, 0), dtype=np.float32)


def supports_cpu_kernels(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether NativeDecoder can run this model; TorchDecoder runs the others."""
    return device.type == "cpu" and dtype == torch.float32 and config.head_dim % 8 == 0


class NativeDecoder:
    """Llama, Mistral, Qwen2 and Qwen3 in float32 on a CPU.

    A bfloat16 checkpoint stays bfloat16 in memory, which halves what a step streams; widening it
    is exact. Results are bit-identical for every batch shape. A result's memory is its own only
    until the next call of the same method.
    """

    def __init__(
        self, source: TensorSource, config: ModelConfig, isa: InstructionSet | None = None
    ) -> None:
        self._config = config
        self._rotary = RotaryTable(
            config.rope, config.head_dim, config.context_length, torch.device("cpu")
        )
        self._decoder = CpuDecoder(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            num_layers=config.num_hidden_layers,
            eps=config.rms_norm_eps,
            isa=isa,
        )
        self._hidden = Rows(config.hidden_size)
        self._logits = Rows(config.vocab_size)
        self._seen = SeenArrays()
        self._captured: dict[tuple[int, ...], Rows] = {}
        head = read_head(source, config)
        self._output_head = head.lm_head
        item = item_bytes(head.embed)
        layer_bytes = body_bytes(config, config.hidden_size, item)
        head_bytes = packed_bytes(config.vocab_size, config.hidden_size, item)
        arena = Arena(config.num_hidden_layers * layer_bytes + head_bytes)
        self._weight_bytes = 0
        for index in range(config.num_hidden_layers):
            self._install_layer(index, read_layer(source, config, index), arena)
        self._install_head(head, arena)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return self._weight_bytes

    @property
    def dtype(self) -> torch.dtype:
        """Computation dtype."""
        return torch.float32

    @property
    def embedding(self) -> torch.Tensor:
        """The embedding table [V, H]; a tied one as it lies in the checkpoint's file, mapped."""
        return self._embedding

    @property
    def output_head(self) -> torch.Tensor:
        """The output head [V, H] as it lies in the checkpoint's file, mapped into memory."""
        return self._output_head

    @property
    def packed_head(self) -> PackedMatrix:
        """The output head as kernels read it."""
        return self._packed_head

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """Hidden states [T, H] after the final norm."""
        return self._run(batch, kv, _NO_LAYERS, _NO_CAPTURE)

    def forward_capture(
        self, batch: ForwardBatch, kv: KVPool, capture_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``forward`` plus the streams entering the captured layers, side by side [T, A * H]."""
        rows = self._captured.get(capture_layers)
        if rows is None:
            rows = self._captured[capture_layers] = Rows(
                len(capture_layers) * self._config.hidden_size
            )
        captured = rows.take(batch.input_ids.shape[0])
        layers = np.array(capture_layers, dtype=np.int64)
        return self._run(batch, kv, layers, self._seen.of(captured)), captured

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[N, V] logits of hidden rows [N, H]."""
        out = self._logits.take(hidden.shape[0])
        self._decoder.logits(hidden.numpy(), self._seen.of(out))
        return out

    def _run(
        self,
        batch: ForwardBatch,
        kv: KVPool,
        layers: NDArray[np.int64],
        captured: NDArray[np.float32],
    ) -> torch.Tensor:
        of = self._seen.of
        positions = of(batch.positions)
        self._rotary.reserve(int(positions.max()) + 1)
        hidden = self._hidden.take(positions.shape[0])
        self._decoder.forward(
            of(batch.input_ids),
            positions,
            of(batch.kv_slots),
            of(batch.cu_q),
            of(batch.kv_lens),
            table_array(batch, self._seen),
            of(batch.tree_bits),
            of(batch.is_tree),
            of(kv.data),
            kv.page_size,
            of(self._rotary.cos),
            of(self._rotary.sin),
            layers,
            captured,
            of(hidden),
        )
        return hidden

    def _install_layer(self, index: int, layer: LayerWeights, arena: Arena) -> None:
        packed = pack_body(layer, arena)
        self._decoder.set_layer(
            index,
            input_norm=array_of(layer.input_norm),
            qkv=packed.qkv,
            q_norm=floats(layer.q_norm),
            k_norm=floats(layer.k_norm),
            o=packed.o,
            post_norm=array_of(layer.post_norm),
            gate_up=packed.gate_up,
            down=packed.down,
            window=self._config.sliding_windows[index],
        )
        self._weight_bytes += packed.nbytes

    def _install_head(self, head: HeadWeights, arena: Arena) -> None:
        lm_head = self._packed_head = pack(head.lm_head, None, arena)
        tied = head.lm_head is head.embed
        self._embedding = head.embed if tied else head.embed.clone()
        embed = None if tied else bits(self._embedding)
        self._decoder.set_head(final_norm=array_of(head.final_norm), lm_head=lm_head, embed=embed)
        self._weight_bytes += lm_head.nbytes + (embed.nbytes if embed is not None else 0)
