"""Graphs of what cannot be captured: a replay launches a tier's kernels again over its block.

So is everything where there is no GPU, and a model that looks at its batch on the host.
"""

from collections.abc import Callable, Iterable

from outrider.engine.gpu.graphs import Recorded, StepGraphs
from outrider.engine.gpu.tiers import Tier

from .gpu_driver import DEVICE


class _Again:
    """What was to be recorded, kept to be done again."""

    def __init__(self, launch: Callable[[], object]) -> None:
        self._launch = launch

    def replay(self) -> None:
        self._launch()


class EagerGraphs(StepGraphs):
    """Whatever sizes a graph, places rows in its block and reads them back is the engine's own."""

    def capture_all(self, tiers: Iterable[Tier]) -> None:
        """Each when it is first needed."""

    def _record(self, launch: Callable[[], object]) -> Recorded:
        return _Again(launch)


GRAPHS = StepGraphs if DEVICE.type == "cuda" else EagerGraphs
