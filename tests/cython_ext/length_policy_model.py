"""LengthPolicy in plain Python: the same estimates from the same history."""

PRIOR = (0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.85, 0.9)
SURE = 0.995

Node = tuple[int, int, tuple[int, int, int, bool], float]  # token, parent, cell, survival


def bucket(value: float, edges: tuple[float, ...]) -> int:
    return sum(value >= edge for edge in edges)


class PolicyModel:
    def __init__(self) -> None:
        self.cells: dict[tuple[int, int, int, bool], list[float]] = {}
        self.trees: dict[int, list[Node]] = {}
        self.fresh: set[int] = set()
        self.levels: dict[int, list[float]] = {}
        self.halved = 0

    def start(self, slot: int) -> None:
        for known in (self.trees, self.levels):
            known.pop(slot, None)
        self.fresh.discard(slot)

    def estimate(self, cell: tuple[int, int, int, bool]) -> float:
        match, share, rank, deep = cell
        prior = PRIOR[match] * (0.15, 0.45, 0.8, 1.0)[share] * (0.7 if rank else 1.0)
        for key in [(match, share, rank, False)] + [cell] * deep:
            hits, tries = self.cells.get(key, (0.0, 0.0))
            prior = (hits + 6.0 * prior) / (tries + 6.0)
        return prior

    def offer(self, slot: int, match: int, tree: list[tuple[int, int, float]]) -> None:
        hits, promised = self.levels.get(slot, (0.0, 0.0))
        factor = (hits + 5.0) / (promised + 5.0)
        nodes: list[Node] = []
        depth = [0]
        for i, (token, parent, weight) in enumerate(tree):
            siblings = [node for node in nodes if node[1] == parent]
            base = tree[parent - 1][2] if parent else 1.0
            share = bucket(weight / base if base > 0.0 else 0.0, (0.25, 0.6, 0.95))
            context = bucket(match + depth[parent], (2, 3, 4, 5, 7, 10, 15))
            cell = (context, share, min(len(siblings), 2), parent > 0)
            above = nodes[parent - 1][3] if parent else 1.0
            taken = sum(node[3] for node in siblings) / above if above else 0.0
            p = min(self.estimate(cell) * factor, SURE - taken)
            nodes.append((token, parent, cell, p * above))
            depth.append(depth[parent] + 1)
            assert len(nodes) == i + 1
        self.trees[slot] = nodes
        self.fresh.add(slot)

    def learn(self, slot: int, run: list[int]) -> None:
        if slot not in self.fresh or not run:
            return
        self.fresh.discard(slot)
        nodes, at = self.trees[slot], 0
        for token in run:
            children = [i for i, node in enumerate(nodes) if node[1] == at]
            if not children:
                return
            promised, reached = 0.0, 0
            for i in children:
                promised += self.estimate(nodes[i][2])
                cell = self.cells.setdefault(nodes[i][2], [0.0, 0.0])
                cell[1] += 1.0
                if nodes[i][0] == token:
                    cell[0] += 1.0
                    reached = i + 1
                if cell[1] > 800.0:
                    cell[:] = [cell[0] / 2, cell[1] / 2]
                    self.halved += 1
            hits, total = self.levels.get(slot, (0.0, 0.0))
            self.levels[slot] = [
                hits * 0.96 + bool(reached),
                total * 0.96 + min(promised, SURE),
            ]
            if not reached:
                return
            at = reached
