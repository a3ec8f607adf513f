"""The layers of a draft and its passes; see native_cpu.pyi."""

from typing import final

import numpy as np
from numpy.typing import NDArray

from .layers_cpu import Layers
from .matrices_cpu import PackedMatrix, _Weights

@final
class CpuDraft(Layers):
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
