"""Time each compiled class of `cython_ext` against its plain-Python model.

    python benchmarks/bench_cython_ext.py [--only WORD] [--json FILE]

A case registers itself with `@case("class: what")` and returns two callables that do the same
work, the compiled one and the model; both are run on one thread and timed by its CPU time.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from outrider.cython_ext.batch_assembly import assemble, compact_accepted
from outrider.cython_ext.draft_window import DraftWindowSlotMap
from outrider.cython_ext.page_allocator import PageAllocator
from outrider.cython_ext.radix_trie import RadixTrie
from outrider.engine_core.draft_window import draft_pool_pages

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.cython_ext.models import (
    PageAllocatorModel,
    RadixTrieModel,
    assemble_model,
    compact_model,
)
from tests.reference.draft_window_ref import DraftWindowModel

Work = Callable[[], object]
Pair = tuple[Work, Work]
CASES: dict[str, Callable[[], Pair]] = {}


class Result(TypedDict):
    """CPU microseconds of one call, medians."""

    name: str
    compiled_us: float
    model_us: float
    speedup: float


def case(name: str) -> Callable[[Callable[[], Pair]], Callable[[], Pair]]:
    def register(make: Callable[[], Pair]) -> Callable[[], Pair]:
        CASES[name] = make
        return make

    return register


def cpu_us(work: Work, repeats: int = 9, budget_s: float = 0.03) -> float:
    """Median CPU time of one call in microseconds."""
    work()
    started = time.thread_time()
    work()
    calls = max(1, min(20_000, int(budget_s / max(time.thread_time() - started, 1e-7))))
    times = []
    for _ in range(repeats):
        started = time.thread_time()
        for _ in range(calls):
            work()
        times.append((time.thread_time() - started) / calls * 1e6)
    return statistics.median(times)


@case("PageAllocator: alloc and free 8 of 65,536 pages")
def page_allocator() -> Pair:
    real, model = PageAllocator(65_536), PageAllocatorModel(65_536)

    def compiled() -> None:
        pages = real.alloc(8)
        assert pages is not None
        real.free(pages)

    def plain() -> None:
        pages = model.alloc(8)
        assert pages is not None
        model.free(pages)

    return compiled, plain


PAGE_SIZE = 16


def prompts(count: int, length: int = 2_000) -> list[NDArray[np.int32]]:
    """Prompts that share a random part of the first one, as multi-turn traffic does."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, 50_000, length, np.int32)
    made = [first]
    for _ in range(count - 1):
        prompt = rng.integers(0, 50_000, length, np.int32)
        shared = rng.integers(0, length)
        prompt[:shared] = first[:shared]
        made.append(prompt)
    return made


def filled_trees() -> tuple[RadixTrie, RadixTrieModel, list[NDArray[np.int32]]]:
    real, model, texts = RadixTrie(PAGE_SIZE), RadixTrieModel(PAGE_SIZE), prompts(64)
    for i, text in enumerate(texts):
        pages = np.arange(1, 126, dtype=np.int32) + 125 * i
        real.insert(text, pages, "")
        model.insert(text.tolist(), pages.tolist(), "")
    return real, model, texts


@case("RadixTrie: match a cached prompt of 2,000 tokens, page size 16")
def radix_match() -> Pair:
    real, model, texts = filled_trees()
    tokens, text = texts[0].tolist(), texts[0]
    return lambda: real.match(text, ""), lambda: model.match(tokens, "")


@case("RadixTrie: lock and unlock the path of a 2,000-token prompt")
def radix_lock() -> Pair:
    real, model, texts = filled_trees()
    handle, node = real.match(texts[0], "").node, model.match(texts[0].tolist(), "")

    def compiled() -> None:
        real.lock(handle)
        real.unlock(handle)

    def plain() -> None:
        model.lock(node)
        model.unlock(node)

    return compiled, plain


@case(
    "RadixTrie: insert a new prompt of 2,000 tokens, evict 125 pages of 8,000 (the model sorts all)"
)
def radix_evict() -> Pair:
    real, model, _ = filled_trees()
    fresh = np.random.default_rng(1).integers(0, 50_000, 2_000, np.int32)
    pages = np.arange(1, 126, dtype=np.int32) + 100_000
    tokens, page_list, turn = fresh.tolist(), pages.tolist(), [0]

    def compiled() -> None:
        turn[0] += 1
        fresh[0] = turn[0]
        real.insert(fresh, pages, "")
        real.evict(125)

    def plain() -> None:
        turn[0] += 1
        tokens[0] = turn[0]
        model.insert(tokens, page_list, "")
        model.evict(125)

    return compiled, plain


def tree_step(rows: int, parents: list[int]) -> Pair:
    slots, q_lens = list(range(rows)), [len(parents)] * rows
    starts = [700 + 3 * row for row in range(rows)]
    table = [[1 + 64 * row + i for i in range(64)] for row in range(rows)]
    total = rows * len(parents)
    slot_array, start_array = np.array(slots, np.int32), np.array(starts, np.int32)
    q_len_array = np.array(q_lens, np.int32)
    flat_parents = parents * rows
    parent_array, table_array = np.array(flat_parents, np.int32), np.array(table, np.int32)
    positions, kv_slots = np.zeros(total, np.int64), np.zeros(total, np.int64)
    row_of_token, cu_q = np.zeros(total, np.int32), np.zeros(rows + 1, np.int32)
    kv_lens, bits = np.zeros(rows, np.int32), np.zeros(total, np.uint64)
    is_tree = np.zeros(rows, np.uint8)

    def compiled() -> None:
        assemble(
            slot_array, q_len_array, start_array, parent_array, table_array, PAGE_SIZE, positions,
            kv_slots, row_of_token, cu_q, kv_lens, bits, is_tree,
        )  # fmt: skip

    return compiled, lambda: assemble_model(slots, q_lens, starts, flat_parents, table, PAGE_SIZE)


@case("assemble: 64 rows with trees of 12 tokens")
def assemble_trees() -> Pair:
    return tree_step(64, [-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7, 10])


@case("assemble: 64 plain decode rows")
def assemble_plain() -> Pair:
    return tree_step(64, [-1])


@case("assemble: 4 prefill rows of 128 tokens")
def assemble_prefill() -> Pair:
    return tree_step(4, list(range(-1, 127)))


@case("compact_accepted: 64 rows, 3 accepted of 12")
def compact() -> Pair:
    rows, accepted = 64, [[0, 2, 6]] * 64
    slots, starts = list(range(rows)), [700 + 3 * row for row in range(rows)]
    table = [[1 + 64 * row + i for i in range(64)] for row in range(rows)]
    slot_array, start_array = np.array(slots, np.int32), np.array(starts, np.int32)
    table_array, accept_cu = np.array(table, np.int32), np.arange(0, 193, 3, dtype=np.int32)
    accept_idx = np.array(accepted, np.int32).reshape(-1)
    src, dst = np.zeros(192, np.int64), np.zeros(192, np.int64)

    def compiled() -> None:
        compact_accepted(
            slot_array, start_array, table_array, PAGE_SIZE, accept_cu, accept_idx, src, dst
        )

    return compiled, lambda: compact_model(slots, starts, table, PAGE_SIZE, accepted)


@case("DraftWindowSlotMap: slide, and ensure 16 positions for 64 rows, window 2,048")
def draft_window() -> Pair:
    """Each call commits 16 tokens a row; where its 4,096 positions end, a row begins anew."""
    rows, columns, window, width = 64, 256, 2_048, 16
    pool = draft_pool_pages(rows, window, PAGE_SIZE, width, overlap=False)
    shape = (rows * columns, pool, PAGE_SIZE, window, rows)
    real, model = DraftWindowSlotMap(*shape), DraftWindowModel(*shape)
    table = np.arange(1, rows * columns + 1, dtype=np.int32).reshape(rows, columns)
    arrays, lists, lengths = list(table), table.tolist(), [window, window]
    for slot in range(rows):
        real.attach(slot, window, arrays[slot])
        model.attach(slot, window, lists[slot])

    def advance(at: int) -> tuple[int, bool]:
        end = lengths[at] + 2 * width > columns * PAGE_SIZE
        lengths[at] = window if end else lengths[at] + width
        return lengths[at], end

    def compiled() -> None:
        length, anew = advance(0)
        for slot, pages in enumerate(arrays):
            if anew:
                real.release(slot)
                real.attach(slot, length, pages)
            real.slide(slot, length)
            real.ensure(slot, length, length + width, pages)

    def plain() -> None:
        length, anew = advance(1)
        for slot, pages in enumerate(lists):
            if anew:
                model.release(slot)
                model.attach(slot, length, pages)
            model.slide(slot, length)
            model.ensure(slot, length, length + width, pages)

    return compiled, plain


def measure(only: str) -> list[Result]:
    results: list[Result] = []
    for name, make in CASES.items():
        if only.lower() in name.lower():
            compiled, plain = make()
            fast, slow = cpu_us(compiled), cpu_us(plain)
            results.append(Result(name=name, compiled_us=fast, model_us=slow, speedup=slow / fast))
            print(f"{fast:10.2f} us {slow:11.1f} us {slow / fast:8.0f} x  {name}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--only", default="", help="run the cases whose name contains this word")
    args = parser.parse_args()
    print("  compiled         model  speedup  case")
    results = measure(args.only)
    if not results:
        parser.error(f"--only {args.only!r} matches none of: {', '.join(CASES)}")
    if args.json:
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        command = "python benchmarks/bench_cython_ext.py " + " ".join(sys.argv[1:])
        report = {"command": command, "machine": machine, "cases": results}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
