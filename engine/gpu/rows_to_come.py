"""The rows of a step on a GPU as segment D laid them out, for what the host has a say in before A.

The drafts of the device are among them. The copy runs beside the target.
"""

from typing import NamedTuple

import numpy as np
import torch

from ...cython_ext.packed_rows import PackedRows
from ...engine_core.ids import I32
from ..sampling.slot_grammars import RowTokens
from .device_step import LaidOut
from .marks import Mark, new_mark
from .packer import places
from .pinned_ring import PinnedRing


class RowsToCome(NamedTuple):
    """A step's rows on their way to the host: ``host`` int32, complete once ``done`` has passed.

    ``rows`` R and ``tokens`` T of the batch, of which the plan's rows have the places ``places``.
    """

    host: torch.Tensor
    rows: int
    tokens: int
    places: I32
    done: Mark

    def wait(self) -> RowTokens:
        """The plan's rows, once they are here."""
        self.done.synchronize()
        edge = self.rows + 1
        planned = (len(self.host) - self.tokens - 2 * edge,)
        tokens, parents, cu_q, node_cu = np.split(
            self.host.numpy(), np.cumsum((self.tokens, *planned, edge))
        )
        first, last = self.places, self.places + 1
        return RowTokens(cu_q[first], cu_q[last], node_cu[first], node_cu[last], tokens, parents)


class MaskWait(NamedTuple):
    """Segment A's wait for the host by the device's clock: from the end of F to what it gives."""

    begin: Mark
    end: Mark


class RowFetch:
    """Has rows copied. ``device``: the GPU's, or a CPU's in Triton's interpreter."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows = PinnedRing(device.type == "cuda")

    def fetch(self, laid: LaidOut, packed: PackedRows, gap: int) -> RowsToCome:
        """Have segment D's rows copied to the host; ``gap``: see ``places``."""
        staging, batch = laid.staging, laid.batch
        parts = batch.input_ids.int(), staging.parents, staging.cu_q, staging.node_cu
        block = torch.cat(parts)
        host = self._rows.take(len(block)).tensor
        host.copy_(block, non_blocking=True)
        done = new_mark(self._device)
        done.record()
        found = places(packed, gap)
        if isinstance(found, slice):
            found = np.arange(packed.rows)
        rows = found.astype(np.int32)
        return RowsToCome(host, len(staging.slots), len(batch.input_ids), rows, done)

    def wait(self) -> MaskWait:
        """The wait for the host that begins behind what was enqueued so far."""
        begin = new_mark(self._device)
        begin.record()
        return MaskWait(begin, new_mark(self._device))
