"""What the engine asks of a block draft's network."""

from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

import torch

from ...engine_core.draft_config import DraftConfig
from ..forward_batch import ForwardBatch
from ..kv_pool import KVPool

# Fills tokens int64[R] with draft ``level``, drawn from logits [R, V].
Draw = Callable[[int, torch.Tensor, torch.Tensor], None]


@runtime_checkable
class BlockNet(Protocol):
    """DFLASH's or DSPARK's draft over paged KV of its own. T tokens, N rows, H its hidden size, W
    the width of the target's features, V the target's vocabulary, r the Markov head's rank.
    """

    @property
    def config(self) -> DraftConfig:
        """What it is; ``config.block`` is set."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in memory, without those that it shares with the target."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Computation dtype, which is also that of its KV pool."""
        ...

    def inject(
        self, features: torch.Tensor, positions: torch.Tensor, kv_slots: torch.Tensor, kv: KVPool
    ) -> None:
        """Write keys and values of T committed tokens from the target's features [T, W].

        ``positions``, ``kv_slots`` int64[T].
        """
        ...

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """Normed hidden states [T, H] of blocks: rows of ``batch`` that hold a block each.

        Every row sees all KV before the block, and of the block what ``config.block.causal`` says;
        ``batch.tree_bits`` and ``is_tree`` are not read. Writes the blocks' keys and values.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of rows [N, H] of ``forward``'s answer, without the Markov head."""
        ...

    def choose(
        self,
        hidden: torch.Tensor,
        bonus: torch.Tensor,
        tokens: torch.Tensor,
        draw: Draw | None = None,
    ) -> None:
        """Draft R blocks: fill ``tokens`` int64[drafts, R].

        Greedily, of equal logits the lowest id; or by ``draw``, which gets each draft's logits in
        turn, with the Markov head's part.

        ``hidden`` [drafts, R, H]: of ``forward``'s answer the rows that propose, draft by draft;
        ``bonus`` int64[R]: the tokens that the blocks begin with. All three are contiguous.
        """
        ...

    def confidence(
        self, hidden: torch.Tensor, bonus: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor | None:
        """The confidence head's raw logits of what ``choose`` drafted from the same tensors,
        float32[R, drafts]; None without one.
        """
        ...


@runtime_checkable
class GpuBlockNet(BlockNet, Protocol):
    """A net whose passes never wait for the device, so that they can be captured."""

    def tune(self, rows: Iterable[int]) -> None:
        """Choose the matmuls of passes of these numbers of tokens; see ``GpuModel.tune``."""
        ...
