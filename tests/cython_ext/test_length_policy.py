"""LengthPolicy against its plain model, and its choice against all others."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from outrider.cython_ext.length_policy import LengthPolicy, row_caps

from .length_policy_model import PolicyModel

I32 = np.int32
SLOTS, WIDTH = 6, 7
Tree = list[tuple[int, int, float]]
CHAIN: Tree = [(1, 0, 1.0), (2, 1, 1.0)]


def random_tree(random: Random) -> Tree:
    tree: Tree = []
    parent = 0
    for i in range(random.randrange(WIDTH + 1)):
        parent = random.randint(parent, min(i, parent + 2))
        base = tree[parent - 1][2] if parent else 1.0
        siblings = sum(node[1] == parent for node in tree)
        tree.append((10 * parent + siblings, parent, base * random.choice((0.1, 0.5, 0.75, 1.0))))
    return tree


def arrays(trees: list[Tree]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    counts = np.array([len(tree) for tree in trees], I32)
    tokens = np.zeros((len(trees), WIDTH), I32)
    parents = np.zeros((len(trees), WIDTH), I32)
    weights = np.zeros((len(trees), WIDTH), np.float32)
    for r, tree in enumerate(trees):
        for i, (token, parent, weight) in enumerate(tree):
            tokens[r, i], parents[r, i], weights[r, i] = token, parent, weight
    return counts, tokens, parents, weights


def offer(policy: LengthPolicy, slots: list[int], matches: list[int], trees: list[Tree]) -> None:
    counts, tokens, parents, weights = arrays(trees)
    rows, match_lens = np.array(slots, I32), np.array(matches, I32)
    policy.offer(rows, counts, match_lens, tokens, parents, weights)


def learn(policy: LengthPolicy, slots: list[int], runs: list[list[int]]) -> None:
    joined = [token for run in runs for token in run]
    lens = np.array([len(run) for run in runs], I32)
    policy.learn(np.array(slots, I32), lens, np.array(joined, I32))


def run_through(random: Random, tree: Tree) -> list[int]:
    """A run that follows the tree for a while."""
    run: list[int] = []
    at = 0
    while random.random() < 0.75:
        children = [i for i, node in enumerate(tree) if node[1] == at]
        if not children:
            break
        at = random.choice(children) + 1
        run.append(tree[at - 1][0])
    return [*run, 999]


def test_estimates_equal_the_plain_model_over_a_long_history() -> None:
    random = Random(1)
    policy, model = LengthPolicy(SLOTS, WIDTH), PolicyModel()
    seen: Counter[str] = Counter()
    for _ in range(2500):
        slots = random.sample(range(SLOTS), random.randint(1, SLOTS))
        trees = [random_tree(random) if random.random() < 0.4 else CHAIN for _ in slots]
        action = random.random()
        if action < 0.05:
            policy.start(slots[0])
            model.start(slots[0])
            seen["start"] += 1
        elif action < 0.55:
            matches = [
                17 if tree is CHAIN else random.choice((0, 1, 2, 3, 4, 5, 8, 12)) for tree in trees
            ]
            offer(policy, slots, matches, trees)
            for slot, match, tree in zip(slots, matches, trees, strict=True):
                model.offer(slot, match, tree)
        else:
            runs = []
            for slot in slots:
                nodes = [(t, p, 0.0) for t, p, _, _ in model.trees.get(slot, [])]
                runs.append(run_through(random, nodes) if random.random() < 0.9 else [])
            learn(policy, slots, runs)
            for slot, run in zip(slots, runs, strict=True):
                seen["stale"] += slot not in model.fresh
                seen["deep"] += len(run) > 3
                model.learn(slot, run)
        for slot in slots:
            expected = [node[3] for node in model.trees.get(slot, [])]
            assert policy.estimates(slot) == pytest.approx(expected, rel=1e-4, abs=1e-6)
        known = np.zeros(len(slots), I32)
        policy.offered(np.array(slots, I32), known)
        assert known.tolist() == [len(model.trees[s]) if s in model.trees else -1 for s in slots]
    assert model.halved > 0
    assert min(seen[path] for path in ("start", "stale", "deep")) >= 100, seen


def best_rate(
    survivals: list[float], rows: int, times: np.ndarray, sunk: float, extra: float
) -> float:
    ordered = sorted(survivals, reverse=True)
    plain = rows / float(times[rows] + sunk)
    rates = [
        (rows + sum(ordered[:k])) / float(times[rows + k] + sunk + extra)
        for k in range(1, len(ordered) + 1)
    ]
    return max([plain, *rates]) / plain


def test_the_choice_is_the_best_one_and_closed_under_parents() -> None:
    random = Random(2)
    seen: Counter[str] = Counter()
    for _ in range(600):
        policy = LengthPolicy(SLOTS, WIDTH)
        rows = random.randint(1, SLOTS)
        slots = random.sample(range(SLOTS), rows)
        trees = [random_tree(random) for _ in slots]
        offer(policy, slots, [random.randint(1, 18) for _ in slots], trees)
        times = np.cumsum(np.array([random.choice((0.0, 0.1, 1.0)) for _ in range(60)])) + 1.0
        sunk, extra = random.choice((0.0, 0.3)), random.choice((0.0, 0.2))
        slots_array = np.array(slots, I32)
        capped = random.random() < 0.3
        caps = np.array([random.randint(0, 3) if capped else WIDTH for _ in slots], I32)
        kept, expected, gain = policy.select(
            slots_array, caps, rows, rows, times, sunk, extra, True
        )
        counts = np.zeros(rows, I32)
        tokens, parents = np.zeros(kept, I32), np.zeros(kept, I32)
        assert policy.write(slots_array, counts, tokens, parents) == kept == counts.sum()
        assert (counts <= caps).all()
        assert policy.kept_of(rows).tolist() == counts.tolist()
        at, total = 0, 0.0
        for r, slot in enumerate(slots):
            row_tokens = tokens[at : at + counts[r]].tolist()
            row_parents = parents[at : at + counts[r]].tolist()
            total += checked_sum(row_tokens, row_parents, trees[r], policy.estimates(slot))
            at += int(counts[r])
        assert total == pytest.approx(expected, rel=1e-4, abs=1e-5)
        rate = (rows + total) / (times[rows + kept] + sunk + (extra if kept else 0.0))
        assert gain == pytest.approx(rate / (rows / (times[rows] + sunk)), rel=1e-4)
        if not capped:
            every = [s for slot in slots for s in policy.estimates(slot) if s >= 0.01]
            assert gain >= best_rate(every, rows, times, sunk, extra) - 0.01
        seen["none" if kept == 0 else "all" if kept == sum(map(len, trees)) else "some"] += 1
    assert min(seen.values()) >= 20, seen


def checked_sum(tokens: list[int], parents: list[int], tree: Tree, survival: list[float]) -> float:
    """Sum of the kept nodes' survival; each must hang where it hung in the whole tree."""
    places = [0]
    total = 0.0
    for token, parent in zip(tokens, parents, strict=True):
        assert parent < len(places)
        found = [
            i + 1
            for i, (t, p, _) in enumerate(tree)
            if t == token and p == places[parent] and i + 1 not in places
        ]
        places.append(found[0])
        total += survival[found[0] - 1]
    return total


def test_what_was_learned_of_a_request_fades_and_what_of_all_stays() -> None:
    policy = LengthPolicy(2, 1)
    slots, one = np.arange(2, dtype=np.int32), np.ones(2, dtype=np.int32)
    tokens, parents = np.full((2, 1), 5, np.int32), np.zeros((2, 1), np.int32)
    weights = np.ones((2, 1), np.float32)
    for _ in range(60):
        policy.offer(slots, one, 9 * one, tokens, parents, weights)
        policy.learn(slots, one, np.array([5, 6], dtype=np.int32))  # right for slot 0 alone
    policy.offer(slots, one, 9 * one, tokens, parents, weights)
    right, wrong = policy.estimates(0)[0], policy.estimates(1)[0]
    for _ in range(8):
        policy.fade(slots, 0.5)
    policy.offer(slots, one, 9 * one, tokens, parents, weights)
    assert policy.estimates(0)[0] == pytest.approx(policy.estimates(1)[0], rel=0.02)
    assert wrong + 0.1 < policy.estimates(1)[0] < right - 0.1
    with pytest.raises(ValueError, match="slots: 2 is not one of 2"):
        policy.fade(np.array([2], dtype=np.int32), 0.5)


def test_beside_prefill_a_node_must_earn_its_marginal_time() -> None:
    """T jumps by the prefill tokens; drafts there cost 0.1 s a token and bring up to 0.9."""
    chain: Tree = [(1, 0, 1.0), (2, 1, 1.0)]
    slots, caps = np.zeros(1, I32), np.full(1, WIDTH, I32)
    cheap = np.concatenate([np.linspace(1.0, 1.1, 8), np.full(200, 1.2)])
    dear = np.concatenate([np.linspace(1.0, 1.1, 8), np.linspace(2.0, 200.0, 200)])
    for times, wanted in ((cheap, 2), (dear, 0)):
        policy = LengthPolicy(1, WIDTH)
        offer(policy, [0], [18], [chain])
        kept, _, gain = policy.select(slots, caps, 101, 1, times, 0.0, 0.0, True)
        assert kept == wanted
        assert (gain > 1.0) == (wanted > 0)


def test_past_the_table_the_last_slope_goes_on() -> None:
    policy = LengthPolicy(1, WIDTH)
    offer(policy, [0], [18], [[(1, 0, 1.0)]])
    slots, caps = np.zeros(1, I32), np.full(1, WIDTH, I32)
    flat, steep = np.array([1.0, 1.0]), np.array([0.5, 1.0])
    assert policy.select(slots, caps, 1, 1, flat, 0.0, 0.0, True)[0] == 1
    assert policy.select(slots, caps, 1, 1, steep * 10, 0.0, 0.0, True)[0] == 1
    assert policy.select(slots, caps, 1, 1, np.array([0.1, 1.0]), 0.0, 0.0, True)[0] == 0


def test_only_fresh_trees_are_bound_and_old_ones_still_predict() -> None:
    policy = LengthPolicy(1, WIDTH)
    slots, caps, flat = np.zeros(1, I32), np.full(1, WIDTH, I32), np.ones(40)
    offer(policy, [0], [18], [[(1, 0, 1.0), (2, 1, 1.0)]])
    assert policy.select_all(slots, caps) == 2
    assert policy.select_all(slots, np.ones(1, I32)) == 1
    learn(policy, [0], [[1, 2, 9]])
    assert policy.select_all(slots, caps) == 0
    assert policy.select(slots, caps, 1, 1, flat, 0.0, 0.0, True)[0] == 0
    assert policy.select(slots, caps, 1, 1, flat, 0.0, 0.0, False)[0] == 2
    assert policy.select(slots, caps, 0, 0, flat, 0.0, 0.0, False) == (0, 0.0, 1.0)


def test_what_held_of_chains_teaches_as_their_tokens_would() -> None:
    random, chain = Random(4), [(i, i, 1.0) for i in range(WIDTH)]
    told, shown = LengthPolicy(SLOTS, WIDTH), LengthPolicy(SLOTS, WIDTH)
    full = 0
    for _ in range(200):
        slots = random.sample(range(SLOTS), random.randint(1, SLOTS))
        for policy in (told, shown):
            offer(policy, slots, [9] * len(slots), [chain] * len(slots))
        caps = [random.randint(0, WIDTH) for _ in slots]
        held = [random.randint(0, cap) for cap in caps]
        full += sum(h == c > 0 for h, c in zip(held, caps, strict=True))
        told.learn_held(*(np.array(values, I32) for values in (slots, caps, held)))
        pairs = list(zip(held, caps, strict=True))
        learn(shown, slots, [[*range(h), *([-1] if h < c else [])] for h, c in pairs])
        assert all(told.estimates(slot) == shown.estimates(slot) for slot in range(SLOTS))
    assert full > 50


@pytest.mark.parametrize(("cap", "held"), [(3, 4), (WIDTH + 1, 2), (3, -1)])
def test_more_cannot_hold_than_was_drafted(cap: int, held: int) -> None:
    rows = (np.array([value], I32) for value in (0, cap, held))
    with pytest.raises(ValueError, match=f"held: {held} of {cap} drafts in row 0"):
        LengthPolicy(SLOTS, WIDTH).learn_held(*rows)


def test_caps_by_room() -> None:
    caps, reasons, drafting = row_caps(np.array([-1, 0, 3, 9], I32), 5, 11, 12)
    assert (caps.tolist(), reasons.tolist(), drafting) == ([0, 0, 3, 5], [11, 12, 0, 0], 2)
    caps, reasons, drafting = row_caps(np.array([], I32), 5, 11, 12)
    assert (len(caps), len(reasons), drafting) == (0, 0, 0)


def test_input_that_does_not_fit() -> None:
    policy = LengthPolicy(2, 3)
    one, row = np.zeros(1, I32), np.zeros((1, 3), I32)
    weights = np.ones((1, 3), np.float32)
    three = np.full(1, 3, I32)
    with pytest.raises(ValueError, match="width"):
        LengthPolicy(1, 65)
    with pytest.raises(ValueError, match="slots"):
        LengthPolicy(0, 1)
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match="slot"):
            policy.start(wrong)
        with pytest.raises(ValueError, match="slot"):
            policy.estimates(wrong)
        with pytest.raises(ValueError, match="slots"):
            policy.offered(np.full(1, wrong, I32), one)
    with pytest.raises(ValueError, match="3 rows, but there are 2"):
        policy.select_all(np.zeros(3, I32), np.zeros(3, I32))
    with pytest.raises(ValueError, match="counts"):
        policy.offer(one, np.zeros(2, I32), one, row, row, weights)
    with pytest.raises(ValueError, match="room for 3"):
        policy.offer(one, np.full(1, 4, I32), one, row, row, weights)
    with pytest.raises(ValueError, match="columns"):
        policy.offer(one, three, one, row, np.zeros((1, 2), I32), weights)
    for parents in ([0, 2, 0], [0, 1, 0], [0, 0, 5]):
        with pytest.raises(ValueError, match="breadth-first"):
            policy.offer(one, three, one, row, np.array([parents], I32), weights)
    with pytest.raises(ValueError, match="tokens: 0 for 2"):
        policy.learn(one, np.full(1, 2, I32), np.zeros(0, I32))
    with pytest.raises(ValueError, match="lens"):
        policy.learn(one, np.full(1, -1, I32), np.zeros(0, I32))
    with pytest.raises(ValueError, match="times"):
        policy.select(one, one, 1, 1, np.ones(1), 0.0, 0.0, True)
    policy.offer(one, three, one, row, row, weights)
    policy.select_all(one, three)
    with pytest.raises(ValueError, match="room for 3"):
        policy.write(one, one.copy(), np.zeros(2, I32), np.zeros(3, I32))
