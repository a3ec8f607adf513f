"""How the Hopper matmul is cut up, and which cuts are worth measuring."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .linear_config import SHARED_BYTES

WEIGHT_ROWS = 64  # of one tensor-core tile
_SPARE_BYTES = 1024  # barriers, alignment
_MOST_STAGES = 12
_MOST_PARTS = 4


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """A tile has ``tiles`` x 64 weight rows; ``block_k`` columns of it are loaded at a time.

    ``stages`` loads are in flight. A tile's K is cut in ``split`` parts, one program each; with
    ``programs`` instead, all loads of all tiles are dealt out evenly to so many programs.
    """

    tiles: int
    block_k: int
    stages: int
    warps: int = 4
    split: int = 1
    programs: int = 0

    def __post_init__(self) -> None:
        if self.block_k < 64 or self.block_k & (self.block_k - 1):
            raise ValueError(f"block_k is {self.block_k}, not a power of two of at least 64")
        if not 1 <= self.tiles <= 4 or self.stages < 2 or self.split < 1 or self.programs < 0:
            raise ValueError(f"{self} needs 1 to 4 tiles, stages >= 2, split >= 1, programs >= 0")
        if self.warps not in (4, 8):
            raise ValueError(f"warps is {self.warps}, not 4 or 8")

    def dealt(self, n: int, k: int) -> tuple[int, int, int]:
        """(loads of a tile, loads of a program, programs) for a weight [n, k]."""
        depth = max(1, -(-k // self.block_k))
        units = -(-n // (WEIGHT_ROWS * self.tiles)) * depth
        per = -(-units // self.programs) if self.programs else -(-depth // self.split)
        return depth, per, -(-units // per)

    def scratch(self, block_m: int, n: int, k: int) -> tuple[int, int]:
        """(float32 sums, tiles) that parts of a tile leave for each other; (0, 0) unsplit."""
        depth, per, programs = self.dealt(n, k)
        if per % depth == 0:
            return 0, 0
        sums = 2 * programs * self.tiles * WEIGHT_ROWS * block_m
        return sums, -(-n // (WEIGHT_ROWS * self.tiles))


def shared_bytes(config: StreamConfig, block_m: int, gated: bool) -> int:
    """Shared memory of a program: the loads in flight, and a result turned to be stored.

    ``gated``: the epilogue halves the result (silu * mul).
    """
    stage = (WEIGHT_ROWS * config.tiles + block_m) * config.block_k * 2
    turned = WEIGHT_ROWS * block_m * 4 // (2 if gated else 1)
    return config.stages * stage + turned + _SPARE_BYTES


def with_stages(
    cut: StreamConfig, block_m: int, gated: bool, residents: int = 1
) -> StreamConfig | None:
    """The cut with as many loads in flight as fit where ``residents`` programs share a
    multiprocessor; None if three do not.
    """
    fits = (replace(cut, stages=count) for count in range(_MOST_STAGES, 2, -1))
    room = SHARED_BYTES // residents
    return next((c for c in fits if shared_bytes(c, block_m, gated) <= room), None)


def _cuts(n: int, k: int, block_m: int, sms: int) -> Iterator[tuple[StreamConfig, int]]:
    """Cuts without their number of stages, and how many programs share a multiprocessor."""
    blocks = -(-n // WEIGHT_ROWS)
    deep = 256 if block_m <= 32 else 128 if block_m <= 64 else 64
    if blocks <= sms:
        # Half of the multiprocessors pull as much as memory gives, and a part costs a merge.
        for split in sorted({1, min(sms // blocks, max(1, k // deep // 2), _MOST_PARTS)}):
            yield StreamConfig(1, deep, 2, split=split), 1
        return
    for tiles, block_k in itertools.product((2, 3, 4), (64, 128)):
        # One program a multiprocessor, nearly all of them busy to the end.
        warps = 4 if tiles * block_m <= 256 else 8
        if 0.9 * sms <= -(-blocks // tiles) <= sms and tiles * block_m <= 64 * warps:
            yield StreamConfig(tiles, block_k, 2, warps), 1
    if 2 * sms < blocks <= 3 * sms:
        yield StreamConfig(1, 128 if block_m <= 32 else 64, 2), 3
    yield StreamConfig(1, deep, 2, programs=sms), 1
    yield StreamConfig(2, 64, 2, programs=sms), 1


def stream_shortlist(
    n: int, k: int, block_m: int, *, gated: bool = False, sms: int = 132
) -> list[StreamConfig]:
    """The few configurations that are measured when a model starts on a new machine.

    Those that were fastest for some matrix of an 8B model on an H200, fitted to weight [n, k] and
    ``sms`` multiprocessors. None for rows that tensor copies cannot load (K not a multiple of 8).
    """
    found = []
    for cut, residents in _cuts(n, k, block_m, sms) if k % 8 == 0 else ():
        config = with_stages(cut, block_m, gated, residents)
        if config is not None:
            found.append(config)
    return list(dict.fromkeys(found))
