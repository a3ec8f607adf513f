"""What another package implements to edit logits: a custom logits processor and what it is given.

docs/logits-processors.md has an example. A processor is made once an engine, with a
``ProcessorContext`` (``engine_core/processor_loader.py``).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from ..engine_core.ids import I32, I64


class RowText(NamedTuple):
    """A request in a step: what ``LogitsProcessor.request`` made of its arguments, and its text.

    ``text`` int32[L]: its prompt and what it has said so far, ``prompt_length`` of it the prompt.
    """

    request: object
    text: I32
    prompt_length: int


class ProcessorNodes:
    """N places whose next token is to be decided: ends of requests' texts, with drafts behind them
    or without. Row i of the logits decides what follows ``history(i)``.
    """

    def __init__(self, rows: Sequence[RowText], paths: Sequence[tuple[int, ...]]) -> None:
        """``paths``: the drafts between each node's text and the node."""
        self._rows = rows
        self._paths = paths

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def requests(self) -> list[object]:
        """[N]: what ``request`` made of each node's request's arguments."""
        return [row.request for row in self._rows]

    @property
    def prompt_lengths(self) -> I64:
        """int64[N]: how much of each history is the prompt."""
        return np.array([row.prompt_length for row in self._rows], dtype=np.int64)

    @property
    def lengths(self) -> I64:
        """int64[N]: tokens of each history."""
        pairs = zip(self._rows, self._paths, strict=True)
        return np.array([len(row.text) + len(path) for row, path in pairs], dtype=np.int64)

    def history(self, node: int) -> I32:
        """int32[L]: prompt, output and drafts before the token that the node decides."""
        text, path = self._rows[node].text, self._paths[node]
        return text if not path else np.concatenate((text, np.array(path, dtype=np.int32)))

    def last(self, count: int) -> I64:
        """int64[N, count]: the end of each history, the newest last; -1 where it is shorter."""
        found = np.full((len(self), count), -1, dtype=np.int64)
        for node, (row, path) in enumerate(zip(self._rows, self._paths, strict=True)):
            kept = max(0, count - len(path))
            tail = [*row.text[max(0, len(row.text) - kept) :].tolist(), *path][-count:]
            if tail:
                found[node, -len(tail) :] = tail
        return found

    def part(self, begin: int, end: int) -> "ProcessorNodes":
        """The nodes from ``begin`` up to ``end``."""
        return ProcessorNodes(self._rows[begin:end], self._paths[begin:end])


@runtime_checkable
class LogitsProcessor(Protocol):
    """Edits logits by a request's arguments and the tokens before a position, and by nothing else.

    It keeps nothing of a text: drafts that it sees may be rejected, and a text may be seen again.
    """

    def request(self, arguments: Mapping[str, object]) -> object:
        """What ``apply`` needs of a request's arguments. Raises ValueError for those it does not
        take, which refuses the request. Asked in the engine's loop, more than once, and from more
        than one thread.
        """
        ...

    def apply(self, logits: torch.Tensor, nodes: ProcessorNodes) -> None:
        """Edit the logits float32[N, V] of N nodes in place, on the device that they are on."""
        ...
