"""Plain-Python models of the compiled classes: obvious rather than fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


class PageAllocatorModel:
    """A Python list as the stack, a set beside it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.reset()

    def reset(self) -> None:
        self.stack = list(range(self.num_pages, 0, -1))
        self.free_set = set(self.stack)

    @property
    def free_pages(self) -> int:
        return len(self.stack)

    def is_free(self, page: int) -> bool:
        return page in self.free_set

    def alloc(self, n: int) -> list[int] | None:
        if n > len(self.stack):
            return None
        pages = [self.stack.pop() for _ in range(n)]
        self.free_set.difference_update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        for i, page in enumerate(pages):
            if not 1 <= page <= self.num_pages or page in self.free_set or page in pages[:i]:
                raise ValueError(f"page {page}")
        self.stack.extend(reversed(pages))
        self.free_set.update(pages)


@dataclass(eq=False)
class PageNode:
    """One page of the model's tree, which has a node for every page (no compression)."""

    parent: PageNode | None
    page: int = 0
    depth: int = 0
    children: dict[tuple[int, ...], PageNode] = field(default_factory=dict)
    locks: int = 0
    own_locks: int = 0
    stamp: tuple[int, int] = (0, 0)
    ends_node: bool = False
    alive: bool = True

    def path(self) -> list[PageNode]:
        """From the first page to this one."""
        nodes: list[PageNode] = []
        at = self
        while at.parent is not None:
            nodes.append(at)
            at = at.parent
        return nodes[::-1]


class RadixTrieModel:
    """A tree of single pages with time stamps; the least stamp of all goes first."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.clock = 0
        self.roots: dict[str, PageNode] = {}

    def _keys(self, tokens: Sequence[int], limit: int) -> list[tuple[int, ...]]:
        size = self.page_size
        return [tuple(tokens[i : i + size]) for i in range(0, limit // size * size, size)]

    def _walk(self, tokens: Sequence[int], namespace: str, limit: int) -> PageNode:
        node = self.roots.get(namespace) or PageNode(None)
        for key in self._keys(tokens, limit):
            if key not in node.children:
                break
            node = node.children[key]
        return node

    def _touch(self, path: list[PageNode]) -> None:
        self.clock += 1
        for node in path:
            node.stamp = (self.clock, -node.depth)
        if path:
            path[-1].ends_node = True

    def match(self, tokens: Sequence[int], namespace: str, limit: int | None = None) -> PageNode:
        most = len(tokens) if limit is None else min(limit, len(tokens))
        node = self._walk(tokens, namespace, most)
        self._touch(node.path())
        return node

    def insert(
        self, tokens: Sequence[int], pages: Sequence[int], namespace: str
    ) -> tuple[int, PageNode]:
        keys = self._keys(tokens, len(tokens))
        if keys:
            self.roots.setdefault(namespace, PageNode(None))
        node = self._walk(tokens, namespace, len(tokens))
        existing = node.depth
        node.ends_node = True
        for i in range(existing, len(keys)):
            node.children[keys[i]] = PageNode(node, int(pages[i]), i + 1)
            node = node.children[keys[i]]
        self._touch(node.path())
        return existing, node

    def lock(self, node: PageNode) -> None:
        node.own_locks += 1
        for at in node.path():
            at.locks += 1

    def unlock(self, node: PageNode) -> None:
        if node.own_locks == 0:
            raise ValueError("not locked")
        node.own_locks -= 1
        self.clock += 1
        for at in node.path():
            at.locks -= 1
            if at.locks == 0:
                at.stamp = (self.clock, -at.depth)

    def nodes(self) -> list[PageNode]:
        found: list[PageNode] = []
        todo = list(self.roots.values())
        while todo:
            below = list(todo.pop().children.values())
            found += below
            todo += below
        return found

    def evict(self, num_pages: int) -> list[int]:
        unlocked = sorted((n for n in self.nodes() if not n.locks), key=lambda n: n.stamp)
        for node in unlocked[:num_pages]:
            assert node.parent is not None
            assert not node.children
            node.parent.children = {k: v for k, v in node.parent.children.items() if v is not node}
            node.parent.ends_node = True
            node.alive = False
        self.roots = {name: root for name, root in self.roots.items() if root.children}
        return [node.page for node in unlocked[:num_pages]]


@dataclass
class Assembled:
    """What `assemble` fills, as Python lists."""

    positions: list[int] = field(default_factory=list)
    kv_slots: list[int] = field(default_factory=list)
    row_of_token: list[int] = field(default_factory=list)
    cu_q: list[int] = field(default_factory=lambda: [0])
    kv_lens: list[int] = field(default_factory=list)
    tree_bits: list[int] = field(default_factory=list)
    is_tree: list[int] = field(default_factory=list)


def kv_slot_model(pages: Sequence[int], page_size: int, index: int) -> int:
    if pages[index // page_size] < 1:
        raise ValueError(f"no page for sequence index {index}")
    return int(pages[index // page_size]) * page_size + index % page_size


def assemble_model(
    slots: Sequence[int],
    q_lens: Sequence[int],
    starts: Sequence[int],
    parents: Sequence[int] | None,
    page_table: Sequence[Sequence[int]],
    page_size: int,
) -> Assembled:
    out = Assembled()
    for row, (slot, length, start) in enumerate(zip(slots, q_lens, starts, strict=True)):
        base = out.cu_q[-1]
        chain = list(range(-1, length - 1))
        mine = chain if parents is None else list(parents[base : base + length])
        if any(p >= i or p < min(i - 1, 0) for i, p in enumerate(mine)):
            raise ValueError(f"row {row}: parent")
        if mine != chain and length > 64:
            raise ValueError(f"row {row}: wide tree")
        depths: list[int] = []
        seen: list[set[int]] = []
        for i, parent in enumerate(mine):
            depths.append(depths[parent] + 1 if i else 0)
            seen.append((seen[parent] if i else set()) | {i})
            out.positions.append(start + depths[i])
            out.kv_slots.append(kv_slot_model(page_table[slot], page_size, start + i))
            out.tree_bits.append(sum(1 << j for j in seen[i] if j < 64))
            out.row_of_token.append(row)
        out.is_tree.append(int(mine != chain))
        out.kv_lens.append(start + length)
        out.cu_q.append(base + length)
    return out


def compact_model(
    slots: Sequence[int],
    starts: Sequence[int],
    page_table: Sequence[Sequence[int]],
    page_size: int,
    accepted: Sequence[Sequence[int]],
) -> list[tuple[int, int]]:
    """(src, dst) KV slots of the moves."""
    return [
        (
            kv_slot_model(page_table[slot], page_size, start + node),
            kv_slot_model(page_table[slot], page_size, start + j),
        )
        for slot, start, nodes in zip(slots, starts, accepted, strict=True)
        for j, node in enumerate(nodes)
        if j != node
    ]
