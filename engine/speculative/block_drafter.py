"""DFLASH and DSPARK: blocks of drafts from one forward pass (block_drafts.md 1.8 to 2.7)."""

from typing import NamedTuple

import torch

from ...engine_core.plan import SlotInit
from ..forward_batch import ForwardBatch, RowGroup
from ..models.torch_block import block_of
from .block_window import BlockWindow
from .device_drafter import DrafterContext, DraftRows, LoadedBlock, Verdict
from .draft_law import DraftDraw, DraftLaw
from .draft_ops import draft_ops
from .draft_passes import pages_of
from .row_constants import RowConstants


class _Drafted(NamedTuple):
    """See ``BlockNet.choose``."""

    hidden: torch.Tensor
    bonus: torch.Tensor
    tokens: torch.Tensor


class BlockDrafter:
    """A :class:`DeviceDrafter` whose net fills in a block of masked tokens behind the bonus token.

    ``align`` injects keys and values of all that the target ran, so that a slot's draft KV reaches
    as far as the target's. Those of rejected tokens and of blocks lie behind the slot's length,
    where the next block's and then injected ones replace them before they are read. ``bonus``
    int64[S]: the newest token of each slot.
    """

    def __init__(self, context: DrafterContext, draft: LoadedBlock) -> None:
        net, device = draft.net, context.device
        self.feature_layers: tuple[int, ...] | None = net.config.feature_layers
        self._drafted: _Drafted | None = None
        self._net = net
        self._kv = draft.kv
        self._block = block_of(net.config)
        self._page_table = context.page_table
        self._ops = draft_ops(device)
        self._constants = RowConstants(device)
        self._window: BlockWindow | None = None
        if draft.window is not None:
            size = draft.kv.page_size
            self._window = BlockWindow(draft.window, context.page_table, size, self._ops)
        self.bonus = torch.zeros(context.slots, dtype=torch.int64, device=device)

    @property
    def confidence(self) -> torch.Tensor | None:
        """float32[R, drafts] of the latest ``propose``, row by row: the raw logits of the net's
        confidence head, which runs for whoever asks; None without one, and before the first.
        """
        return None if self._drafted is None else self._net.confidence(*self._drafted)

    def enter(self, init: SlotInit) -> None:
        """Nothing to keep: the prefill gives all that is needed."""

    def propose(self, rows: DraftRows) -> DraftLaw | None:
        """Run a block of every row that has a cap, and choose or draw its tokens."""
        shape, device = (self._block.drafts, len(rows.slots)), rows.slots.device
        first = torch.empty(shape[1], dtype=torch.int64, device=device)
        places, tokens = torch.empty(2, *shape, dtype=torch.int64, device=device).unbind()
        if self._window is None:
            batch = self._lay_out(rows, first, places)
        else:
            rows, starts = self._window.begin(rows)
            batch = self._window.view(self._lay_out(rows, first, places), rows, starts)
        hidden = self._net.forward(batch, self._kv)
        picked = self._ops.pick_rows(places.view(-1), hidden).view(*shape, -1)
        draw: DraftDraw | None = None
        if rows.noise is not None:
            draw = DraftDraw(self._ops, rows.noise, rows.slots, rows.seq_lens, shape[0], None, None)
        drawn = None if draw is None else draw.draw
        self._net.choose(picked, first, tokens, drawn)
        self._drafted = _Drafted(picked, first, tokens)
        self._ops.write_chains(
            tokens, rows.cu_q, rows.caps,
            tokens=rows.tokens, parents=rows.parents, proposed=rows.proposed, depths=rows.depths,
        )  # fmt: skip
        return None if draw is None else draw.law()

    def align(self, verdict: Verdict) -> None:
        """Inject all that the target ran, and keep the newest tokens."""
        batch = verdict.batch
        slots = batch.kv_slots if self._window is None else self._window.slots_of(batch.kv_slots)
        self._net.inject(verdict.features, batch.positions, slots, self._kv)
        self._ops.keep_newest(verdict.slots, verdict.accept_lens, verdict.tokens, bonus=self.bonus)

    def reset(self) -> None:
        """Nothing to do: a slot's state is written by the prefill of the request that enters."""

    def _lay_out(self, rows: DraftRows, first: torch.Tensor, places: torch.Tensor) -> ForwardBatch:
        """The rows' blocks; fills ``first`` and ``places``, see `block_layout.block_layout`."""
        block, count, device = self._block, len(rows.slots), rows.slots.device
        # A block is no longer than its row of the step, so the step's tokens bound all blocks'.
        room = min(count * block.rows, len(rows.tokens))
        ids, positions, kv_slots = torch.empty(3, room, dtype=torch.int64, device=device).unbind()
        cu_q = torch.empty(count + 1, dtype=torch.int32, device=device)
        kv_lens = torch.empty_like(rows.slots)
        self._ops.block_layout(
            rows.slots, rows.caps, rows.seq_lens, self._page_table, self._kv.page_size,
            self.bonus, block.first_row, block.mask_token_id,
            ids=ids, positions=positions, kv_slots=kv_slots, cu_q=cu_q, kv_lens=kv_lens,
            first=first, places=places,
        )  # fmt: skip
        if device.type != "cuda":
            room = max(1, int(cu_q[-1]))
            ids, positions, kv_slots = ids[:room], positions[:room], kv_slots[:room]
        nothing = self._constants.of(max(room, count), 1)  # the net has masks of its own
        table, slots = pages_of(self._page_table, rows.slots, kv_lens, self._kv.page_size)
        return ForwardBatch(
            input_ids=ids,
            positions=positions,
            kv_slots=kv_slots,
            cu_q=cu_q,
            kv_lens=kv_lens,
            page_table=table,
            tree_bits=nothing.zeros[:room],
            is_tree=nothing.plain[:count],
            logits_index=places.view(-1),
            slots=slots,
            groups=(RowGroup(0, count, block.rows),),
        )


def make(context: DrafterContext) -> BlockDrafter:
    """The drafter that DFLASH's and DSPARK's specs name. Raises ValueError without a model."""
    if not isinstance(context.draft, LoadedBlock):
        raise ValueError("DFLASH and DSPARK draft with a model of their kind, and none was loaded")
    return BlockDrafter(context, context.draft)
