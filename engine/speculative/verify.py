"""Tree verify: one acceptance for all drafters and both sampling rules.

The target's token at every node is known. A child is accepted iff its token equals the target's
token at its parent: with the argmax this is greedy verification, with coupled noise it is
target-only sampling. A chain is a tree with one child a node.
"""

import torch

from ...cython_ext.batch_assembly import compact_accepted
from ...cython_ext.tree_walk import advance, walk
from ...engine_core.ids import I32
from ..future_map import FutureMap
from ..kv_pool import KVPool
from ..step_buffers import StepBuffers
from .simulate import SimulatedAcceptance


def decide(
    targets: torch.Tensor,
    slots: I32,
    branches: bool,
    buffers: StepBuffers,
    simulated: SimulatedAcceptance | None = None,
    most: I32 | None = None,
) -> tuple[int, bool]:
    """Accept the step's rows: how many tokens they emit, and whether accepted KV lies scattered.

    ``targets`` int64[N]; ``slots`` int32[R]; ``branches``: whether any row's drafts branch. Fills
    ``buffers.accept_*`` and ``emitted``. ``simulated`` forces the rows' accept lengths. ``most``
    int32[R]: tokens that a row emits at most; ``buffers.trimmed`` says what that took.
    """
    rows = len(slots)
    tokens, chosen = buffers.input_ids, targets.numpy()
    if simulated is not None:
        tokens, chosen = simulated.force(chosen, slots, branches, buffers)
    return walk(
        tokens,
        buffers.parents if branches else None,
        buffers.cu_q[: rows + 1],
        buffers.node_cu[: rows + 1],
        chosen,
        buffers.accept_lens,
        buffers.accept_cu,
        buffers.accept_idx,
        buffers.emitted,
        most,
        None if most is None else buffers.trimmed,
    )


def settle(
    total: int,
    scattered: bool,
    slots: I32,
    buffers: StepBuffers,
    state: FutureMap,
    kv: KVPool,
) -> None:
    """Carry out what was decided: ``buffers.accept_*`` and ``emitted``, ``total`` tokens.

    Moves the KV of accepted nodes side by side where they are ``scattered``, and the slots' state
    over what was emitted.
    """
    rows = len(slots)
    if scattered:
        moves = compact_accepted(
            slots,
            buffers.starts[:rows],
            state.host.page_table,
            kv.page_size,
            buffers.accept_cu[: rows + 1],
            buffers.accept_idx[:total],
            buffers.move_src,
            buffers.move_dst,
        )
        kv.move(
            torch.from_numpy(buffers.move_src[:moves]), torch.from_numpy(buffers.move_dst[:moves])
        )
    advance(
        slots,
        buffers.starts,
        buffers.q_lens,
        buffers.node_cu,
        buffers.accept_cu,
        buffers.emitted,
        state.host.seq_lens,
        state.host.last_tokens,
        state.host.out_counts,
    )
