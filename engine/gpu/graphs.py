"""CUDA graphs of steps, one a tier, replayed over the tier's staging block."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from ...engine_core.plan import StepPlan
from .device_step import DeviceStep, Forwarded, LaidOut, StepMasks, StepShape
from .staging import StagingShape, StagingViews, field_lengths, split_device
from .tier_shapes import tier_shape, tier_staging
from .tiers import Tier

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE as _Pool


T = TypeVar("T")


class Recorded(Protocol):
    """Launches that were recorded once."""

    def replay(self) -> None:
        """Enqueue them all."""
        ...


@dataclass(frozen=True, slots=True)
class LaterParts:
    """Segments F and A of a step in which the host has a say in between, from what D ``laid`` out.

    ``found``: what F gave, edited. ``masks``: what A reads.
    """

    forward: Recorded
    finish: Recorded
    laid: Callable[[], LaidOut]
    found: Callable[[], Forwarded]
    masks: StepMasks


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A captured step. ``block`` int32: its input; ``out`` int32: its output (see DeviceStep).

    ``layout``: that of the edits whose memory it reads. ``later``: what follows ``graph`` where
    that is segment D alone.
    """

    graph: Recorded
    staging: StagingShape
    block: torch.Tensor
    out: torch.Tensor
    layout: int
    later: LaterParts | None = None


class _Kept(Generic[T]):
    """What the latest call gave; of a captured one, tensors that each replay writes."""

    def keep(self, value: T) -> None:
        """Hold on to it."""
        self.value = value


class StepGraphs:
    """Captures graphs on demand or ahead of time; all share one memory pool.

    Sharing is safe because replays follow each other on one stream and a graph's output is copied
    out before the next replay. ``block_bytes`` of input and the outputs are outside the pool.
    """

    def __init__(
        self, step: DeviceStep, device: torch.device, reach: int = 1, masked_reach: int = 1
    ) -> None:
        """``reach``: see ``tier_staging``; ``masked_reach`` where grammars may force drafts upon
        rows, which have pages for them also where nothing is forced.
        """
        self._step = step
        self._reach = reach
        self._masked_reach = max(reach, masked_reach)
        self._device = device
        self._pool: _Pool | None = None
        self._graphs: dict[Tier, StepGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def capture_all(self, tiers: Iterable[Tier]) -> None:
        """Capture these tiers; only while no step runs."""
        for tier in tiers:
            self.get(tier)

    def room(self, tier: Tier) -> StagingShape:
        """What the tier's block has room for."""
        windowed = self._step.state.window is not None
        reach = self._masked_reach if tier.masked else self._reach
        return tier_staging(tier, self._step.page_size, reach, windowed)

    def holding(self, tier: Tier, plan: StepPlan) -> StepGraph | None:
        """The tier's graph if its block has room for the plan's changes; none is captured else."""
        graph = self._graphs.get(tier)
        room = self.room(tier) if graph is None else graph.staging
        return self.get(tier) if room.holds(plan) else None

    def get(self, tier: Tier) -> StepGraph:
        """The tier's graph, captured now if it was not before, or for edits that moved since."""
        graph = self._graphs.get(tier)
        stale = tier.edits and graph is not None and graph.layout != self._step.state.edits.layout
        if graph is None or stale:
            graph = self._graphs[tier] = self._capture(tier)
        return graph

    def get_padded(self, tier: Tier) -> StepGraph:
        """The tier's graph with nothing but padding in its block: a replay changes no state."""
        graph = self.get(tier)
        self._pad(graph.block, graph.staging)
        return graph

    def _pad(self, block: torch.Tensor, staging: StagingShape) -> None:
        block.zero_()
        views = split_device(block, staging)
        views.slots.fill_(self._step.state.spare_slot)
        views.update_slots.fill_(self._step.state.spare_slot)
        views.entry_slots.fill_(self._step.state.spare_slot)

    def _capture(self, tier: Tier) -> StepGraph:
        shape, staging = tier_shape(tier), self.room(tier)
        block = torch.empty(sum(field_lengths(staging)), dtype=torch.int32, device=self._device)
        self._pad(block, staging)
        views = split_device(block, staging)
        out = self._step.new_output(tier.all_rows, tier.width)
        layout = self._step.state.edits.layout
        if tier.masked:
            graph, later = self._capture_parts(views, shape, out, tier.nodes)
            return StepGraph(graph, staging, block, out, layout, later)
        graph = self._record(lambda: self._step.run(views, shape, out))
        return StepGraph(graph, staging, block, out, layout)

    def _capture_parts(
        self, views: StagingViews, shape: StepShape, out: torch.Tensor, nodes: int
    ) -> tuple[Recorded, LaterParts]:
        """Segments D, F and A as graphs of their own.

        Each reads what the last run of the one before wrote, so that is replayed before the next
        one's kernels are compiled and recorded.
        """
        step, laid, found = self._step, _Kept[LaidOut](), _Kept[Forwarded]()
        masks = step.new_masks(nodes)
        first = self._record(lambda: laid.keep(step.lay(views, shape, out)))
        first.replay()
        forward = self._record(lambda: found.keep(self._forward(laid.value)))
        forward.replay()
        finish = self._record(lambda: step.finish(laid.value, found.value, masks))
        return first, LaterParts(forward, finish, lambda: laid.value, lambda: found.value, masks)

    def _forward(self, laid: LaidOut) -> Forwarded:
        """F, with the edited logits alone: what is kept is kept once a tier."""
        found = self._step.edit(laid, self._step.forward(laid))
        return found._replace(logits=found.edited)

    def _record(self, launch: Callable[[], object]) -> Recorded:
        # Compiles kernels and warms the libraries up; on a stream of its own it would leave cuBLAS'
        # workspace for that stream behind, once a tier.
        for _ in range(2):
            launch()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Threads of a communication library may ask for their events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            launch()
        self._pool = graph.pool()
        return graph
