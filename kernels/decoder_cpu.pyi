"""A dense decoder in one native call; see native_cpu.pyi."""

from typing import final

import numpy as np
from numpy.typing import NDArray

from .layers_cpu import Layers
from .matrices_cpu import PackedMatrix, _Weights

@final
class CpuDecoder(Layers):
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
        ``captured`` [T, A * H] gets, side by side, the streams that enter the A ascending
        ``capture_layers``. Raises ValueError naming a wrong argument.
        """

    def logits(self, hidden: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Write out [N, V] = hidden [N, H] W^T of the output head."""
