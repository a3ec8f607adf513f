"""The layers of a draft, its passes and chains; see native_cpu.pyi."""

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
