"""Plain-Python models of the n-gram trie, the suffix automaton and their draft trees."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Path = tuple[int, ...]
Tree = dict[Path, float]  # path -> weight; siblings in the order they were added


@dataclass(frozen=True)
class Following:
    """One continuation: its token, the string it makes, how often it was seen."""

    token: int
    string: Path
    freq: int


@dataclass(frozen=True)
class Rule:
    """How trees grow: `prob` or breadth-first, least and greatest fan-out, window length."""

    prob: bool
    low: int
    high: int
    depth: int


class Source(Protocol):
    def ranked(self, string: Path, by_freq: bool) -> list[Following]: ...

    def freq_of(self, string: Path) -> int: ...


def i32(values: Sequence[int]) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def grow(tree: Tree, source: Source, anchor: Path, matched: int, cap: int, rule: Rule) -> None:
    if rule.prob:
        _grow_prob(tree, source, anchor, cap, rule)
    else:
        _grow_bfs(tree, source, anchor, matched, cap, rule)


def _add(tree: Tree, parent: Path, child: Following, source: Source, cap: int) -> Path | None:
    path = (*parent, child.token)
    if path not in tree:
        if len(tree) > cap:
            return None
        tree[path] = tree[parent] * min(1, child.freq / source.freq_of(child.string[:-1]))
    return path


def _grow_bfs(tree: Tree, source: Source, anchor: Path, matched: int, cap: int, rule: Rule) -> None:
    span = max(1, rule.depth - 1)
    scale = (rule.high - rule.low) / span
    queue: list[tuple[Path, Path, float]] = [((), anchor, (span - matched) * scale + rule.low)]
    while queue and len(tree) <= cap:
        parent, string, breadth = queue.pop(0)
        siblings = source.ranked(string, False)
        for child in siblings[: max(1, int(breadth))]:
            path = _add(tree, parent, child, source, cap)
            if path is None:
                return
            queue.append((path, child.string, breadth - scale))


def _grow_prob(tree: Tree, source: Source, anchor: Path, cap: int, rule: Rule) -> None:
    heap: list[tuple[float, int, Path, Following]] = []
    sequence, p = 0, 1.0
    parent: Path = ()
    string = anchor
    while True:
        siblings = source.ranked(string, True)
        best = siblings[: rule.high]
        total = float(sum(child.freq for child in best))
        for child in best:
            heapq.heappush(heap, (-(child.freq / total * p), sequence, parent, child))
            sequence += 1
        if not heap or len(tree) > cap:
            return
        negative, _, above, child = heapq.heappop(heap)
        added = _add(tree, above, child, source, cap)
        assert added is not None
        parent, string, p = added, child.string, -negative


def breadth_first(tree: Tree) -> list[Path]:
    level: list[Path] = [()]
    found: list[Path] = []
    while level:
        level = [p for parent in level for p in tree if p and p[:-1] == parent]
        found.extend(level)
    return found


class TrieModel:
    """Paths in a dict. `recent` is the last touch of a node or of anything below it."""

    def __init__(self, capacity: int, depth: int) -> None:
        self.capacity, self.depth, self.clock, self.evicted = capacity, depth, 0, 0
        self.text: dict[int, tuple[int, list[int]]] = {}
        self.clear()

    def clear(self) -> None:
        self.freq: dict[tuple[int, Path], int] = {}
        self.recent: dict[tuple[int, Path], int] = {}
        self.below: dict[tuple[int, Path], dict[Path, None]] = {}  # oldest touch first

    def children(self, space: int, path: Path) -> list[Path]:
        return list(reversed(self.below.get((space, path), {})))

    def evict(self, spare: tuple[int, Path]) -> None:
        leaves = [key for key in self.freq if not self.below.get(key) and key != spare]
        victim = min(leaves, key=self.recent.__getitem__)
        del self.freq[victim], self.recent[victim]
        del self.below[victim[0], victim[1][:-1]][victim[1]]
        self.evicted += 1

    def push(self, stream: int, token: int) -> None:
        space, text = self.text[stream]
        for depth in range(min(len(text), self.depth - 1), -1, -1):
            parent = tuple(text[len(text) - depth :])
            if parent and (space, parent) not in self.freq:
                continue
            path = (*parent, token)
            if (space, path) not in self.freq:
                if len(self.freq) == self.capacity:
                    self.evict((space, parent))
                self.freq[space, path] = 0
            self.clock += 1
            self.freq[space, path] += 1
            siblings = self.below.setdefault((space, parent), {})
            siblings.pop(path, None)
            siblings[path] = None
            for end in range(1, len(path) + 1):
                self.recent[space, path[:end]] = self.clock
        text.append(token)

    def push_rows(self, rows: dict[int, list[int]]) -> None:
        """Every row's first token, then every row's second, ..."""
        for column in range(max((len(row) for row in rows.values()), default=0)):
            for stream, row in rows.items():
                if column < len(row):
                    self.push(stream, row[column])

    def propose(self, stream: int, cap: int, rule: Rule) -> tuple[int, Tree, int]:
        """Longest match, tree and number of usable anchors."""
        space, text = self.text[stream]
        suffixes = [
            tuple(text[len(text) - depth :])
            for depth in range(min(len(text), self.depth - 1), 0, -1)
        ]
        usable = [suffix for suffix in suffixes if self.below.get((space, suffix))]
        tree: Tree = {(): 1.0}
        for anchor in usable:
            grow(tree, SpaceModel(self, space), anchor, len(anchor), cap, rule)
        return len(usable[0]) if usable else 0, tree, len(usable)


@dataclass(frozen=True)
class SpaceModel:
    """One namespace of a trie as a source of continuations."""

    trie: TrieModel
    space: int

    def ranked(self, string: Path, by_freq: bool) -> list[Following]:
        found = [
            Following(p[-1], p, self.freq_of(p)) for p in self.trie.children(self.space, string)
        ]
        return sorted(found, key=lambda c: (-c.freq, c.token)) if by_freq else found

    def freq_of(self, string: Path) -> int:
        return self.trie.freq[self.space, string]


class CorpusModel:
    """A text with -1 between documents; strings are searched in it one by one."""

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        self.text: list[int] = []
        for document in documents:
            self.text += ([-1] if self.text else []) + list(document)

    def ends(self, string: Path) -> list[int]:
        n = len(string)
        return [
            end for end in range(n, len(self.text) + 1) if tuple(self.text[end - n : end]) == string
        ]

    def ranked(self, string: Path, by_freq: bool) -> list[Following]:
        seen: dict[int, tuple[int, int]] = {}
        for end in self.ends(string):
            if end < len(self.text) and self.text[end] >= 0:
                count, _ = seen.get(self.text[end], (0, 0))
                seen[self.text[end]] = (count + 1, end)
        order = sorted(seen, key=lambda t: (-seen[t][0 if by_freq else 1], t))
        return [Following(t, (*string, t), seen[t][0]) for t in order]

    def freq_of(self, string: Path) -> int:
        return len(self.ends(string))

    def propose(self, context: Sequence[int], cap: int, rule: Rule) -> tuple[int, Tree, int]:
        """Longest match, tree and number of usable anchors: one for each set of end positions."""
        window = tuple(context[-rule.depth :])
        anchors: list[Path] = []
        known: list[list[int]] = []
        for start in range(len(window)):
            ends = self.ends(window[start:])
            if ends and ends not in known:
                known.append(ends)
                anchors.append(window[start:])
        usable = [anchor for anchor in anchors if self.ranked(anchor, False)]
        tree: Tree = {(): 1.0}
        for anchor in usable:
            grow(tree, self, anchor, len(anchor), cap, rule)
        return len(usable[0]) if usable else 0, tree, len(usable)


class Rows:
    """Output arrays of propose(), read back as paths."""

    def __init__(self, rows: int, columns: int) -> None:
        self.counts = np.full(rows, -1, np.int32)
        self.tokens = np.full((rows, columns), -7, np.int32)
        self.parents = np.full((rows, columns), -7, np.int32)
        self.match = np.full(rows, -1, np.int32)
        self.weights = np.full((rows, columns), -7, np.float32)

    def paths(self, row: int) -> list[Path]:
        found: list[Path] = [()]
        for i in range(int(self.counts[row])):
            found.append((*found[self.parents[row, i]], int(self.tokens[row, i])))
        return found[1:]
