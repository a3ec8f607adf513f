"""Several processes that train one draft: who this one is, and how gradients meet."""

from typing import NamedTuple

import torch
import torch.distributed as dist


class World(NamedTuple):
    """This process among ``size``; alone unless torch.distributed was initialised before."""

    rank: int
    size: int

    def average(self, tensors: list[torch.Tensor]) -> None:
        """Each tensor becomes its mean over all processes, in place."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        flat /= self.size
        at = 0
        for tensor in tensors:
            tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
            at += tensor.numel()


def this_world() -> World:
    """The process group of this process, or itself alone."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return World(0, 1)
