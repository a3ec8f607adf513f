"""A draft whose MLPs keep the neurons that weigh most."""

import re

import torch

_GATE = re.compile(r"(.*\bmlp\.)gate_proj\.weight")


def narrowed(tensors: dict[str, torch.Tensor], width: int, kept: int) -> dict[str, torch.Tensor]:
    """``tensors`` with ``kept`` of the ``width`` neurons of each gated MLP, in their order.

    A neuron weighs the product of the norms of its gate, up and down vectors: how much it adds to
    the stream for an input that knows no direction. MLPs of another shape than gate and up [width,
    H] and down [H, width] stay as they are.
    """
    made = dict(tensors)
    for match in filter(None, map(_GATE.fullmatch, tensors)):
        names = [f"{match[1]}{part}_proj.weight" for part in ("gate", "up", "down")]
        if not all(name in tensors for name in names):
            continue
        gate, up, down = (tensors[name] for name in names)
        if gate.shape != up.shape or gate.shape != down.t().shape or len(gate) != width:
            continue
        weight = gate.float().norm(dim=1) * up.float().norm(dim=1) * down.float().norm(dim=0)
        chosen = weight.topk(kept).indices.sort().values
        parts = gate[chosen], up[chosen], down[:, chosen]
        made.update(zip(names, (part.contiguous() for part in parts), strict=True))
    return made
