"""The sizes of steps that CUDA graphs are captured for.

A step of verify rows alone wants a close fit, as there are many of them. One with prompt chunks is
long, and is launched kernel by kernel where no graph holds it, so the sizes of these are few.
"""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .config import EngineConfig

CHUNK_ROWS = 32  # prefill rows of such a step
CHUNK_TOKENS = 1024  # and their tokens: more keep a device busy while the host launches kernels

_SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_LEAST_ROWS = 8
_TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024)


class ChunkTier(NamedTuple):
    """Room for ``rows`` verify rows beside prefill rows, and ``tokens`` query tokens in all."""

    rows: int
    tokens: int


def graph_rows(config: "EngineConfig") -> int:
    """Most verify rows of a step that replays a graph."""
    rows = config.max_running_requests
    return min(config.cuda_graph_max_bs or rows, rows)


def ladder(top: int) -> tuple[int, ...]:
    """Sizes up to and including ``top``: steps of at most a half, and of a third from 32 on."""
    sizes = [size for size in _SMALL if size < top]
    size = 96
    while size < top:
        sizes.append(size)
        size += max(32, size // 3 // 32 * 32)
    return (*sizes, top)


def verify_tokens(config: "EngineConfig", width: int) -> tuple[int, ...]:
    """Query tokens of graphs of verify rows alone, of up to ``width`` each; none without graphs."""
    return () if config.disable_cuda_graph else ladder(graph_rows(config) * width)


def graph_chunk(config: "EngineConfig") -> int:
    """Most prompt tokens of a step that replays a graph; 0 without graphs."""
    if config.disable_cuda_graph:
        return 0
    chunk = config.chunked_prefill_size
    return CHUNK_TOKENS if chunk == -1 else min(chunk, CHUNK_TOKENS)


def chunk_rows(max_rows: int) -> tuple[int, ...]:
    """Numbers of verify rows: a quarter of ``max_rows`` where that is 8 or more, and all."""
    quarter = -(-max_rows // 4)
    return (quarter, max_rows) if quarter >= _LEAST_ROWS else (max_rows,)


def chunk_tokens(top: int) -> tuple[int, ...]:
    """Numbers of query tokens, rising to ``top``: the one before is less by a fifth or more."""
    sizes = [size for size in _TOKENS if 5 * size <= 4 * top]
    while sizes and 5 * sizes[-1] <= 2 * top:
        sizes.append(2 * sizes[-1])
    return (*sizes, top)


def chunk_tiers(max_rows: int, width: int, chunk: int) -> Iterator[ChunkTier]:
    """All tiers of steps with up to ``chunk`` prompt tokens beside rows of up to ``width``."""
    for fewer, rows in itertools.pairwise((0, *chunk_rows(max_rows))):
        least = fewer + 2 if fewer else 1  # tokens: a chunk's, beside the fewest rows
        for tokens in chunk_tokens(rows * width + chunk):
            if tokens >= least:
                yield ChunkTier(rows, tokens)
