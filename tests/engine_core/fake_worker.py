"""A deterministic worker without a model, which notices every wrong page, position or token.

The next token is a hash of the whole prefix (and of the seed when sampling). Each KV slot keeps
the token and the hash of the prefix that were written there; a row asserts that all positions it
attends to hold what its sequence has there. Accepted tokens are relayed from step to step through
per-slot state, like a FutureMap's.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from outrider.engine_core.ids import RowKind, i32
from outrider.engine_core.plan import (
    HostDrafts,
    RowError,
    RowLogprobs,
    SlotInit,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.worker import WorkerFailed, WorkerInfo

MASK = 2**62 - 1
GARBAGE = -7


def extend_hash(prefix: int, token: int) -> int:
    """Hash of a prefix with one more token."""
    z = (prefix * 0x5851F42D4C957F2D + token * 0x14057B7EF767814F + 0x9E3779B97F4A7C15) & MASK
    return (z ^ (z >> 29)) & MASK


def choose(prefix: int, vocab_size: int, params: SamplingParams, seed: int, made: int) -> int:
    """The token that follows a prefix of which ``made`` tokens were generated."""
    z = prefix if params.greedy else extend_hash(prefix, seed & MASK)
    banned = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        banned |= {0}
    while True:
        z = extend_hash(z, 1)
        token = (z >> 7) % vocab_size
        if made >= params.min_new_tokens or token not in banned:
            return token


@dataclass
class Slot:
    """What a real worker keeps on the device for a slot."""

    init: SlotInit
    tokens: list[int]
    hashes: list[int]  # hashes[i]: of tokens[: i + 1]
    prompt_len: int
    pages: dict[int, int] = field(default_factory=dict)

    def append(self, token: int) -> None:
        self.hashes.append(extend_hash(self.hashes[-1] if self.hashes else 0, token))
        self.tokens.append(token)


class FakeDraftKV:
    """The KV of a drafter in the target's pages: what a position was computed from.

    ``reach``: tokens from a row's first on that drafting writes (with rubbish). ``shifts``: a
    position's KV depends on the next token too. Then a position before a page's end may have been
    computed beside another request's next page: those are counted in ``stale``.
    """

    def __init__(self, slots: int, page_size: int, reach: int, shifts: bool) -> None:
        self.reach = reach
        self.shifts = shifts
        self.page_size = page_size
        self.hashes = np.full(slots, GARBAGE, dtype=np.int64)
        self.next = np.full(slots, GARBAGE, dtype=np.int64)
        self.ahead = 0  # positions beyond a row's query tokens that were written
        self.stale = 0

    def write(self, at: int, prefix: int, following: int) -> None:
        self.hashes[at], self.next[at] = prefix, following

    def check(self, slot: Slot, at: npt.NDArray[np.int64]) -> None:
        """The KV at these places is that of the slot's first tokens."""
        assert self.hashes[at].tolist() == slot.hashes[: len(at)], (
            "the drafter reads another prefix"
        )
        if not self.shifts:
            return
        following = np.array(slot.tokens[1 : len(at) + 1])
        wrong = np.flatnonzero(self.next[at][: len(following)] != following)
        assert ((wrong + 1) % self.page_size == 0).all(), "stale inside a page"
        assert (wrong < slot.init.cached_len).all(), "stale where the request computed it itself"
        self.stale += len(wrong)


class FakeWorker:
    """Implements the Worker protocol; ``step_seconds`` > 0 runs steps in a thread."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        max_slots: int = 8,
        vocab_size: int = 50,
        context_length: int = 256,
        step_seconds: float = 0.0,
        fail_at_step: int | None = None,
        row_error: Callable[[SlotInit, int], bool] | None = None,
        device_drafter: "Callable[[Slot, int], list[int]] | None" = None,
        draft_reach: int = 0,
        shifts_tokens: bool = False,
    ) -> None:
        """``device_drafter``: a chain of at most so many tokens for a slot, inside the step; with
        ``draft_reach`` it has KV in the target's pages (see FakeDraftKV).
        """
        self._info = WorkerInfo(
            vocab_size=vocab_size,
            context_length=context_length,
            num_pages=num_pages,
            page_size=page_size,
            max_slots=max_slots,
            eos_ids=(0,),
            weight_bytes=1,
            kv_bytes_per_token=8,
            num_threads=1,
            device="cpu",
            dtype="float32",
        )
        self.step_seconds = step_seconds
        self.fail_at_step = fail_at_step
        self.row_error = row_error
        self.device_drafter = device_drafter
        self.slots: dict[int, Slot] = {}
        kv = (num_pages + 1) * page_size
        self.kv_tokens = np.full(kv, GARBAGE, dtype=np.int64)
        self.kv_hashes = np.full(kv, GARBAGE, dtype=np.int64)
        self.draft_kv: FakeDraftKV | None = None
        if draft_reach:
            self.draft_kv = FakeDraftKV(kv, page_size, draft_reach, shifts_tokens)
        self.plans: deque[StepPlan] = deque()
        self.drafts: deque[HostDrafts] = deque()
        self.steps = 0
        self.resets = 0
        self.max_rows = 0
        self.mixed_steps = 0
        self.partial_accepts = 0
        self.partial_chunks = 0
        self.page_copies = 0
        self._jobs: queue.Queue[StepPlan | None] = queue.Queue()
        self._late: queue.Queue[HostDrafts] = queue.Queue()
        self._done: queue.Queue[StepResult | BaseException] = queue.Queue()
        self._launched: deque[float] = deque()
        self._thread: threading.Thread | None = None
        if step_seconds > 0:
            self._thread = threading.Thread(target=self._loop, daemon=True)
            self._thread.start()

    def info(self) -> WorkerInfo:
        return self._info

    def measure(self, batch_tokens: Sequence[int]) -> list[float]:
        return [1e-3 + 1e-6 * n for n in batch_tokens]

    def measure_drafting(self, rows: Sequence[int]) -> list[float]:
        return [5e-4 + 1e-5 * n for n in rows]

    def launch(self, plan: StepPlan) -> None:
        if self._thread is not None:
            self._launched.append(time.perf_counter())
            self._jobs.put(plan)
        else:
            self.plans.append(plan)
            assert len(self.plans) <= 2, "more than two steps launched"

    def upload_drafts(self, drafts: HostDrafts) -> None:
        if self._thread is not None:
            self._late.put(drafts)
        else:
            self.drafts.append(drafts)

    def collect(self) -> StepResult:
        if self._thread is not None:
            done = self._done.get(timeout=10)
            if isinstance(done, BaseException):
                raise done
            return done
        plan = self.plans.popleft()
        drafts = None
        if plan.late_bound:
            assert self.drafts, "a late-bound step was collected before its drafts came"
            drafts = self.drafts.popleft()
        return self.run(plan, drafts)

    def reset(self) -> None:
        assert not self.plans
        self.resets += 1
        self.slots.clear()
        self.kv_tokens[:] = GARBAGE
        self.kv_hashes[:] = GARBAGE
        if self.draft_kv is not None:
            self.draft_kv.hashes[:] = GARBAGE
            self.draft_kv.next[:] = GARBAGE

    def shutdown(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout=10)
            self._thread = None

    def _loop(self) -> None:
        # Like a device's queue: a step that waits starts the moment its predecessor ends.
        ready = 0.0
        while (plan := self._jobs.get()) is not None:
            try:
                drafts = self._late.get(timeout=10) if plan.late_bound else None
                launched = self._launched.popleft()
                start = time.perf_counter() if plan.late_bound else launched
                ready = max(ready, start) + self.step_seconds
                result = self.run(plan, drafts)
                time.sleep(max(0.0, ready - time.perf_counter()))
                self._done.put(result)
            except BaseException as error:
                self._done.put(error)
                return

    def run(self, plan: StepPlan, drafts: HostDrafts | None) -> StepResult:
        """Run one step. AssertionError says what was wrong with the plan."""
        began = time.perf_counter_ns()
        self.steps += 1
        if self.fail_at_step == self.steps:
            raise WorkerFailed(f"injected at step {plan.step}")
        self._enter(plan)
        rows = Rows(plan, drafts)
        caps = rows.device_caps(plan, drafts)
        if self.device_drafter is not None:
            chains = [
                self.device_drafter(self.slots[slot], cap) if cap else []
                for slot, cap in zip(rows.slots, caps, strict=True)
            ]
            rows.fill(chains)
        self.max_rows = max(self.max_rows, len(rows.slots))
        self.mixed_steps += len(set(rows.kinds)) > 1
        assert len(set(rows.slots)) == len(rows.slots), "a slot has two rows"
        for slot_id, cap in zip(rows.slots, caps, strict=True):
            self._draft_ahead(self.slots[slot_id], cap)
        runs: list[list[int]] = []
        errors: list[RowError] = []
        logprobs: list[RowLogprobs] = []
        for row, slot_id in enumerate(rows.slots):
            slot = self.slots[slot_id]
            if self.row_error is not None and self.row_error(slot.init, len(slot.tokens)):
                errors.append(RowError(row, "the logits are not numbers"))
                runs.append([])
                continue
            run = self._row(slot, rows, row)
            runs.append(run)
            if slot.init.params.logprobs is not None and run:
                entries = tuple(TokenLogprobs(t, -0.5 - t, b"", b"") for t in run)
                logprobs.append(RowLogprobs(row, entries))
        return StepResult(
            step=plan.step,
            accept_lens=_bytes([len(run) for run in runs]),
            tokens=_bytes([token for run in runs for token in run]),
            proposed=_bytes(rows.counts),
            depths=_bytes([rows.depth(row) for row in range(len(runs))]),
            logprobs=tuple(logprobs),
            errors=tuple(errors),
            busy_ns=time.perf_counter_ns() - began,
            batch_tokens=sum(
                rows.q_caps[r] if k != RowKind.VERIFY else 1 + max(caps[r], rows.counts[r])
                for r, k in enumerate(rows.kinds)
            ),
        )

    def _enter(self, plan: StepPlan) -> None:
        for init in plan.inits:
            assert 0 <= init.slot < self._info.max_slots
            slot = Slot(init, [], [], len(init.prompt) // 4)
            for token in [*i32(init.prompt).tolist(), *i32(init.output).tolist()]:
                slot.append(token)
            self.slots[init.slot] = slot
            for source, destination in init.page_copies:
                self._copy_page(source, destination)
                self.page_copies += 1
        deltas = zip(
            i32(plan.page_slots).tolist(),
            i32(plan.page_indexes).tolist(),
            i32(plan.page_ids).tolist(),
            strict=True,
        )
        for slot_id, index, page in deltas:
            assert 1 <= page <= self._info.num_pages
            pages = self.slots[slot_id].pages
            assert index == len(pages), "a page-table row has a hole or is overwritten"
            pages[index] = page

    def _copy_page(self, source: int, destination: int) -> None:
        assert source != destination
        size = self._info.page_size
        arrays = [self.kv_tokens, self.kv_hashes]
        if self.draft_kv is not None:
            arrays += [self.draft_kv.hashes, self.draft_kv.next]
        for array in arrays:
            pages = array.reshape(-1, size)
            pages[destination] = pages[source]

    def _row(self, slot: Slot, rows: "Rows", row: int) -> list[int]:
        if rows.kinds[row] == RowKind.VERIFY:
            return self._verify(slot, rows, row)
        start, chunk = rows.starts[row], rows.chunks[row]
        assert chunk == slot.tokens[start : start + len(chunk)], "wrong prompt tokens or position"
        self._attend(slot, start)
        end = start + len(chunk)
        for i in range(start, end):
            self._write(slot, i, slot.tokens[i], slot.hashes[i])
        if rows.kinds[row] == RowKind.PREFILL:
            self.partial_chunks += end < len(slot.tokens)
            self._align(slot, start, end)
            return []
        assert end == len(slot.tokens), "the last chunk does not end the prompt"
        token = self._next(slot, slot.hashes[-1], len(slot.tokens))
        slot.append(token)
        self._align(slot, start, end)
        return [token]

    def _draft_ahead(self, slot: Slot, cap: int) -> None:
        """What drafting writes before the row is verified."""
        if self.draft_kv is None or cap == 0:
            return
        start = len(slot.tokens) - 1
        for i in range(start, start + self.draft_kv.reach):
            self.draft_kv.write(self._kv(slot, i), GARBAGE, GARBAGE)
        self.draft_kv.ahead += max(0, self.draft_kv.reach - 1 - cap)

    def _align(self, slot: Slot, start: int, end: int) -> None:
        """The drafter's KV of these positions, now that their next tokens are known."""
        if self.draft_kv is None:
            return
        for i in range(start, end):
            following = slot.tokens[i + 1] if i + 1 < len(slot.tokens) else GARBAGE
            self.draft_kv.write(self._kv(slot, i), slot.hashes[i], following)

    def _verify(self, slot: Slot, rows: "Rows", row: int) -> list[int]:
        start = len(slot.tokens) - 1
        self._attend(slot, start)
        # Pages must hold all that the plan promised, drafts or not.
        for i in range(start, start + rows.q_caps[row]):
            self._kv(slot, i)
        tokens, parents = rows.draft(row)
        assert len(tokens) < rows.q_caps[row], "more drafts than planned"
        hashes = [slot.hashes[-1]]
        self._write(slot, start, slot.tokens[-1], slot.hashes[-1])
        for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            assert 0 <= parent <= i, "a parent follows its child"
            hashes.append(extend_hash(hashes[parent], token))
            self._write(slot, start + 1 + i, token, hashes[-1])
        node, run = 0, list[int]()
        while True:
            token = self._next(slot, hashes[node], len(slot.tokens) + len(run))
            run.append(token)
            child = next(
                (i + 1 for i, t in enumerate(tokens) if t == token and parents[i] == node), None
            )
            if child is None:
                break
            self._write(slot, start + len(run), token, hashes[child])  # compaction
            node = child
        self.partial_accepts += 1 < len(run) <= len(tokens)
        for token in run:
            slot.append(token)
        self._align(slot, start, start + len(run))
        return run

    def _next(self, slot: Slot, prefix: int, length: int) -> int:
        init = slot.init
        made = length - slot.prompt_len
        return choose(prefix, self._info.vocab_size, init.params, init.seed, made)

    def _kv(self, slot: Slot, position: int) -> int:
        size = self._info.page_size
        assert position // size in slot.pages, f"position {position} has no page"
        return slot.pages[position // size] * size + position % size

    def _write(self, slot: Slot, position: int, token: int, prefix: int) -> None:
        at = self._kv(slot, position)
        self.kv_tokens[at] = token
        self.kv_hashes[at] = prefix

    def _attend(self, slot: Slot, end: int) -> None:
        if end == 0:
            return
        size = self._info.page_size
        pages = np.array([slot.pages[i] for i in range((end - 1) // size + 1)])
        at = (pages[:, None] * size + np.arange(size)).ravel()[:end]
        assert self.kv_tokens[at].tolist() == slot.tokens[:end], "attends to wrong tokens"
        assert self.kv_hashes[at].tolist() == slot.hashes[:end], "attends to another prefix"
        if self.draft_kv is not None:
            self.draft_kv.check(slot, at)


class Rows:
    """A plan's rows as plain lists."""

    def __init__(self, plan: StepPlan, drafts: HostDrafts | None) -> None:
        self.slots: list[int] = i32(plan.slots).tolist()
        self.kinds = list(plan.kinds)
        self.q_caps: list[int] = i32(plan.q_caps).tolist()
        self.starts: list[int] = i32(plan.starts).tolist()
        tokens = i32(plan.tokens).tolist()
        self.chunks: list[list[int]] = []
        for row, kind in enumerate(self.kinds):
            assert self.q_caps[row] >= 1
            take = 0 if kind == RowKind.VERIFY else self.q_caps[row]
            assert (self.starts[row] == -1) == (kind == RowKind.VERIFY)
            self.chunks.append(tokens[:take])
            del tokens[:take]
        assert not tokens, "the plan has more tokens than rows"
        self.counts = [0] * len(self.slots)
        self._tokens: list[int] = []
        self._parents: list[int] = []
        if drafts is not None:
            assert drafts.step == plan.step, "drafts of another step"
            self.counts = i32(drafts.counts).tolist()
            self._tokens = i32(drafts.tokens).tolist()
            self._parents = i32(drafts.parents).tolist()
        assert len(self._tokens) == len(self._parents) == sum(self.counts)
        assert len(self.counts) == len(self.slots)

    def device_caps(self, plan: StepPlan, drafts: HostDrafts | None) -> list[int]:
        """Room for the device's drafts in each row."""
        if drafts is None:
            verifies = [kind == RowKind.VERIFY for kind in self.kinds]
            return [(q - 1) * v for q, v in zip(self.q_caps, verifies, strict=True)]
        assert plan.late_bound
        caps: list[int] = i32(drafts.device_caps).tolist() or [0] * len(self.slots)
        for cap, count, q_cap in zip(caps, self.counts, self.q_caps, strict=True):
            assert cap == 0 or (count == 0 and cap < q_cap)
        return caps

    def fill(self, chains: list[list[int]]) -> None:
        """Give rows without drafts the device's chains."""
        drafts = [self.draft(row) for row in range(len(self.slots))]
        for row, chain in enumerate(chains):
            if chain:
                drafts[row] = (chain, list(range(len(chain))))
        self.counts = [len(tokens) for tokens, _ in drafts]
        self._tokens = [token for tokens, _ in drafts for token in tokens]
        self._parents = [parent for _, parents in drafts for parent in parents]

    def draft(self, row: int) -> tuple[list[int], list[int]]:
        """Tokens and row-local parents of a row's tree."""
        at = sum(self.counts[:row])
        end = at + self.counts[row]
        return self._tokens[at:end], self._parents[at:end]

    def depth(self, row: int) -> int:
        """Depth of a row's tree."""
        depths = [0]
        for parent in self.draft(row)[1]:
            depths.append(depths[parent] + 1)
        return max(depths)


def _bytes(values: Sequence[int]) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()
