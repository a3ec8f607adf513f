"""A stack of decoder layers, the base of targets and drafts; see native_cpu.pyi."""

import numpy as np
from numpy.typing import NDArray
from typing_extensions import disjoint_base

from .matrices_cpu import PackedMatrix
from .native_cpu import _InstructionSet

@disjoint_base
class Layers:
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
