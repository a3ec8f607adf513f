"""The target's token at every node, on a CPU: argmax, processors and noise where asked."""

import numpy as np
import torch

from ...engine_core.ids import I32, U8
from ...kernels import greedy_argmax_cpu
from ...kernels.coupled_sample import usable_rows
from ...kernels.coupled_sample_cpu import coupled_sample
from ..forward_batch import ForwardBatch
from .acceptance import Acceptance, Columns
from .features import EDITS, PROCESSED, Feature
from .nodes import Nodes, place_nodes
from .processors import (
    apply_bans,
    apply_logit_bias,
    apply_masks,
    apply_min_tokens,
    apply_penalties,
)
from .slot_edits import SlotEdits
from .slot_grammars import NodeMasks
from .slot_processors import ProcessorWork
from .slot_table import SlotTable


def argmax_rows(logits: torch.Tensor) -> torch.Tensor:
    """int64[N] argmax of float32[N, V], lowest id among equals; -1 for NaN or infinite rows."""
    ids = torch.empty(logits.shape[0], dtype=torch.int64)
    greedy_argmax_cpu.greedy_argmax(logits.numpy(), ids.numpy())
    return ids


def choose_targets(
    logits: torch.Tensor,
    batch: ForwardBatch,
    slots: I32,
    node_cu: I32,
    table: SlotTable,
    edits: SlotEdits,
    out_counts: torch.Tensor,
    acceptance: Acceptance | None = None,
    masks: NodeMasks | None = None,
    work: ProcessorWork | None = None,
) -> torch.Tensor:
    """int64[N]: the token that each of the step's N nodes decides on; -1 where unusable.

    ``logits`` float32[N, V] stay untouched. ``slots`` int32[R] and ``node_cu`` int32[R + 1] are
    the step's rows, ``out_counts`` int32[S] the output tokens before it. Nodes of sampled rows go
    by ``acceptance``; without it their tokens are drawn with the coupled noise. ``masks``: of the
    nodes of rows with a grammar. ``work``: of those with custom processors.
    """
    targets = argmax_rows(logits)
    if not table.featured:
        return targets
    features: U8 = table.features[slots]
    if not (features & PROCESSED).any():
        return targets
    nodes, node_features = _processed_nodes(batch, slots, node_cu, features)
    edited = _edit(logits, nodes, node_features, edits, out_counts)
    if masks is not None:
        apply_masks(edited, nodes, masks)
    if work is not None:
        work.apply(edited, nodes.index.numpy())
    sampled = torch.from_numpy((node_features & int(Feature.SAMPLED)) != 0).to(logits.device)
    chosen = torch.empty_like(nodes.index)
    if not sampled.all():
        chosen[~sampled] = argmax_rows(edited[~sampled])
    if sampled.any():
        chosen[sampled] = _sample(edited[sampled], nodes, sampled, table, acceptance)
    targets[nodes.index] = torch.where(targets[nodes.index] < 0, -1, chosen)
    return targets


def _processed_nodes(
    batch: ForwardBatch, slots: I32, node_cu: I32, features: U8
) -> tuple[Nodes, U8]:
    """The nodes of rows with processors, and their rows' features uint8[M]."""
    widths = np.diff(node_cu)
    row_of_node = np.repeat(np.arange(len(slots)), widths)
    node_features = features[row_of_node]
    index = np.flatnonzero(node_features & PROCESSED)
    rows = row_of_node[index]
    device = batch.input_ids.device
    first = batch.logits_index[torch.from_numpy(node_cu[rows].astype(np.int64)).to(device)]
    nodes = place_nodes(
        torch.from_numpy(index).to(device),
        torch.from_numpy(slots[rows].astype(np.int64)).to(device),
        first,
        batch.logits_index,
        batch.input_ids,
        batch.positions,
        batch.tree_bits,
    )
    return nodes, node_features[index]


def _edit(
    logits: torch.Tensor,
    nodes: Nodes,
    node_features: U8,
    edits: SlotEdits,
    out_counts: torch.Tensor,
) -> torch.Tensor:
    """float32[M, V]: the nodes' logits after penalties, bias, minimum length and bans, a copy."""
    edited = logits[nodes.index]
    if not (node_features & EDITS).any():
        return edited
    penalized = (node_features & int(Feature.PENALTIES)) != 0
    if penalized.any():
        chosen = torch.from_numpy(penalized).to(logits.device)
        part = edited[chosen]
        apply_penalties(part, nodes.select(chosen), edits)
        edited[chosen] = part
    if (node_features & int(Feature.LOGIT_BIAS)).any():
        apply_logit_bias(edited, nodes, edits)
    if (node_features & int(Feature.MIN_TOKENS)).any():
        apply_min_tokens(edited, nodes, edits, out_counts)
    if (node_features & int(Feature.BANS)).any():
        apply_bans(edited, nodes, edits)
    return edited


def _sample(
    logits: torch.Tensor,
    nodes: Nodes,
    sampled: torch.Tensor,
    table: SlotTable,
    acceptance: Acceptance | None,
) -> torch.Tensor:
    slots = nodes.slots[sampled]
    columns = Columns(
        table.temperatures[slots],
        table.top_ks[slots],
        table.top_ps[slots],
        table.min_ps[slots],
        table.seeds[slots],
        nodes.positions[sampled],
    )
    if acceptance is not None:
        chosen = acceptance.choose(nodes.index[sampled], logits, columns)
        return torch.where(usable_rows(logits), chosen, -1)
    tokens = torch.empty(len(slots), dtype=torch.int64)
    temperatures, top_ks, top_ps, min_ps, seeds, positions = (c.numpy() for c in columns)
    coupled_sample(
        logits.numpy(), temperatures, top_ks, top_ps, min_ps, seeds, positions, tokens.numpy()
    )
    return tokens
