"""Driving a model by hand: sequences over random pages, and the batches that extend them."""

import random
from dataclasses import dataclass, field

import torch

from outrider.engine.forward_batch import ForwardBatch


@dataclass
class Sequence:
    """A row's pages and how many tokens have their KV in place."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


@dataclass
class Query:
    """What one row does in a step; ``parents`` (row-local, -1 for the root) makes it a tree."""

    sequence: Sequence
    tokens: list[int]
    parents: list[int] | None = None


class Pages:
    """Hands out the pages 1..num_pages in random order."""

    def __init__(self, num_pages: int, page_size: int, seed: int) -> None:
        self.page_size = page_size
        self._free = list(range(1, num_pages + 1))
        random.Random(seed).shuffle(self._free)

    def cover(self, sequence: Sequence, tokens: int) -> None:
        while len(sequence.pages) * self.page_size < tokens:
            sequence.pages.append(self._free.pop())


def tree_masks(parents: list[int]) -> tuple[list[int], list[int]]:
    """Ancestor bit masks and depths of a tree whose parents precede their children."""
    masks: list[int] = []
    depths: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return masks, depths


def make_batch(queries: list[Query], pages: Pages) -> ForwardBatch:
    """The batch of one step, all logits wanted; reserves pages but leaves the lengths alone."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    bits: list[int] = []
    cu_q = [0]
    for query in queries:
        sequence, count = query.sequence, len(query.tokens)
        pages.cover(sequence, sequence.length + count)
        parents = query.parents or list(range(-1, count - 1))
        masks, depths = tree_masks(parents)
        ids += query.tokens
        positions += [sequence.length + depth for depth in depths]
        bits += (
            [m - (1 << 64) if m >= 1 << 63 else m for m in masks] if count <= 64 else [0] * count
        )
        for index in range(sequence.length, sequence.length + count):
            page, offset = divmod(index, pages.page_size)
            slots.append(sequence.pages[page] * pages.page_size + offset)
        cu_q.append(cu_q[-1] + count)
    width = max(len(query.sequence.pages) for query in queries)
    table = [q.sequence.pages + [0] * (width - len(q.sequence.pages)) for q in queries]
    kv_lens = [q.sequence.length + len(q.tokens) for q in queries]
    return ForwardBatch(
        input_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        kv_slots=torch.tensor(slots),
        cu_q=torch.tensor(cu_q, dtype=torch.int32),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        page_table=torch.tensor(table, dtype=torch.int32),
        tree_bits=torch.tensor(bits),
        is_tree=torch.tensor([q.parents is not None for q in queries], dtype=torch.uint8),
        logits_index=torch.arange(len(ids)),
    )
