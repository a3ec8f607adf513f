"""A core process whose verification is broken: every row accepts one draft too many.

Run as a script in place of ``outrider.engine.core_process``.
"""

import os
import sys

import numpy as np
import torch

from outrider.engine import core_process, step
from outrider.engine.speculative import verify
from outrider.engine.speculative.simulate import SimulatedAcceptance
from outrider.engine.step_buffers import StepBuffers
from outrider.engine_core.ids import I32

honest = verify.decide


def decide(
    targets: torch.Tensor,
    slots: I32,
    branches: bool,
    buffers: StepBuffers,
    simulated: SimulatedAcceptance | None = None,
    most: I32 | None = None,
) -> tuple[int, bool]:
    """The first child of the last accepted node is taken for what the target wants."""
    honest(targets, slots, branches, buffers, simulated, most)
    wanted = targets.clone()
    for row in range(len(slots)):
        last = int(buffers.accept_idx[buffers.accept_cu[row + 1] - 1])
        width = int(buffers.node_cu[row + 1] - buffers.node_cu[row])
        first = int(buffers.cu_q[row + 1]) - width
        parents = buffers.parents[first : first + width]
        children = np.flatnonzero(parents == last) if branches else np.array([last + 1])
        children = children[(children > last) & (children < width)]
        if len(children):
            draft = int(buffers.input_ids[first + int(children[0])])
            wanted[int(buffers.node_cu[row]) + last] = draft
    return honest(wanted, slots, branches, buffers, simulated, most)


vars(step)["decide"] = decide

if __name__ == "__main__":
    status = core_process.main()
    sys.stderr.flush()
    os._exit(status)
