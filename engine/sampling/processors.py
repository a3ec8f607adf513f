"""Logit processors at tree nodes. Each node sees its history and the drafts before it.

The order is the one that vLLM and SGLang users expect: penalties, logit bias, minimum length,
then (in ``kernels/coupled_sample``) temperature, top_k, top_p, min_p.
"""

import torch

from .nodes import Nodes
from .slot_table import SlotTable

# Not -inf: a masked row stays finite, and no finite logit is below it.
MASKED = torch.finfo(torch.float32).min


def apply_penalties(logits: torch.Tensor, nodes: Nodes, table: SlotTable) -> None:
    """Penalise logits float32[M, V] in place; every node's slot has penalty counts.

    Repetition divides positive and multiplies negative logits of tokens in prompt or output;
    then frequency times the output count and presence are subtracted.
    """
    rows = table.counts.row_of[nodes.slots]
    counts = table.counts.output[rows]
    ones = torch.ones_like(nodes.path_token, dtype=torch.int32)
    counts.index_put_((nodes.path_node, nodes.path_token), ones, accumulate=True)
    generated = counts > 0
    repetition = table.repetition[nodes.slots][:, None]
    scale = torch.where(logits > 0, 1.0 / repetition, repetition)
    seen = generated | table.counts.in_prompt[rows]
    logits.mul_(torch.where(seen, scale, 1.0))
    logits.sub_(counts * table.frequency[nodes.slots][:, None])
    logits.sub_(generated * table.presence[nodes.slots][:, None])


def apply_logit_bias(logits: torch.Tensor, nodes: Nodes, table: SlotTable) -> None:
    """Add the slots' biases to logits float32[M, V] in place."""
    for slot, (ids, values) in table.biases.items():
        of_slot = torch.nonzero(nodes.slots == slot)
        logits[of_slot, ids] += values


def apply_min_tokens(
    logits: torch.Tensor, nodes: Nodes, table: SlotTable, out_counts: torch.Tensor
) -> None:
    """Mask end tokens in logits float32[M, V] at nodes whose output is still too short.

    ``out_counts`` int32[S]; a node at depth d decides output token number out_count + d + 1.
    """
    short = out_counts[nodes.slots] + nodes.depths < table.min_new_tokens[nodes.slots]
    for slot, ids in table.masked.items():
        logits[torch.nonzero(short & (nodes.slots == slot)), ids] = MASKED
