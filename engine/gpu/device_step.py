"""One step on the device: segments D, F and A over a staging block, without a look at the host."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...kernels.coupled_sample_gpu import coupled_sample
from ...kernels.greedy_argmax_gpu import greedy_argmax
from ...kernels.kv_move_gpu import move_accepted
from ...kernels.step_layout_gpu import lay_out
from ...kernels.verify_walk_gpu import verify_walk
from ..agreement import Ranks
from ..dependent_launch import launches_dependents
from ..forward_batch import ForwardBatch, RowGroup
from ..kv_pool import KVPool
from ..models import GpuModel
from .staging import StagingViews
from .state import DeviceState


class StepShape(NamedTuple):
    """What launches depend on. ``width``: most tokens that a row can emit.

    ``groups``: see ForwardBatch. ``nodes``: N; all T query tokens, or the first N of
    ``node_index``. ``moves``: accepted nodes may have to move. ``sampled``: some rows draw their
    token.
    """

    width: int
    groups: tuple[RowGroup, ...]
    nodes: int
    moves: bool
    sampled: bool


class Choice(NamedTuple):
    """A forward pass's answer: the batch, its logits [N, V] and the targets int64[N].

    Both are empty on ranks that decide nothing.
    """

    batch: ForwardBatch
    logits: torch.Tensor
    targets: torch.Tensor


Chooser = Callable[[torch.Tensor, ForwardBatch], torch.Tensor]


class DeviceStep:
    """Runs steps of one model on its KV pool and slot state; every call can be captured."""

    def __init__(
        self, model: GpuModel, kv: KVPool, state: DeviceState, ranks: Ranks | None = None
    ) -> None:
        self._model = model
        self._kv = kv
        self._ranks = ranks
        self.decides = ranks is None or ranks.leads
        self._pdl = launches_dependents(kv.data.device)
        self.state = state

    def run(
        self,
        staging: StagingViews,
        shape: StepShape,
        out: torch.Tensor,
        choose: Chooser | None = None,
    ) -> Choice:
        """D, F and A. ``out`` int32[R * (1 + width)]: accept lengths, then emitted tokens by row.

        ``choose`` makes int64[N] targets from logits [N, V] where argmax and noise are not enough.
        """
        self.state.apply(staging)
        starts = torch.empty_like(staging.slots)
        batch = self._lay_out(staging, shape, starts)
        hidden = self._model.forward(batch, self._kv)
        if self.decides:
            choice = self._target(hidden, batch, shape, choose)
        else:
            choice = Choice(batch, hidden.new_empty(0, 0), batch.positions.new_empty(0))
        self._accept(staging, shape, batch, choice.targets, starts, out)
        return choice

    def _target(
        self, hidden: torch.Tensor, batch: ForwardBatch, shape: StepShape, choose: Chooser | None
    ) -> Choice:
        """The target's token at every node, from hidden states [T, H]."""
        if shape.nodes != len(batch.input_ids):
            hidden = hidden.index_select(0, batch.logits_index)
        logits = self._model.raw_logits(hidden)
        targets = self._choose(logits, batch, shape) if choose is None else choose(logits, batch)
        return Choice(batch, logits, targets)

    def _lay_out(
        self, staging: StagingViews, shape: StepShape, starts: torch.Tensor
    ) -> ForwardBatch:
        """Segment D of a host drafter: tokens, positions and KV slots from the slots' state."""
        state, rows, tokens = self.state, len(staging.slots), len(staging.tokens)
        device = staging.slots.device

        def new(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        batch = ForwardBatch(
            input_ids=new(tokens, torch.int64),
            positions=new(tokens, torch.int64),
            kv_slots=new(tokens, torch.int64),
            cu_q=staging.cu_q,
            kv_lens=new(rows, torch.int32),
            page_table=state.page_table,
            tree_bits=new(tokens, torch.int64),
            is_tree=new(rows, torch.uint8),
            logits_index=staging.node_index[: shape.nodes],
            slots=staging.slots,
            groups=shape.groups,
        )
        lay_out(
            staging.slots,
            staging.kinds,
            staging.starts,
            staging.cu_q,
            staging.tokens,
            staging.parents,
            state.seq_lens,
            state.last_tokens,
            state.page_table,
            self._kv.page_size,
            input_ids=batch.input_ids,
            positions=batch.positions,
            kv_slots=batch.kv_slots,
            kv_lens=batch.kv_lens,
            tree_bits=batch.tree_bits,
            is_tree=batch.is_tree,
            starts_before=starts,
            longest=max((group.max_q for group in shape.groups), default=1),
        )
        return batch

    def _choose(self, logits: torch.Tensor, batch: ForwardBatch, shape: StepShape) -> torch.Tensor:
        if not shape.sampled:
            return greedy_argmax(logits, pdl=self._pdl)
        assert batch.slots is not None, "batches of the device have slots"
        table = self.state.sampling
        token = torch.arange(len(batch.input_ids), device=logits.device, dtype=torch.int32)
        row = torch.searchsorted(batch.cu_q[1:], token, right=True)
        slots = batch.slots.long()[row.clamp_(max=len(batch.slots) - 1)]
        positions = batch.positions + 1
        if shape.nodes != len(positions):
            slots, positions = slots[batch.logits_index], positions[batch.logits_index]
        return coupled_sample(
            logits.float() if logits.dtype == torch.float16 else logits,
            table.temperatures[slots],
            table.top_ks[slots],
            table.top_ps[slots],
            table.min_ps[slots],
            table.seeds[slots],
            positions,
            active=table.sampled[slots],
            pdl=self._pdl,
        )

    def _accept(
        self,
        staging: StagingViews,
        shape: StepShape,
        batch: ForwardBatch,
        targets: torch.Tensor,
        starts: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Segment A: walk the trees, move accepted KV together and the slots' state on."""
        state, rows = self.state, len(staging.slots)
        lens, tokens = out[:rows], out[rows:].view(rows, shape.width)
        index = torch.empty_like(tokens)
        if self.decides:
            verify_walk(
                targets,
                batch.input_ids,
                staging.parents,
                staging.cu_q,
                staging.node_cu,
                staging.slots,
                starts,
                state.seq_lens,
                state.last_tokens,
                state.out_counts,
                accept_lens=lens,
                tokens=tokens,
                accept_idx=index,
            )
        if self._ranks is not None:
            self._ranks.agree((state.seq_lens, state.last_tokens, state.out_counts, out, index))
        if shape.moves:
            move_accepted(
                self._kv.data, staging.slots, starts, state.page_table, self._kv.page_size, lens,
                index,
            )  # fmt: skip
