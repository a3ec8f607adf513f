"""EAGLE's rounds of chains, each half of a round in one call; see native_cpu.pyi.

Around a net of one layer the index work costs as much as the net, so it is done in here.
"""

from typing import final

import numpy as np
from numpy.typing import NDArray

from .draft_cpu import CpuDraft
from .matrices_cpu import PackedMatrix

_F32 = NDArray[np.float32]
_I32 = NDArray[np.int32]
_I64 = NDArray[np.int64]

@final
class CpuChains:
    """A draft that is drafted with chain by chain; all slots have a state.

    ``first`` int64[S, 1] is the first token of a slot's next chain, ``hidden`` [S, H] what the pass
    behind it takes in.
    """

    def __init__(
        self,
        layers: CpuDraft,
        head: PackedMatrix,
        token_ids: _I64 | None,
        norm_output: bool,
        *,
        fc: PackedMatrix | None = None,
        input_norm: _F32 | None = None,
        chunk_norms: _F32 | None = None,
    ) -> None:
        """``layers`` are complete. ``token_ids`` int64[Vd]: the target's id of each output of
        ``head`` [Vd, H], which reads what the final norm gives, or the stream without one.
        ``norm_output``: the next pass takes in the normed stream instead of the stream.

        ``fc`` [H, W] makes hidden states of the target's features; in front of it ``input_norm``
        [W] and ``chunk_norms`` [C, W / C], as rms_norm and rms_norm_chunks apply them.
        """

    def draft(
        self,
        slots: _I32,
        caps: _I32,
        seq_lens: _I32,
        page_table: _I32,
        first: _I64,
        hidden: _F32,
        kv: _F32,
        page_size: int,
        cos: _F32,
        sin: _F32,
        levels: int,
        cu_q: _I32,
        tokens: _I32,
        parents: _I32,
        proposed: _I32,
        depths: _I32,
    ) -> None:
        """Draft chains of up to ``levels`` tokens for R rows; write them as write_chains does.

        Every token but the first takes a pass, fed by its argmax; there are no more of them than
        any row has room for in ``caps`` [R]. Row r of ``slots`` [R] runs pass i at seq_lens[slot]
        + i over the slot's pages of ``page_table`` [S, P]; without room at place 0 of page 0.
        Raises ValueError naming a wrong argument.
        """

    def follow(
        self,
        slots: _I32,
        kinds: NDArray[np.uint8],
        starts: _I32,
        accept_lens: _I32,
        tokens: _I32,
        path: _I32,
        input_ids: _I64,
        kv_slots: _I64,
        cu_q: _I32,
        kv_lens: _I32,
        page_table: _I32,
        prompts: _I32 | None,
        features: _F32,
        kv: _F32,
        page_size: int,
        cos: _F32,
        sin: _F32,
        first: _I64,
        hidden: _F32,
    ) -> None:
        """Run what R rows of T tokens accepted, and keep the slots' new ``first`` and ``hidden``.

        The arguments up to ``input_ids``, and ``prompts``, are those of extend_inputs; what a row
        did not accept is left out. ``kv_slots`` [T] to ``page_table`` [R, P] are the step's batch,
        ``features`` [T, W] the target's. Raises ValueError naming a wrong argument.
        """
