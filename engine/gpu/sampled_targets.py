"""The target's token at the nodes of a step in which some rows are sampled."""

from typing import NamedTuple

import torch

from ...kernels.block_verify_gpu import block_verify
from ...kernels.coupled_sample_gpu import coupled_sample
from ...kernels.rejection_sample_gpu import rejection_sample
from ...kernels.threshold_sample import Thresholds
from ...kernels.threshold_sample_gpu import threshold_sample
from ..forward_batch import ForwardBatch
from ..sampling.node_drafts import node_drafts
from ..sampling.slot_table import SlotTable
from ..sampling.tree_parents import tree_parents
from ..speculative.draft_law import DraftLaw


class Drawn(NamedTuple):
    """Drafts that were drawn: from what, and how many each row has, int32[R]. ``blocks``: those of
    a row are judged together."""

    law: DraftLaw
    proposed: torch.Tensor
    blocks: bool


class Tried(NamedTuple):
    """Drafts of any kind that the target alone judges: the step's ``node_cu`` int32[R + 1], parents
    within rows int32[T], and tokens that rows emit at most, int32[R], None for no limit."""

    thresholds: Thresholds
    node_cu: torch.Tensor
    parents: torch.Tensor
    most: torch.Tensor | None


def sample_targets(
    logits: torch.Tensor,
    batch: ForwardBatch,
    all_nodes: bool,
    table: SlotTable,
    judged: Drawn | Tried | None,
    pdl: bool,
) -> torch.Tensor:
    """int64[N] from the edited logits [N, V]; rows that are not sampled take the argmax.

    ``all_nodes``: every token of the batch is a node. Drafts that are ``judged`` are accepted or
    replaced, by rules that know both laws or by thresholds.
    """
    assert batch.slots is not None, "batches of the device have slots"
    token = torch.arange(len(batch.input_ids), device=logits.device)
    row = torch.searchsorted(batch.cu_q[1:], token.int(), right=True)
    row.clamp_(max=len(batch.slots) - 1)
    positions = batch.positions + 1
    if not all_nodes:
        token, row = batch.logits_index, row[batch.logits_index]
        positions = positions[batch.logits_index]
    slots = batch.slots.long()[row]
    columns = (
        logits.float() if logits.dtype == torch.float16 else logits,
        table.temperatures[slots],
        table.top_ks[slots],
        table.top_ps[slots],
        table.min_ps[slots],
        table.seeds[slots],
        positions,
    )
    active = table.sampled[slots]
    if judged is None:
        return coupled_sample(*columns, active=active, pdl=pdl)
    if isinstance(judged, Tried):
        parents = tree_parents(
            token, row, batch.cu_q, judged.node_cu, judged.parents, batch.positions, judged.most
        )
        return threshold_sample(
            *columns, batch.input_ids[token], parents, judged.thresholds, active=active, pdl=pdl
        )
    held = node_drafts(judged.law, token, row, batch.cu_q, judged.proposed, None, batch.input_ids)
    rule = block_verify if judged.blocks else rejection_sample
    return rule(
        *columns, held.tokens, held.logits, held.rows, held.draft_ids, active=active, pdl=pdl
    )
