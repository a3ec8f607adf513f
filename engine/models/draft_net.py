"""What the engine asks of a draft model's network."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from ...engine_core.draft_config import DraftConfig
from ..forward_batch import ForwardBatch
from ..kv_pool import KVPool


class DraftHidden(NamedTuple):
    """A draft forward's answer [T, H] each: what the next step takes in, and what the head reads.

    Both are valid until the next forward pass of the same network.
    """

    recurrent: torch.Tensor
    head_input: torch.Tensor


class DraftNet(Protocol):
    """A draft over paged KV of its own, whose pages have the target's numbers.

    T tokens, N rows, H the draft's hidden size, W the width of the target's features, Vd its
    vocabulary. Position p of EAGLE's drafts takes the pair (feature of p, token of p + 1) and
    predicts token p + 2; STANDALONE's takes token p and predicts token p + 1.
    """

    @property
    def config(self) -> DraftConfig:
        """What it is."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in memory, without those that it shares with the target."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Computation dtype, which is also that of its KV pool."""
        ...

    @property
    def token_ids(self) -> torch.Tensor | None:
        """int64[Vd]: the target's id of each draft id; None where the two are the same."""
        ...

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H] that the first pass takes, from the target's features [T, W]."""
        ...

    def forward(self, batch: ForwardBatch, hidden: torch.Tensor | None, kv: KVPool) -> DraftHidden:
        """Run ``batch`` (ids of the target's vocabulary); writes its keys and values.

        Answers of tokens outside ``batch.logits_index`` mean nothing.

        ``hidden`` [T, H]: ``fuse``'s answer or a pass's ``recurrent``; None for STANDALONE.
        """
        ...

    def logits(self, head_input: torch.Tensor) -> torch.Tensor:
        """Logits [N, Vd] of rows [N, H] of ``head_input``."""
        ...


class ChainRows(NamedTuple):
    """R rows that are to be drafted for, one token a pass.

    ``slots``, ``caps`` int32[R]: rows without a cap write to page 0, which nobody reads;
    ``seq_lens`` int32[S]; ``page_table`` int32[S, P]; ``cu_q`` int32[R + 1] offsets of their nodes.
    To be written, as `draft_nodes.write_chains` does: ``tokens``, ``parents`` int32[T] and
    ``proposed``, ``depths`` int32[R].
    """

    slots: torch.Tensor
    caps: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    cu_q: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    proposed: torch.Tensor
    depths: torch.Tensor


class AcceptedRows(NamedTuple):
    """What a step accepted of R rows of ``batch``, as `draft_extend.extend_inputs` takes it.

    ``features`` [T, W]: the target's; ``prompts`` int32[S, L].
    """

    slots: torch.Tensor
    kinds: torch.Tensor
    starts: torch.Tensor
    accept_lens: torch.Tensor
    tokens: torch.Tensor
    path: torch.Tensor
    batch: ForwardBatch
    features: torch.Tensor
    prompts: torch.Tensor


class ChainState(NamedTuple):
    """Where the chains of each slot begin: ``first`` int64[S, 1] tokens, ``hidden`` [S, H]."""

    first: torch.Tensor
    hidden: torch.Tensor


@runtime_checkable
class ChainDraftNet(DraftNet, Protocol):
    """A net of EAGLE's kind that does each half of a round of chains at once.

    The same tokens and KV as pass by pass.
    """

    def draft(self, rows: ChainRows, state: ChainState, kv: KVPool, levels: int) -> None:
        """Draft chains of up to ``levels`` tokens, as far as any row has room.

        Pass i runs at seq_lens[slot] + i.
        """
        ...

    def follow(self, rows: AcceptedRows, state: ChainState, kv: KVPool) -> None:
        """Run all that was accepted, and replace the state of the rows' slots."""
        ...


@runtime_checkable
class GpuDraftNet(DraftNet, Protocol):
    """A net whose passes never wait for the device, so that they can be captured."""

    def tune(self, rows: Iterable[int]) -> None:
        """Choose the matmuls of passes of these numbers of tokens; see ``GpuModel.tune``."""
        ...
