"""What the tokens of blocks see, layer by layer (block_drafts.md 1.3 and 12)."""

import torch

from ...engine_core.draft_config import BlockConfig, DraftConfig
from ..forward_batch import ForwardBatch, RowMask

MOST_ROWS = 64  # a block's rows that see later ones: a bit each
_FIRST = 1024


class BlockMasks:
    """The masks of a draft's layers. Raises ValueError for blocks of more rows than masks have."""

    def __init__(self, config: DraftConfig, block: BlockConfig, device: torch.device) -> None:
        if block.rows > MOST_ROWS and not all(block.causal):
            raise ValueError(
                f"block_size: blocks of {block.rows} rows that see each other; at most {MOST_ROWS} "
                "can: propose fewer drafts"
            )
        self._block = block
        self._windows = config.model.sliding_windows
        self._device = device
        # A row's own tokens, as far as they see each other, seldom lie outside a window.
        whole = block.whole_block_window
        self._narrow = {
            window: _band(window, block.rows, device)
            for window, causal in zip(self._windows, block.causal, strict=True)
            if 0 < window < block.rows and not causal and not whole
        }
        self._needs_nodes = bool(self._narrow) or (whole and any(self._windows))
        self._outgrown: list[torch.Tensor] = []
        self._full = self._trees = self._plain = torch.empty(0)
        self._grow(_FIRST)

    def of(self, batch: ForwardBatch) -> list[RowMask]:
        """A mask for each layer. Nothing waits for the device."""
        tokens, rows = len(batch.input_ids), len(batch.kv_lens)
        if max(tokens, rows) > len(self._full):
            self._grow(max(tokens, rows, 2 * len(self._full)))
        full, trees, plain = self._full[:tokens], self._trees[:rows], self._plain[:rows]
        node = self._nodes(batch) if self._needs_nodes else None
        masks = []
        for window, causal in zip(self._windows, self._block.causal, strict=True):
            positions, bits = batch.positions, full
            if node is not None and window and self._block.whole_block_window:
                # As far from all of the block as from its first token, which sees ``window`` ones
                # in front of itself.
                positions, window = positions - node, window + 1
            elif node is not None and window in self._narrow:
                bits = self._narrow[window][node]
            masks.append(RowMask(positions, bits, plain if causal else trees, window))
        return masks

    def _nodes(self, batch: ForwardBatch) -> torch.Tensor:
        """int64[T]: each token's number in its block; 0 behind all blocks."""
        place = torch.arange(len(batch.input_ids), dtype=torch.int32, device=self._device)
        row = torch.searchsorted(batch.cu_q[1:], place, right=True)
        inside = row < len(batch.kv_lens)
        begin = batch.cu_q[row.clamp(max=len(batch.kv_lens) - 1)]
        return torch.where(inside, place - begin, 0).long()

    def _grow(self, size: int) -> None:
        """Make constants for so many; captured graphs go on reading the old ones."""
        self._outgrown += [self._full, self._trees, self._plain]
        self._full = torch.full((size,), -1, dtype=torch.int64, device=self._device)
        self._trees = torch.ones(size, dtype=torch.uint8, device=self._device)
        self._plain = torch.zeros(size, dtype=torch.uint8, device=self._device)


def _band(window: int, rows: int, device: torch.device) -> torch.Tensor:
    """int64[rows]: of each row of a block, the rows less than ``window`` away from it."""
    node = torch.arange(rows)
    near = (node[:, None] - node).abs() < window
    return (near << node).sum(dim=1).to(device)
