"""A model of torch's CUDA caching allocator: blocks above 1 MiB, with its default settings.

A block comes from the smallest free one that holds it, which is cut if more than 1 MiB is left;
else from a new segment of 20 MiB, or of its own size in steps of 2 MiB from 10 MiB on. Freed
neighbours join, within a segment. Nothing goes back to the device but, when a new segment cannot
be had, all segments that no block lies in.
"""

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(eq=False)
class Block:
    """A part of a segment."""

    segment: "list[Block]"
    size: int
    free: bool = True


class CachingAllocator:
    """Segments of one pool. ``held``: bytes of all of them.

    ``needed``: the most that could not have gone back when a block was taken: that block's segment
    and the others that a block lay in.
    """

    def __init__(self) -> None:
        self.held = 0
        self.needed = 0
        self._segments: list[list[Block]] = []

    def take(self, size: int) -> Block | None:
        """A block; None for a small one, which is not counted."""
        size = -(-size // 512) * 512
        if size <= MIB:
            return None
        free = [b for s in self._segments for b in s if b.free and b.size >= size]
        block = min(free, key=lambda b: b.size) if free else self._grow(size)
        if block.size - size > MIB:
            rest = Block(block.segment, block.size - size)
            block.segment.insert(block.segment.index(block) + 1, rest)
            block.size = size
        block.free = False
        used = sum(sum(b.size for b in s) for s in self._segments if not all(b.free for b in s))
        self.needed = max(self.needed, used)
        return block

    def give(self, *blocks: Block | None) -> None:
        """Free blocks."""
        for block in blocks:
            if block is None:
                continue
            block.free = True
            segment = block.segment
            at = segment.index(block)
            for near in (at + 1, at - 1):
                if 0 <= near < len(segment) and segment[near].free:
                    block.size += segment[near].size
                    del segment[near]

    def _grow(self, size: int) -> Block:
        size = 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        segment: list[Block] = []
        segment.append(Block(segment, size))
        self._segments.append(segment)
        self.held += size
        return segment[0]
