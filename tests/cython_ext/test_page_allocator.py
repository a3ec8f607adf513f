import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from numpy.typing import NDArray

from outrider.cython_ext.page_allocator import PageAllocator

from ..stateful import run_until_reached
from .models import PageAllocatorModel

REACHED: Counter[str] = Counter()


def int32(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.real = PageAllocator(num_pages)
        self.model = PageAllocatorModel(num_pages)
        self.held: list[int] = []

    @rule(n=st.integers(0, 6))
    def alloc(self, n: int) -> None:
        got, want = self.real.alloc(n), self.model.alloc(n)
        assert (None if got is None else got.tolist()) == want
        self.held += want or []
        REACHED["short" if want is None else "alloc"] += 1

    @rule(seed=st.integers(0, 1 << 32))
    def free(self, seed: int) -> None:
        pages = random.Random(seed).sample(self.held, (len(self.held) + 1) // 2)
        self.real.free(int32(pages))
        self.model.free(pages)
        self.held = [page for page in self.held if page not in pages]
        REACHED["free"] += bool(pages)

    @rule(kind=st.sampled_from(["twice", "already_free", "low", "high"]), at=st.integers(0, 20))
    def free_wrongly(self, kind: str, at: int) -> None:
        if not self.held:
            self.alloc(3)
        outside = -at if kind == "low" else self.real.num_pages + 1 + at
        bad = {"twice": self.held[:1], "already_free": self.model.stack[:1]}.get(kind, [outside])
        if not bad:
            return
        pages = list(self.held)
        pages.insert(at % (len(pages) + 1), bad[0])
        with pytest.raises(ValueError, match=rf"page {bad[0]}\b"):
            self.real.free(int32(pages))
        with pytest.raises(ValueError, match=rf"page {bad[0]}\b"):
            self.model.free(pages)
        REACHED[kind] += 1

    @rule()
    def reset(self) -> None:
        self.real.reset()
        self.model.reset()
        self.held = []
        REACHED["reset"] += 1

    @rule(seed=st.integers(0, 1 << 32))
    def burst(self, seed: int) -> None:
        """Steps by a plain random generator, which are cheaper than drawn ones."""
        rng = random.Random(seed)
        for _ in range(20):
            kind = rng.choice(["twice", "already_free", "low", "high"])
            step = rng.choice([self.alloc, self.alloc, self.free])
            step(rng.randrange(7))
            self.free_wrongly(kind, rng.randrange(20))
        self.same()

    @invariant()
    def same(self) -> None:
        self.real.check()
        assert self.real.num_pages == self.model.num_pages
        assert self.real.free_pages == self.model.free_pages
        for page in range(1, self.real.num_pages + 1):
            assert self.real.is_free(page) == self.model.is_free(page)


def test_against_model() -> None:
    REACHED.clear()
    wanted = ("short", "alloc", "free", "twice", "already_free", "low", "high", "reset")
    run_until_reached(AllocatorMachine, REACHED, wanted, examples=20, steps=40)


def test_order_is_lifo_and_lowest_first_when_fresh() -> None:
    allocator = PageAllocator(6)
    assert allocator.alloc(3) is not None
    allocator.free(int32([2, 1]))
    taken = allocator.alloc(4)
    assert taken is not None
    assert taken.dtype == np.int32
    assert taken.tolist() == [2, 1, 4, 5]


@pytest.mark.parametrize("kind", ["leak", "count", "duplicate", "range", "flag", "sink"])
def test_check_sees_damage(kind: str) -> None:
    allocator = PageAllocator(5)
    allocator.alloc(2)
    allocator.check()
    allocator.corrupt_for_test(kind)
    with pytest.raises(AssertionError, match="page"):
        allocator.check()


def test_bad_arguments() -> None:
    for num_pages in (0, -1):
        with pytest.raises(ValueError, match="num_pages is"):
            PageAllocator(num_pages)
    allocator = PageAllocator(1)
    with pytest.raises(ValueError, match="n is -1"):
        allocator.alloc(-1)
    for page in (0, 2, -1):
        with pytest.raises(ValueError, match=f"page {page} is outside 1..1"):
            allocator.is_free(page)
    with pytest.raises(ValueError, match="dtype mismatch"):
        allocator.free(np.array([1]))
    with pytest.raises(ValueError, match="unknown kind"):
        PageAllocator(2).corrupt_for_test("nothing")
    with pytest.raises(ValueError, match="two free pages"):
        allocator.corrupt_for_test("leak")
