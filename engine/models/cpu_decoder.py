"""The dense decoder on native CPU kernels, in float32."""

import numpy as np
import torch
from numpy.typing import NDArray

from ...engine_core.model_config import ModelConfig
from ...kernels.decoder_cpu import Arena, CpuDecoder, PackedMatrix
from ..forward_batch import ForwardBatch
from ..kv_pool import KVPool
from ..rotary import RotaryTable
from ..weights import TensorSource
from .decoder_weights import HeadWeights, LayerWeights, read_head, read_layer

_Weights = NDArray[np.uint16] | NDArray[np.float32]
_NO_LAYERS = np.empty(0, dtype=np.int64)
_NO_CAPTURE = np.empty((0, 0, 0), dtype=np.float32)


def supports_cpu_kernels(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether NativeDecoder can run this model; TorchDecoder runs the others."""
    return device.type == "cpu" and dtype == torch.float32 and config.head_dim % 8 == 0


class _Rows:
    """A float32 matrix of a fixed width whose memory is used again by every step.

    Steps differ in size, and megabytes of a new size each time would fragment the heap.
    """

    def __init__(self, width: int) -> None:
        self._buffer = torch.empty(0, width)

    def take(self, rows: int) -> torch.Tensor:
        """float32[rows, width]; valid until the next call."""
        if rows > self._buffer.shape[0]:
            self._buffer = torch.empty(max(rows, 2 * self._buffer.shape[0]), self._buffer.shape[1])
        return self._buffer[:rows]


class NativeDecoder:
    """Llama, Mistral, Qwen2 and Qwen3 in float32 on a CPU.

    A bfloat16 checkpoint stays bfloat16 in memory, which halves what a step streams; widening it
    is exact. Results are bit-identical for every batch shape. A result's memory is its own only
    until the next call of the same method.
    """

    def __init__(self, source: TensorSource, config: ModelConfig, portable: bool = False) -> None:
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
            portable=portable,
        )
        self._hidden = _Rows(config.hidden_size)
        self._logits = _Rows(config.vocab_size)
        head = read_head(source, config)
        self._embedding = head.embed
        self._output_head = head.lm_head
        arena = Arena(_arena_bytes(config, head.embed.dtype))
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
        """The embedding table [V, H] as it lies in the checkpoint's file, mapped into memory."""
        return self._embedding

    @property
    def output_head(self) -> torch.Tensor:
        """The output head [V, H] as it lies in the checkpoint's file, mapped into memory."""
        return self._output_head

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """Hidden states [T, H] after the final norm."""
        return self._run(batch, kv, _NO_LAYERS, _NO_CAPTURE)

    def forward_capture(
        self, batch: ForwardBatch, kv: KVPool, capture_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``forward`` plus the streams entering the captured layers, side by side [T, A * H]."""
        tokens = batch.input_ids.shape[0]
        captured = torch.empty(len(capture_layers), tokens, self._config.hidden_size)
        layers = np.array(capture_layers, dtype=np.int64)
        hidden = self._run(batch, kv, layers, captured.numpy())
        width = len(layers) * self._config.hidden_size
        return hidden, captured.transpose(0, 1).reshape(tokens, width)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[N, V] logits of hidden rows [N, H]."""
        out = self._logits.take(hidden.shape[0])
        self._decoder.logits(hidden.numpy(), out.numpy())
        return out

    def _run(
        self,
        batch: ForwardBatch,
        kv: KVPool,
        layers: NDArray[np.int64],
        captured: NDArray[np.float32],
    ) -> torch.Tensor:
        positions = batch.positions.numpy()
        self._rotary.reserve(int(positions.max()) + 1)
        hidden = self._hidden.take(positions.shape[0])
        self._decoder.forward(
            batch.input_ids.numpy(),
            positions,
            batch.kv_slots.numpy(),
            batch.cu_q.numpy(),
            batch.kv_lens.numpy(),
            batch.page_table.numpy(),
            batch.tree_bits.numpy(),
            batch.is_tree.numpy(),
            kv.data.numpy(),
            kv.page_size,
            self._rotary.cos.numpy(),
            self._rotary.sin.numpy(),
            layers,
            captured,
            hidden.numpy(),
        )
        return hidden

    def _install_layer(self, index: int, layer: LayerWeights, arena: Arena) -> None:
        qkv = PackedMatrix(_bits(layer.qkv), _float(layer.qkv_bias), arena=arena)
        o = PackedMatrix(_bits(layer.o), _float(layer.o_bias), arena=arena)
        gate_up = PackedMatrix(
            _bits(layer.gate_up), _float(layer.gate_up_bias), pairs=True, arena=arena
        )
        down = PackedMatrix(_bits(layer.down), _float(layer.down_bias), arena=arena)
        self._decoder.set_layer(
            index,
            input_norm=_array(layer.input_norm),
            qkv=qkv,
            q_norm=_float(layer.q_norm),
            k_norm=_float(layer.k_norm),
            o=o,
            post_norm=_array(layer.post_norm),
            gate_up=gate_up,
            down=down,
            window=self._config.sliding_windows[index],
        )
        self._weight_bytes += qkv.nbytes + o.nbytes + gate_up.nbytes + down.nbytes

    def _install_head(self, head: HeadWeights, arena: Arena) -> None:
        lm_head = PackedMatrix(_bits(head.lm_head), arena=arena)
        embed = None if head.lm_head is head.embed else _bits(head.embed.clone())
        self._decoder.set_head(final_norm=_array(head.final_norm), lm_head=lm_head, embed=embed)
        self._weight_bytes += lm_head.nbytes + (embed.nbytes if embed is not None else 0)


def _arena_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of all packed matrices, whose outputs are padded to 16 and gate/up pairs to 8."""
    item = 2 if dtype == torch.bfloat16 else 4
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.q_size, config.kv_size

    def matrix(outputs: int, inputs: int) -> int:
        return -(-outputs // 16) * 16 * inputs * item + 64

    layer = matrix(q + 2 * kv, hidden) + matrix(hidden, q) + matrix(hidden, inner)
    layer += matrix(-(-inner // 8) * 16, hidden)
    return config.num_hidden_layers * layer + matrix(config.vocab_size, hidden)


def _bits(tensor: torch.Tensor) -> _Weights:
    """The array that is packed: bfloat16 as its bits, everything else as float32."""
    if tensor.dtype == torch.bfloat16:
        bits: NDArray[np.uint16] = tensor.contiguous().view(torch.uint16).numpy()
        return bits
    return _array(tensor)


def _array(tensor: torch.Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.float().contiguous().numpy()
    return array


def _float(tensor: torch.Tensor | None) -> NDArray[np.float32] | None:
    return None if tensor is None else _array(tensor)
