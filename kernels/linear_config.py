"""Tile shapes of the weight-streaming matmul, and which of them are worth measuring."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

MAX_ROWS = 128
MOST_SPLIT_OUTPUTS = 1 << 16  # parts of K times outputs: bounds what partial sums take
SHARED_BYTES = 227 * 1024  # of an SM of compute capability 9.0
_MAX_STAGES = 8
_RESERVED_BYTES = 1024  # per block, taken by the system


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """How a matmul is cut up.

    A program computes ``block_n`` outputs of every row from its 1 / ``split_k`` part of K,
    ``block_k`` at a time, with ``stages`` loads in flight. ``tma`` loads through tensor
    descriptors.
    """

    block_n: int
    block_k: int
    split_k: int = 1
    warps: int = 4
    stages: int = 4
    tma: bool = False

    def __post_init__(self) -> None:
        for name, low in (("block_n", 16), ("block_k", 16), ("warps", 1)):
            value = getattr(self, name)
            if value < low or value & (value - 1):
                raise ValueError(f"{name} is {value}, not a power of two of at least {low}")
        if self.split_k < 1 or self.stages < 1:
            raise ValueError(f"{self} needs split_k and stages >= 1")

    def scratch(self, block_m: int, n: int, k: int) -> tuple[int, int]:
        """(float32 sums, tiles) that parts of a tile leave for each other; (0, 0) unsplit."""
        depth = -(-k // self.block_k)
        steps = max(1, -(-depth // self.split_k))
        parts = -(-depth // steps)
        blocks = -(-n // self.block_n)
        return (parts * blocks * self.block_n * block_m, blocks) if parts > 1 else (0, 0)

    def shared_bytes(self, block_m: int, itemsize: int) -> int:
        """Shared memory that the loads in flight take."""
        return self.stages * (self.block_n + block_m) * self.block_k * itemsize


def row_tier(rows: int) -> int:
    """The number of rows that a tile holds for ``rows``: 16, 32, 64 or 128.

    Raises ValueError above MAX_ROWS.
    """
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows are more than the {MAX_ROWS} of the largest tile")
    return max(16, 1 << (rows - 1).bit_length()) if rows > 0 else 16


def tiles(block_m: int, itemsize: int = 2) -> Iterator[SkinnyConfig]:
    """Tile shapes that fill an SM's shared memory with one to four blocks, without split_k."""
    for block_n in (32, 64, 128, 256) if block_m <= 16 else (64, 128, 256):
        if block_n < block_m:
            continue
        for block_k in (64, 128, 256):
            stage = (block_n + block_m) * block_k * itemsize
            # More residents with fewer stages move the same bytes; keep those that differ.
            found = set()
            for residents in (1, 2, 3, 4):
                stages = min(_MAX_STAGES, (SHARED_BYTES // residents - _RESERVED_BYTES) // stage)
                if stages >= 3 and stages not in found:
                    found.add(stages)
                    warps = 8 if block_n * block_m >= 256 * 32 or block_n == 256 else 4
                    yield SkinnyConfig(block_n, block_k, 1, warps, stages)


def splits(
    config: SkinnyConfig, n: int, k: int, block_m: int, itemsize: int = 2, sms: int = 132
) -> list[int]:
    """The values of split_k whose grids fill ``sms`` multiprocessors best, at most three.

    Every part keeps at least four blocks of K, and parts that do not divide K are left out unless
    nothing else remains.
    """
    blocks, depth = -(-n // config.block_n), -(-k // config.block_k)
    shared = config.shared_bytes(block_m, itemsize) + _RESERVED_BYTES
    slots = sms * max(1, min(SHARED_BYTES // shared, 2048 // (32 * config.warps)))
    if blocks >= 4 * slots:
        return [1]
    most = max(1, min(16, MOST_SPLIT_OUTPUTS // n))
    fits = [s for s in range(1, most + 1) if depth % s == 0 and depth // s >= 4] or [1]

    def idle(split: int) -> float:
        """The share of slots that the last wave leaves empty, plus what each split costs."""
        waves = blocks * split / slots
        return -(-blocks * split // slots) / waves - 1 + 0.02 * (split - 1)

    return sorted(fits, key=idle)[:3]


def candidates(
    n: int, k: int, block_m: int, itemsize: int = 2, sms: int = 132
) -> list[SkinnyConfig]:
    """Configurations worth measuring for x [<= block_m, k] and weight [n, k]."""
    found = []
    for tile in tiles(block_m, itemsize):
        for split in splits(tile, n, k, block_m, itemsize, sms):
            found.append(replace(tile, split_k=split, tma=True))
            # Without descriptors an uneven edge costs a mask on every load.
            if n % tile.block_n == 0:
                found.append(replace(tile, split_k=split))
    return found


# Tile shapes (block_n, block_k, stages, tma) of each row tier that a start measures: those within
# 1 % of the fastest for some matrix of an 8B model on an H200.
_SHORTLIST = {
    16: ((64, 128, 3, False), (64, 128, 3, True), (64, 128, 8, False), (64, 256, 5, True)),
    32: ((64, 128, 3, True), (64, 128, 8, False), (64, 256, 4, True), (128, 128, 5, True)),
    64: ((64, 64, 4, True), (64, 128, 7, True), (64, 256, 3, True), (128, 128, 4, True)),
    128: ((128, 64, 7, True), (128, 128, 3, True)),
}


def shortlist(
    n: int, k: int, block_m: int, itemsize: int = 2, sms: int = 132
) -> list[SkinnyConfig]:
    """The few configurations that are measured when a model starts on a new machine."""
    found = []
    for block_n, block_k, stages, tma in _SHORTLIST[block_m]:
        warps = 8 if block_n * block_m >= 256 * 32 or block_n == 256 else 4
        tile = SkinnyConfig(block_n, block_k, 1, warps, stages, tma)
        small = tile.shared_bytes(block_m, itemsize) + _RESERVED_BYTES <= SHARED_BYTES
        if small and k % block_k == 0:
            # In the sweep the first was always the fastest where cuBLAS was not.
            found.append(replace(tile, split_k=splits(tile, n, k, block_m, itemsize, sms)[0]))
    return found
