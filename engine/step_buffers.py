"""The arrays of one step, allocated once: compiled code writes them, the model reads them."""

import numpy as np
import numpy.typing as npt
import torch

from ..engine_core.ids import I32, U8
from .forward_batch import ForwardBatch

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_MAX_CACHED_SHAPES = 1024


class StepBuffers:
    """Room for R rows, T query tokens and N nodes, grown when a step needs more.

    Each tensor of a batch shares its memory with the numpy array of the same name here. Slicing
    costs more than a microsecond a tensor, so the tensors of a shape are made once and kept.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._tokens = 0
        self._shapes: dict[tuple[int, int, int], ForwardBatch] = {}
        self._decided: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.reserve(64, 1024)

    def reserve(self, rows: int, tokens: int) -> None:
        """Make room for this many rows and query tokens; contents may be lost."""
        if rows <= self._rows and tokens <= self._tokens:
            return
        self._rows = rows = max(rows, self._rows)
        self._tokens = tokens = max(tokens, self._tokens)
        self._shapes.clear()
        self._decided.clear()
        self.starts: I32 = np.zeros(rows, dtype=np.int32)
        self.q_lens: I32 = np.zeros(rows, dtype=np.int32)
        self.depths: I32 = np.zeros(rows, dtype=np.int32)
        self.node_cu: I32 = np.zeros(rows + 1, dtype=np.int32)
        self.cu_q: I32 = np.zeros(rows + 1, dtype=np.int32)
        self.kv_lens: I32 = np.zeros(rows, dtype=np.int32)
        self.is_tree: U8 = np.zeros(rows, dtype=np.uint8)
        self.accept_lens: I32 = np.zeros(rows, dtype=np.int32)
        self.trimmed: I32 = np.zeros(rows, dtype=np.int32)
        self.accept_cu: I32 = np.zeros(rows + 1, dtype=np.int32)
        self.input_ids: I64 = np.zeros(tokens, dtype=np.int64)
        self.positions: I64 = np.zeros(tokens, dtype=np.int64)
        self.kv_slots: I64 = np.zeros(tokens, dtype=np.int64)
        self.tree_bits: U64 = np.zeros(tokens, dtype=np.uint64)
        self.logits_index: I64 = np.zeros(tokens, dtype=np.int64)
        self.parents: I32 = np.zeros(tokens, dtype=np.int32)
        self.row_of_token: I32 = np.zeros(tokens, dtype=np.int32)
        self.accept_idx: I32 = np.zeros(tokens, dtype=np.int32)
        self.emitted: I32 = np.zeros(tokens, dtype=np.int32)
        self.move_src: I64 = np.zeros(tokens, dtype=np.int64)
        self.move_dst: I64 = np.zeros(tokens, dtype=np.int64)

    def batch(self, rows: int, tokens: int, nodes: int, page_table: torch.Tensor) -> ForwardBatch:
        """The step's batch, sharing memory with the arrays; valid until the next step."""
        key = (rows, tokens, nodes)
        batch = self._shapes.get(key)
        if batch is None:
            if len(self._shapes) >= _MAX_CACHED_SHAPES:
                self._shapes.clear()
            batch = ForwardBatch(
                input_ids=torch.from_numpy(self.input_ids[:tokens]),
                positions=torch.from_numpy(self.positions[:tokens]),
                kv_slots=torch.from_numpy(self.kv_slots[:tokens]),
                cu_q=torch.from_numpy(self.cu_q[: rows + 1]),
                kv_lens=torch.from_numpy(self.kv_lens[:rows]),
                page_table=page_table,
                tree_bits=torch.from_numpy(self.tree_bits.view(np.int64)[:tokens]),
                is_tree=torch.from_numpy(self.is_tree[:rows]),
                logits_index=torch.from_numpy(self.logits_index[:nodes]),
            )
            self._shapes[key] = batch
        batch.page_table = page_table
        return batch

    def decided(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``accept_lens`` and ``starts`` of this many rows, sharing memory with the arrays."""
        found = self._decided.get(rows)
        if found is None:
            found = self._decided[rows] = (
                torch.from_numpy(self.accept_lens[:rows]),
                torch.from_numpy(self.starts[:rows]),
            )
        return found
