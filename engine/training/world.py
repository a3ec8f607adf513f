"""Several processes that train one draft: who this one is, how gradients meet, who decides."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class World(NamedTuple):
    """This process among ``size``; alone unless torch.distributed was initialised before.

    Rank 0 decides what its clock says, and is the only one that writes.
    """

    rank: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def lead(self, values: Sequence[float]) -> list[float]:
        """Rank 0's values, in place of each one's own."""
        if self.size == 1:
            return list(values)
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        shared = torch.tensor(values, dtype=torch.float64, device=device)
        dist.broadcast(shared, 0)
        return shared.tolist()

    def lead_first(self, first: Callable[[], T], then: Callable[[], T]) -> T:
        """``first`` on rank 0; the others wait for its end and do ``then``.

        What ``first`` raises is raised on rank 0; the others raise RuntimeError.
        """
        if not self.leads:
            if not self.lead([0.0])[0]:
                raise RuntimeError("rank 0 failed, its own error says why")
            return then()
        done = False
        try:
            made = first()
            done = True
        finally:
            self.lead([float(done)])
        return made

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
