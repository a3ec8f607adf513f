"""Native float32 kernels for dense decoders on a CPU.

Weights are float32, or bfloat16 given as the uint16 bit patterns and widened exactly in
registers: the mathematics is float32 throughout. All arrays are C-contiguous. A token's results
are bit-identical in every batch (docs/decisions/0003-cpu-kernels.md). Calls release the GIL.
``isa`` None takes the best of ``instruction_sets()``. AVX2 and AVX-512 give the same bits; the base
instruction set may differ from them in the last ones, since it does not fuse multiply and add.
"""

from typing import Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import disjoint_base

_Weights: TypeAlias = NDArray[np.uint16] | NDArray[np.float32]

_InstructionSet: TypeAlias = Literal["avx512", "avx2", "base"]

def instruction_sets() -> tuple[_InstructionSet, ...]:
    """The instruction sets whose code can run here, the best first."""

def measure_multiply_add_rate() -> float:
    """Operations per second of this core, measured now (two for each lane of a multiply-add)."""

def measure_stream_bandwidth(num_bytes: int) -> float:
    """Bytes per second of the second pass over a block of ``num_bytes``, measured now."""

@final
class Arena:
    """One block of ``num_bytes``, on huge pages where possible, from which matrices are cut."""

    def __init__(self, num_bytes: int) -> None: ...

@final
class PackedMatrix:
    """A weight [outputs, inputs], copied into the layout of the matmul kernel.

    ``bias`` is float32[outputs]. ``pairs``: the rows are two halves (gate and up) that a gated
    activation will multiply. Memory comes from ``arena`` while it lasts, else from the heap.
    """

    def __init__(
        self,
        weight: _Weights,
        bias: NDArray[np.float32] | None = None,
        *,
        pairs: bool = False,
        arena: Arena | None = None,
    ) -> None: ...
    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""

def linear(
    x: NDArray[np.float32],
    matrix: PackedMatrix,
    out: NDArray[np.float32],
    *,
    isa: _InstructionSet | None = None,
) -> None:
    """Write out [M, outputs] = x [M, inputs] W^T + bias."""

def rms_norm(
    x: NDArray[np.float32],
    weight: NDArray[np.float32],
    eps: float,
    out: NDArray[np.float32],
    *,
    isa: _InstructionSet | None = None,
) -> None:
    """Write out [M, size] = x / sqrt(mean(x^2) + eps) * weight, row by row."""

def rms_norm_chunks(
    x: NDArray[np.float32],
    weights: NDArray[np.float32],
    eps: float,
    out: NDArray[np.float32],
    *,
    isa: _InstructionSet | None = None,
) -> None:
    """As rms_norm of each of C chunks of x [M, C * size] with its row of ``weights`` [C, size]."""

def paged_attention(
    query: NDArray[np.float32],
    key_cache: NDArray[np.float32],
    value_cache: NDArray[np.float32],
    positions: NDArray[np.int64],
    cu_q: NDArray[np.int32],
    kv_lens: NDArray[np.int32],
    page_table: NDArray[np.int32],
    tree_bits: NDArray[np.int64],
    is_tree: NDArray[np.uint8],
    page_size: int,
    scale: float,
    window: int,
    out: NDArray[np.float32],
    *,
    isa: _InstructionSet | None = None,
) -> None:
    """Write what kernels.paged_attention returns for the same arguments into ``out``.

    head_dim must be a multiple of 8. Positions must be those of the layout: kv_len - q_len + i
    for plain rows, start + depth for tree nodes. Raises ValueError naming a wrong argument.
    """

@disjoint_base
class _Layers:
    """A stack of GQA layers with SwiGLU. One pass at a time; ``head_dim`` a multiple of 8."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_layers: int,
        eps: float,
        *,
        isa: _InstructionSet | None = None,
    ) -> None: ...
    def set_layer(
        self,
        index: int,
        *,
        input_norm: NDArray[np.float32] | None,
        qkv: PackedMatrix,
        q_norm: NDArray[np.float32] | None,
        k_norm: NDArray[np.float32] | None,
        o: PackedMatrix,
        post_norm: NDArray[np.float32],
        gate_up: PackedMatrix,
        down: PackedMatrix,
        window: int,
        embed_norm: NDArray[np.float32] | None = None,
        norm_residual: bool = False,
    ) -> None:
        """Install layer ``index``; ``gate_up`` is packed with pairs, ``window`` 0 is full.

        ``embed_norm``, of a draft's first layer: attention takes in the normed embedding as well,
        in front of the normed stream, and ``qkv`` is twice as wide. ``norm_residual``: the layer
        then adds to the normed stream.
        """

@final
class CpuDecoder(_Layers):
    """A decoder, run in one native call."""

    def set_head(
        self,
        *,
        final_norm: NDArray[np.float32],
        lm_head: PackedMatrix,
        embed: _Weights | None,
    ) -> None:
        """Install final norm, output head [V, H] and embedding; ``embed`` None is the head."""

    def forward(
        self,
        input_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        kv_slots: NDArray[np.int64],
        cu_q: NDArray[np.int32],
        kv_lens: NDArray[np.int32],
        page_table: NDArray[np.int32],
        tree_bits: NDArray[np.int64],
        is_tree: NDArray[np.uint8],
        kv: NDArray[np.float32],
        page_size: int,
        cos: NDArray[np.float32],
        sin: NDArray[np.float32],
        capture_layers: NDArray[np.int64],
        captured: NDArray[np.float32],
        hidden: NDArray[np.float32],
    ) -> None:
        """Run a ForwardBatch: write ``hidden`` [T, H] after the final norm and the new KV.

        ``kv`` [layers, 2, slots, kv heads, head_dim]; ``cos``, ``sin`` [positions, head_dim / 2];
        ``captured`` [captured layers, T, H] gets the stream that enters each of the ascending
        ``capture_layers``. Raises ValueError naming a wrong argument.
        """

    def logits(self, hidden: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Write out [N, V] = hidden [N, H] W^T of the output head."""

@final
class CpuDraft(_Layers):
    """A draft's layers, from a hidden state and a token at each position, in one native call."""

    def set_ends(
        self,
        *,
        embed: _Weights,
        fuse: PackedMatrix | None,
        final_norm: NDArray[np.float32] | None,
    ) -> None:
        """Install the embedding [V, H] and what the draft has of the others.

        ``fuse`` [H, 2 H] makes the stream of embedding and hidden state, side by side; without it
        the hidden state is the stream, and the first layer needs an ``embed_norm``.
        """

    def forward(
        self,
        input_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        kv_slots: NDArray[np.int64],
        cu_q: NDArray[np.int32],
        kv_lens: NDArray[np.int32],
        page_table: NDArray[np.int32],
        tree_bits: NDArray[np.int64],
        is_tree: NDArray[np.uint8],
        kv: NDArray[np.float32],
        page_size: int,
        cos: NDArray[np.float32],
        sin: NDArray[np.float32],
        hidden: NDArray[np.float32],
        recurrent: NDArray[np.float32] | None,
        head_input: NDArray[np.float32] | None,
        asked: NDArray[np.int64],
    ) -> None:
        """Run a ForwardBatch with ``hidden`` [T, H]; writes the new KV.

        ``recurrent`` [T, H] gets the stream behind the layers, and may be ``hidden``;
        ``head_input`` [T, H] gets what the final norm makes of it. They are written for the tokens
        ``asked`` [N] and perhaps for others: of the rest the last layer computes keys and values
        alone. Raises ValueError naming a wrong argument.
        """

    def set_head(
        self, head: PackedMatrix, token_ids: NDArray[np.int64] | None, norm_output: bool
    ) -> None:
        """Install what ``chain`` needs behind the layers, after ``set_ends``.

        ``token_ids`` int64[Vd]: the target's id of each output of ``head`` [Vd, H]. The head reads
        what the final norm gives, or the stream without one; ``norm_output``: the next pass takes
        in the normed stream instead of the stream.
        """

    def chain(
        self,
        slots: NDArray[np.int32],
        caps: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        page_table: NDArray[np.int32],
        ids: NDArray[np.int64],
        kv: NDArray[np.float32],
        page_size: int,
        cos: NDArray[np.float32],
        sin: NDArray[np.float32],
        hidden: NDArray[np.float32],
        drafts: NDArray[np.int64],
    ) -> None:
        """Write drafts [N, R]: N passes of one token a row, each continued by its argmax.

        Row r of ``slots`` [R] runs pass i at seq_lens[slot] + i over the slot's pages of
        ``page_table`` [S, P]; with no room in ``caps`` [R] at place 0 of page 0. The first pass
        takes in ``ids`` [R] and ``hidden`` [R, H]. Raises ValueError naming a wrong argument.
        """
