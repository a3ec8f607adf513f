"""A drafter as another package would write it: copies what followed the last two tokens before."""

import numpy as np
from numpy.typing import NDArray

from outrider.engine_core.config import EngineConfig
from outrider.engine_core.drafter_spec import DrafterSpec
from outrider.engine_core.host_drafter import HostProposal

SPEC = DrafterSpec(
    name="REPEAT",
    implementation="repeat_drafter:make",
    host=True,
    default_num_draft_tokens=6,
)


class RepeatDrafter:
    """One chain a row; without an earlier match it repeats the last token."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._texts: dict[int, list[int]] = {}

    def open(
        self, slot: int, namespace: str, prompt: NDArray[np.int32], learn: bool = True
    ) -> None:
        self._texts[slot] = prompt.tolist()

    def extend(
        self, slots: NDArray[np.int32], cu: NDArray[np.int32], tokens: NDArray[np.int32]
    ) -> None:
        for row, slot in enumerate(slots.tolist()):
            self._texts[slot] += tokens[cu[row] : cu[row + 1]].tolist()

    def close(self, slot: int) -> None:
        del self._texts[slot]

    def propose(self, slots: NDArray[np.int32], caps: NDArray[np.int32]) -> HostProposal:
        rows = len(slots)
        tokens = np.zeros((rows, self._nodes), np.int32)
        for row, slot in enumerate(slots.tolist()):
            tokens[row] = _continuation(self._texts[slot], self._nodes)
        chain = np.broadcast_to(np.arange(self._nodes, dtype=np.int32), tokens.shape)
        return HostProposal(
            np.minimum(caps, self._nodes).astype(np.int32),
            tokens,
            np.ascontiguousarray(chain),
            np.full(rows, 2, np.int32),
            np.full(tokens.shape, 0.5, np.float32),
        )

    def flush(self) -> None:
        """Nothing is learned beyond the open slots."""

    @property
    def node_count(self) -> int:
        return 0


def _continuation(text: list[int], length: int) -> list[int]:
    for at in range(len(text) - 3, -1, -1):
        if text[at : at + 2] == text[-2:]:
            found = text[at + 2 : at + 2 + length]
            return found + [text[-1]] * (length - len(found))
    return [text[-1]] * length


def make(config: EngineConfig, spec: DrafterSpec) -> RepeatDrafter:
    return RepeatDrafter(config.num_draft_tokens(spec) - 1)
