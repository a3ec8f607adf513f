"""The ranks of one model as torch.distributed sees them."""

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from .bounded import bounded
from .patience import rank_timeout_s

# On a GPU the first collective waits for matmuls to be measured on every rank; later ones are
# bounded by their step.
_NCCL_TIMEOUT_S = 600.0
# Rank 0 gives up first: it can ask the others who hangs.
_FOLLOWERS = 1.5

_LEAVE_S = 3.0


class Group:
    """Rank ``rank`` of ``size``; collectives work once ``join`` has returned.

    On CUDA (NCCL) a collective only enqueues, and can be captured in a CUDA graph. All ranks must
    call the same ones in the same order.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        self._nccl = device.type == "cuda"
        self._aborted = threading.Lock()
        self._left = False
        self._timeout_s = _NCCL_TIMEOUT_S if self._nccl else rank_timeout_s()
        if not (self._nccl or self.leads):
            self._timeout_s *= _FOLLOWERS
        self.late = False  # a collective was given up

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which decides."""
        return self.rank == 0

    def join(self, store: Path) -> None:
        """Meet the other ranks through a file. Raises RuntimeError if they do not come.

        torch keeps one group a process: engines of several ranks follow each other. A thread that
        joins after ``leave`` was called lets go at once.
        """
        if dist.is_initialized():
            raise RuntimeError("another engine of this process has ranks; shut it down first")
        if self._nccl:
            torch.cuda.set_device(self._device)
            # NVLink multicast needs rights that containers often lack, and helps large sums only.
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        else:
            # The ranks are of one host; its name may stand for an address that is not up.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl" if self._nccl else "gloo",
            init_method=f"file://{store}",
            rank=self.rank,
            world_size=self.size,
            timeout=datetime.timedelta(seconds=self._timeout_s),
            device_id=self._device if self._nccl else None,
            # They name the group; else torch counts, and counts joins that failed too.
            _ranks=list(range(self.size)),
        )
        if self._left:
            self.leave()

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` itself, now the sum over all ranks."""
        with self._in_time():
            dist.all_reduce(x)
        return x

    def agree(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take rank 0's contents over: contiguous int32 tensors, of the same shapes everywhere."""
        joined = torch.cat([tensor.view(-1) for tensor in tensors])
        with self._in_time():
            dist.broadcast(joined, 0)
        if not self.leads:
            parts = torch.split(joined, [tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.view(-1).copy_(part)

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        """Around a collective: RuntimeError in plain words when gloo gives it up."""
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if time.monotonic() - began < self._timeout_s:
                raise
            self.late = True
            reason = f"the ranks did not come to a sum or decision within {self._timeout_s:g} s"
            raise RuntimeError(reason) from error

    def abort(self) -> None:
        """Make collectives that wait for a dead rank end, with any result; any thread, once.

        Those of gloo end by themselves when a connection breaks.
        """
        if self._nccl and dist.is_initialized() and self._aborted.acquire(blocking=False):
            # What cannot be aborted any more is over.
            with contextlib.suppress(RuntimeError, ValueError):
                dist.distributed_c10d._abort_process_group()

    def leave(self) -> None:
        """Let go of the other ranks; graphs with collectives in them must be gone. Idempotent.

        Ranks do so together; one that waits in vain breaks off after a while.
        """
        self._left = True
        if dist.is_initialized() and not bounded(dist.destroy_process_group, _LEAVE_S):
            bounded(self.abort, _LEAVE_S)
