"""A draft model's forward passes: over the tokens it drafts, and over what a step accepted."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from ...kernels import draft_rows_cpu
from ..forward_batch import ForwardBatch, RowGroup
from ..models.draft_net import DraftHidden
from .device_drafter import DraftRows, LoadedDraft, Verdict
from .draft_law import DraftDraw, columns_of
from .draft_ops import DraftOps
from .row_constants import RowConstants


class Extension(NamedTuple):
    """The rows of a step as the chains they accepted, E entries (see ``extend_inputs``).

    ``batch``: all but its ids; ``logits_index`` int64[R] is every row's newest entry. ``next_ids``,
    int64[E]; ``sources`` int64[E], the step's token of each entry.
    """

    batch: ForwardBatch
    next_ids: torch.Tensor
    sources: torch.Tensor


class DraftPasses:
    """Runs a draft model over the slots' pages (``page_table`` int32[S, P]).

    ``vocab_size``: the target's.
    """

    def __init__(
        self, draft: LoadedDraft, page_table: torch.Tensor, vocab_size: int, ops: DraftOps
    ) -> None:
        self.net = draft.net
        self.ops = ops
        self._kv = draft.kv
        self._page_table = page_table
        self._draft_ids = columns_of(draft.net.token_ids, vocab_size)
        self._constants = RowConstants(page_table.device)

    def forward(self, batch: ForwardBatch, hidden: torch.Tensor | None) -> DraftHidden:
        """The net over ``batch``."""
        return self.net.forward(batch, hidden, self._kv)

    def candidates(
        self, head_input: torch.Tensor, count: int, with_probs: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Best tokens int64[N, count] of N rows and, if asked for, their float32 probabilities."""
        shape, device = (len(head_input), count), head_input.device
        tokens = torch.empty(shape, dtype=torch.int64, device=device)
        probs = torch.empty(shape, dtype=torch.float32, device=device) if with_probs else None
        logits = self.net.logits(head_input)
        self.ops.top_candidates(logits, self.net.token_ids, tokens=tokens, probs=probs)
        return tokens, probs

    def levels(self, rows: DraftRows, most: int) -> int:
        """Levels of drafts that any row has room for, up to ``most``; a graph's follow from its
        shape alone.
        """
        if rows.caps.is_cuda:
            # Rows may be padding, without a token: a single real row then has all the others.
            return min(most, len(rows.tokens) - 1)
        return max(1, min(most, int(rows.caps.numpy().max())))

    def draw(self, rows: DraftRows, levels: int) -> DraftDraw | None:
        """What draws ``levels`` drafts of each row, if they are drawn."""
        if rows.noise is None:
            return None
        return DraftDraw(
            self.ops, rows.noise, rows.slots, rows.seq_lens, levels, self.net.token_ids,
            self._draft_ids,
        )  # fmt: skip

    def choose(
        self, head_input: torch.Tensor, level: int, draw: DraftDraw | None, tokens: torch.Tensor
    ) -> None:
        """Fill ``tokens`` int64[R] with draft ``level`` of R rows: the likeliest, or drawn."""
        logits = self.net.logits(head_input)
        if draw is None:
            self.ops.top_candidates(logits, self.net.token_ids, tokens=tokens[:, None], probs=None)
        else:
            draw.draw(level, logits, tokens)

    def chain(
        self,
        rows: DraftRows,
        ids: torch.Tensor,
        hidden: torch.Tensor | None,
        drafts: torch.Tensor,
        draw: DraftDraw | None = None,
        first: int = 0,
    ) -> None:
        """Continue R rows by one token a pass; pass i runs at seq_lens[slot] + i.

        ``ids`` int64[R] and ``hidden`` [R, H]: what the first pass takes in. ``drafts`` int64[N,
        R]: out, what each of N passes proposes, levels ``first`` and on.
        """
        for i, batch in enumerate(self._chain_batches(rows, len(drafts))):
            batch.input_ids = ids
            out = self.forward(batch, hidden)
            ids, hidden = drafts[i], out.recurrent
            self.choose(out.head_input, first + i, draw, ids)

    def step(self, rows: DraftRows, ids: torch.Tensor) -> DraftHidden:
        """One pass over R rows of one token each, ``ids`` int64[R], at the slots' lengths."""
        (batch,) = self._chain_batches(rows, 1)
        batch.input_ids = ids
        return self.forward(batch, None)

    def tree(
        self,
        rows: DraftRows,
        ids: torch.Tensor,
        bits: torch.Tensor,
        hidden: torch.Tensor | None,
        width: int,
        ahead: int,
    ) -> DraftHidden:
        """One pass over R rows of C nodes, from seq_lens[slot] + ``ahead`` on.

        ``ids``, ``bits`` int64[R, C]: tokens and ancestor sets, ``width`` nodes a level; ``hidden``
        [R, C, H].
        """
        positions, kv_slots = torch.empty(2, *ids.shape, dtype=torch.int64, device=ids.device)
        kv_lens = torch.empty(len(ids), dtype=torch.int32, device=ids.device)
        self.ops.tree_layout(
            rows.slots, rows.caps, rows.seq_lens, self._page_table, self._kv.page_size,
            width, ahead, positions=positions, kv_slots=kv_slots, kv_lens=kv_lens,
        )  # fmt: skip
        table, slots = pages_of(self._page_table, rows.slots, kv_lens, self._kv.page_size)
        batch = self._batch(
            table, slots, positions.flatten(), kv_slots.flatten(), kv_lens, ids.shape[1]
        )
        batch.input_ids = ids.flatten().contiguous()
        batch.tree_bits = bits.flatten().contiguous()
        batch.is_tree = torch.ones_like(batch.is_tree)
        return self.forward(batch, None if hidden is None else hidden.flatten(0, 1).contiguous())

    def extend(self, verdict: Verdict, prompts: torch.Tensor | None) -> Extension:
        """What R rows accepted, as plain rows over the places that the target's had."""
        batch = verdict.batch
        next_ids, sources, positions = torch.empty(
            3, len(batch.input_ids), dtype=torch.int64, device=batch.input_ids.device
        ).unbind()
        select = torch.empty(len(verdict.slots), dtype=torch.int64, device=sources.device)
        self.ops.extend_inputs(
            verdict.slots, verdict.kinds, verdict.starts, batch.cu_q, verdict.accept_lens,
            verdict.tokens, verdict.path, batch.input_ids, prompts,
            next_ids=next_ids, sources=sources, positions=positions, select=select,
        )  # fmt: skip
        extended = replace(
            batch,
            positions=positions,
            is_tree=self._constants.of(len(verdict.slots), 1).plain,
            logits_index=select,
        )
        if sources.is_cuda:
            return Extension(extended, next_ids, sources)
        if batch.slots is not None:
            extended.page_table, extended.slots = batch.page_table[batch.slots.long()], None
        return without_junk(Extension(extended, next_ids, sources), verdict)

    def _chain_batches(self, rows: DraftRows, passes: int) -> list[ForwardBatch]:
        """Passes over R rows of one token each (ids to come), one place on every time."""
        if not passes:
            return []
        shape, device = (passes, len(rows.slots)), self._page_table.device
        positions, kv_slots = torch.empty(2, *shape, dtype=torch.int64, device=device).unbind()
        kv_lens = torch.empty(shape, dtype=torch.int32, device=device)
        self.ops.chain_layout(
            rows.slots, rows.caps, rows.seq_lens, self._page_table, self._kv.page_size,
            positions=positions, kv_slots=kv_slots, kv_lens=kv_lens,
        )  # fmt: skip
        table, slots = pages_of(self._page_table, rows.slots, kv_lens, self._kv.page_size)
        return [
            self._batch(table, slots, *fields, 1)
            for fields in zip(positions.unbind(), kv_slots.unbind(), kv_lens.unbind(), strict=True)
        ]

    def _batch(
        self,
        table: torch.Tensor,
        slots: torch.Tensor | None,
        positions: torch.Tensor,
        kv_slots: torch.Tensor,
        kv_lens: torch.Tensor,
        width: int,
    ) -> ForwardBatch:
        """R plain rows of ``width`` tokens each, whose ids are to come."""
        rows = len(kv_lens)
        cu_q, zeros, is_tree, index = self._constants.of(rows, width)
        return ForwardBatch(
            input_ids=zeros,
            positions=positions,
            kv_slots=kv_slots,
            cu_q=cu_q,
            kv_lens=kv_lens,
            page_table=table,
            tree_bits=zeros,
            is_tree=is_tree,
            logits_index=index,
            slots=slots,
            groups=(RowGroup(0, rows, width),),
        )


def pages_of(
    table: torch.Tensor, slots: torch.Tensor, kv_lens: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of int32[S, P] a page table for rows of these slots and lengths, and the slots if it is that
    of all slots.
    """
    if table.is_cuda:
        return table, slots
    # Models on a CPU take the rows' own pages, as many as the longest row needs.
    if len(slots) == 1:
        return table.narrow(0, int(slots[0]), 1), None
    pages = -(-int(kv_lens.max()) // page_size)
    return torch.from_numpy(table.numpy()[slots.numpy(), :pages]), None


def without_junk(extension: Extension, verdict: Verdict) -> Extension:
    """The extension without entries that were not accepted, as a CPU's shapes may depend on it;
    its batch is changed.

    Every row that has entries keeps one.
    """
    batch = extension.batch
    fields = (extension.next_ids, extension.sources, batch.positions, batch.kv_slots.clone())
    next_ids, sources, positions, kv_slots = fields
    kv_lens, begins = batch.kv_lens.clone(), torch.empty_like(batch.cu_q)
    kept = draft_rows_cpu.drop_junk(
        verdict.kinds.numpy().astype(np.uint8, copy=False),  # int32 in steps on a GPU
        verdict.accept_lens.numpy(), batch.cu_q.numpy(),
        next_ids.numpy(), sources.numpy(), positions.numpy(), kv_slots.numpy(),
        kv_lens.numpy(), begins.numpy(), batch.logits_index.numpy(),
    )  # fmt: skip
    next_ids, sources, positions, kv_slots = (field[:kept] for field in fields)
    batch.positions, batch.kv_slots = positions, kv_slots
    batch.cu_q, batch.kv_lens = begins, kv_lens
    batch.tree_bits, batch.groups = batch.tree_bits[:kept], ()
    return Extension(batch, next_ids, sources)
