"""The custom logits processor of the served matrix's servers."""

from collections.abc import Mapping

import torch

from outrider.engine.logits_processor import ProcessorNodes
from outrider.engine_core.processor_loader import ProcessorContext


class Unlike:
    """The token that stands ``back`` before a position is unlikely there."""

    def __init__(self, context: ProcessorContext) -> None:
        self._most = context.context_length

    def request(self, arguments: Mapping[str, object]) -> int:
        back = arguments.get("back")
        if len(arguments) != 1 or not isinstance(back, int) or not 1 <= back <= self._most:
            raise ValueError(f"takes back, 1 to {self._most}")
        return back

    def apply(self, logits: torch.Tensor, nodes: ProcessorNodes) -> None:
        for node, back in enumerate(nodes.requests):
            history = nodes.history(node)
            if isinstance(back, int) and back <= len(history):
                logits[node, int(history[-back])] -= 20.0
