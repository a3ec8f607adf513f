"""Logit processors at tree nodes, on a CPU (``kernels/logit_edits_gpu`` has the GPU's).

Each node sees its history and the drafts before it.
The order is the one that vLLM and SGLang users expect: penalties, logit bias, minimum length, bans,
grammar, custom processors (:mod:`.slot_processors`), then (in ``kernels/coupled_sample``)
temperature, top_k, top_p, min_p.
"""

import numpy as np
import torch

from ...kernels.logit_edits import MASKED
from ...kernels.logit_masks import DEAD, FREE, mask_logits
from .nodes import Nodes
from .slot_edits import SlotEdits
from .slot_grammars import NodeMasks


def apply_penalties(logits: torch.Tensor, nodes: Nodes, edits: SlotEdits) -> None:
    """Penalise logits float32[M, V] in place; every node's slot has penalty counts.

    Repetition divides positive and multiplies negative logits of tokens in prompt or output;
    then frequency times the output count and presence are subtracted.
    """
    rows = edits.counts.row_of[nodes.slots]
    counts = edits.counts.output[rows]
    ones = torch.ones_like(nodes.path_token, dtype=torch.int32)
    counts.index_put_((nodes.path_node, nodes.path_token), ones, accumulate=True)
    generated = counts > 0
    repetition = edits.repetition[nodes.slots][:, None]
    scale = torch.where(logits > 0, 1.0 / repetition, repetition)
    seen = generated | edits.counts.in_prompt[rows]
    logits.mul_(torch.where(seen, scale, 1.0))
    logits.sub_(counts * edits.frequency[nodes.slots][:, None])
    logits.sub_(generated * edits.presence[nodes.slots][:, None])


def apply_logit_bias(logits: torch.Tensor, nodes: Nodes, edits: SlotEdits) -> None:
    """Add the slots' biases to logits float32[M, V] in place."""
    for slot, (ids, values) in edits.biases.items():
        of_slot = torch.nonzero(nodes.slots == slot)
        logits[of_slot, ids] += values


def apply_min_tokens(
    logits: torch.Tensor, nodes: Nodes, edits: SlotEdits, out_counts: torch.Tensor
) -> None:
    """Mask end tokens in logits float32[M, V] at nodes whose output is still too short.

    ``out_counts`` int32[S]; a node at depth d decides output token number out_count + d + 1.
    """
    short = out_counts[nodes.slots] + nodes.depths < edits.min_new_tokens[nodes.slots]
    for slot, ids in edits.masked.items():
        logits[torch.nonzero(short & (nodes.slots == slot)), ids] = MASKED


def apply_bans(logits: torch.Tensor, nodes: Nodes, edits: SlotEdits) -> None:
    """Mask in logits float32[M, V] what the slots' bans rule out after each node's path."""
    for slot, bans in edits.bans.items():
        of_slot = torch.nonzero(nodes.slots == slot)[:, 0]
        logits[of_slot] = torch.where(bans.always, MASKED, logits[of_slot])
        for node in of_slot.tolist():
            path = nodes.path_token[nodes.path_node == node].tolist()
            logits[node, bans.after(path)] = MASKED


def apply_masks(logits: torch.Tensor, nodes: Nodes, masks: NodeMasks) -> None:
    """Mask in logits float32[M, V] what grammars forbid; a row that may have nothing becomes NaN.

    ``masks.nodes`` are some of ``nodes``, which rise.
    """
    places = np.full(len(logits), FREE, dtype=np.int32)
    rows = np.searchsorted(nodes.index.numpy(), masks.nodes)
    places[rows] = np.where(masks.dead, DEAD, np.arange(len(rows)))
    mask_logits(logits, torch.from_numpy(places), torch.from_numpy(masks.bits))
