"""Tensors as the arrays that native CPU kernels take."""

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ...engine_core.model_config import ModelConfig
from ...kernels.matrices_cpu import Arena, PackedMatrix
from ..forward_batch import ForwardBatch
from .decoder_weights import LayerBody

Weights = NDArray[np.uint16] | NDArray[np.float32]
_MAX_SEEN = 1024
InstructionSet: TypeAlias = Literal["avx512", "avx2", "base"]


class SeenArrays:
    """The arrays of tensors that come again step after step, by identity.

    To make an array of a tensor, or a slice of one, gives up the GIL. In front of a forward pass it
    comes back only when the thread that plans the next step is done with that.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[torch.Tensor, Any]] = {}

    def of(self, tensor: torch.Tensor) -> Any:
        """What ``tensor.numpy()`` gives; keeps the tensor for a while."""
        found = self._seen.get(id(tensor))
        if found is not None and found[0] is tensor:
            return found[1]
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        array = tensor.numpy()
        self._seen[id(tensor)] = (tensor, array)
        return array


class Rows:
    """A float32 matrix of a fixed width whose memory is used again by every step.

    Steps differ in size, and megabytes of a new size each time would fragment the heap.
    """

    def __init__(self, width: int) -> None:
        self._buffer = torch.empty(0, width)
        self._taken: dict[int, torch.Tensor] = {}

    def take(self, rows: int) -> torch.Tensor:
        """float32[rows, width]; valid until the next call, the same tensor every time."""
        taken = self._taken.get(rows)
        if taken is not None:
            return taken
        if rows > self._buffer.shape[0] or len(self._taken) >= _MAX_SEEN:
            self._taken.clear()
        if rows > self._buffer.shape[0]:
            self._buffer = torch.empty(max(rows, 2 * self._buffer.shape[0]), self._buffer.shape[1])
        self._taken[rows] = self._buffer[:rows]
        return self._taken[rows]


class PackedBody(NamedTuple):
    """The matrices of a layer as kernels read them."""

    qkv: PackedMatrix
    o: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(matrix.nbytes for matrix in self)


def pack_body(body: LayerBody, arena: Arena, int8: bool = False) -> PackedBody:
    """The layer's matrices, in ``arena``; ``int8``: see PackedMatrix."""
    return PackedBody(
        pack(body.qkv, body.qkv_bias, arena, int8),
        pack(body.o, body.o_bias, arena, int8),
        PackedMatrix(
            bits(body.gate_up), floats(body.gate_up_bias), pairs=True, arena=arena, int8=int8
        ),
        pack(body.down, body.down_bias, arena, int8),
    )


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None, arena: Arena, int8: bool = False
) -> PackedMatrix:
    """A matrix [out, in] in ``arena``; ``int8``: see PackedMatrix."""
    return PackedMatrix(bits(weight), floats(bias), arena=arena, int8=int8)


def body_bytes(config: ModelConfig, width: int, item: int) -> int:
    """Bytes of a layer's packed matrices, ``item`` an element; qkv reads ``width`` elements."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.q_size, config.kv_size
    size = packed_bytes(q + 2 * kv, width, item) + packed_bytes(hidden, q, item)
    # Pairs of gate and up are padded to 8.
    return (
        size + packed_bytes(-(-inner // 8) * 16, hidden, item) + packed_bytes(hidden, inner, item)
    )


def packed_bytes(outputs: int, inputs: int, item: int) -> int:
    """Bytes of a packed matrix in an arena: its outputs are padded to 16."""
    return -(-outputs // 16) * 16 * inputs * item + 64


def item_bytes(tensor: torch.Tensor) -> int:
    """Bytes of an element of ``tensor`` once it is packed."""
    return 2 if tensor.dtype == torch.bfloat16 else 4


def bits(tensor: torch.Tensor) -> Weights:
    """The array that is packed: bfloat16 as its bits, everything else as float32."""
    if tensor.dtype == torch.bfloat16:
        array: NDArray[np.uint16] = tensor.contiguous().view(torch.uint16).numpy()
        return array
    return array_of(tensor)


def array_of(tensor: torch.Tensor) -> NDArray[np.float32]:
    """The tensor as float32."""
    array: NDArray[np.float32] = tensor.float().contiguous().numpy()
    return array


def floats(tensor: torch.Tensor | None) -> NDArray[np.float32] | None:
    """The tensor as float32, if there is one."""
    return None if tensor is None else array_of(tensor)


def table_array(batch: ForwardBatch, seen: SeenArrays) -> NDArray[np.int32]:
    """The batch's page table int32[R, P]; that of several rows is made anew every step."""
    table = batch.page_table
    if len(batch.kv_lens) == 1 and batch.slots is None:
        array: NDArray[np.int32] = seen.of(table)
        return array
    if batch.slots is not None:
        table = table[batch.slots.long()]
    return table.numpy()
