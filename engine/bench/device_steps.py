"""Decode and verify steps straight into a worker: plans made by hand, one launched ahead."""

import gc
import time
from collections.abc import Iterator

import numpy as np

from ...engine_core.ids import I32, RowKind, i32
from ...engine_core.plan import HostDrafts, SlotInit, StepPlan
from ...engine_core.sampling_params import SamplingParams
from ...engine_core.step_bench import StepBenchSpec
from ..worker import EngineWorker, GraphWorker, counts_between
from .sizes import WARM_UP_STEPS, verify_tokens
from .timing import Case, Timing

_NONE = b""


class DeviceSteps:
    """Times batches on an idle worker. Drafts are chains of random tokens, all uploaded in time.

    Request i has slot i and the pages from i * pages + 1 on.
    """

    def __init__(self, worker: EngineWorker, spec: StepBenchSpec) -> None:
        self._worker = worker
        self._spec = spec
        self._info = worker.info()
        self._rng = np.random.default_rng(spec.seed)
        self._step = 0
        self._width = 0  # what the worker's graphs are captured for; 0: not by us

    def measure(self, case: Case) -> Timing:
        """Prefill the batch, time its steps and forget it."""
        worker, steps = self._worker, self._spec.steps
        graphs = worker if isinstance(worker, GraphWorker) else None
        if graphs is not None and self._width != 1 + case.draft_length:
            self._width = 1 + case.draft_length
            graphs.set_verify_width(self._width)
        worker.reset()
        for plan in self._prompts(case):
            worker.launch(plan)
            worker.collect()
        total = WARM_UP_STEPS + steps
        # Made before: here the worker is measured, not the making of plans.
        plans = [self._decode(case) for _ in range(total + 1)]
        stamps, busy = np.empty(total), np.empty(total)
        emitted = np.empty(total, dtype=np.int64)
        counts = None
        gc.collect()
        gc.freeze()  # as a core process does once it is up
        self._launch(*plans[0])
        for i in range(total):
            if i == WARM_UP_STEPS and graphs is not None:
                counts = graphs.counts
            self._launch(*plans[i + 1])
            result = worker.collect()
            stamps[i] = time.perf_counter()
            busy[i] = result.busy_ns
            emitted[i] = i32(result.accept_lens).sum()
        timed = None if counts is None or graphs is None else counts_between(counts, graphs)
        worker.collect()
        rows, tokens = case.batch_size, case.batch_size * (1 + case.draft_length)
        # Before the timed steps, half of them, and a step's own query tokens.
        grown = emitted[:WARM_UP_STEPS].sum() + emitted[WARM_UP_STEPS:].sum() / 2
        return Timing(
            walls=np.diff(stamps[WARM_UP_STEPS - 1 :]),
            device_s=float(busy[WARM_UP_STEPS:].sum()) * 1e-9,
            length=case.context + float(grown) / rows + 1 + case.draft_length,
            emitted=int(emitted[WARM_UP_STEPS:].sum()),
            counts=timed,
            bare_s=None if graphs is None else graphs.replay_seconds(rows, tokens, steps),
        )

    def _launch(self, plan: StepPlan, drafts: HostDrafts | None) -> None:
        self._worker.launch(plan)
        if drafts is not None:
            self._worker.upload_drafts(drafts)

    def _tokens(self, count: int) -> I32:
        return self._rng.integers(0, self._info.vocab_size, count, dtype=np.int32)

    def _prompts(self, case: Case) -> Iterator[StepPlan]:
        chunk = self._spec.config.chunked_prefill_size
        chunk = case.context if chunk == -1 else chunk
        for slot in range(case.batch_size):
            prompt = self._tokens(case.context)
            for start in range(0, case.context, chunk):
                tokens = prompt[start : start + chunk]
                last = start + chunk >= case.context
                yield self._chunk(case, slot, prompt, start, tokens, last)

    def _chunk(
        self, case: Case, slot: int, prompt: I32, start: int, tokens: I32, last: bool
    ) -> StepPlan:
        inits: tuple[SlotInit, ...] = ()
        columns = np.empty(0, dtype=np.int32)
        if start == 0:
            params = SamplingParams(temperature=0.0, ignore_eos=True)
            inits = (SlotInit(slot, 1, params, 0, prompt.tobytes(), _NONE, 0, ()),)
            pages = -(-verify_tokens(self._spec, case.context) // self._info.page_size)
            columns = np.arange(pages, dtype=np.int32)
        return StepPlan(
            step=self._next_step(),
            late_bound=False,
            slots=_int32(slot),
            kinds=bytes([RowKind.PREFILL_LAST if last else RowKind.PREFILL]),
            q_caps=_int32(len(tokens)),
            starts=_int32(start),
            tokens=tokens.tobytes(),
            inits=inits,
            page_slots=np.full_like(columns, slot).tobytes(),
            page_indexes=columns.tobytes(),
            page_ids=(columns + 1 + slot * len(columns)).astype(np.int32).tobytes(),
        )

    def _decode(self, case: Case) -> tuple[StepPlan, HostDrafts | None]:
        rows, drafts = case.batch_size, case.draft_length
        plan = StepPlan(
            step=self._next_step(),
            late_bound=drafts > 0,
            slots=np.arange(rows, dtype=np.int32).tobytes(),
            kinds=bytes([RowKind.VERIFY] * rows),
            q_caps=np.full(rows, 1 + drafts, dtype=np.int32).tobytes(),
            starts=np.full(rows, -1, dtype=np.int32).tobytes(),
            tokens=_NONE,
            inits=(),
            page_slots=_NONE,
            page_indexes=_NONE,
            page_ids=_NONE,
        )
        if not drafts:
            return plan, None
        chain = np.arange(drafts, dtype=np.int32)
        return plan, HostDrafts(
            plan.step,
            np.full(rows, drafts, dtype=np.int32).tobytes(),
            self._tokens(rows * drafts).tobytes(),
            np.tile(chain, rows).tobytes(),
        )

    def _next_step(self) -> int:
        self._step += 1
        return self._step


def _int32(value: int) -> bytes:
    return np.array([value], dtype=np.int32).tobytes()
