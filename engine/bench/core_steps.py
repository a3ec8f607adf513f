"""Decode steps through the real core: plan, launch, collect, commit."""

import gc
import time

import numpy as np

from ...engine_core.core import EngineCore
from ...engine_core.messages import GenerateRequest
from ...engine_core.sampling_params import SamplingParams
from ...engine_core.step_bench import StepBenchSpec
from ..build import Engine
from ..worker import GraphWorker, counts_between
from .sizes import WARM_UP_STEPS, entry_steps, new_tokens
from .timing import Case, Timing


class CoreSteps:
    """Times batches on an engine, one after the other; the engine is idle between them."""

    def __init__(self, engine: Engine, spec: StepBenchSpec) -> None:
        self._core = engine.core
        self._worker = engine.worker
        self._spec = spec
        self._vocab_size = engine.info.vocab_size
        self._rng = np.random.default_rng(spec.seed)

    def measure(self, case: Case) -> Timing:
        """Enter the batch, wait until all of it decodes, time the steps, and end it.

        Raises RuntimeError if the batch does not come to decode whole.
        """
        # As a core process does once it is up; no step may be in flight meanwhile.
        gc.collect()
        gc.freeze()
        entered = self._core.stats(0)
        self._enter(case)
        try:
            for _ in range(WARM_UP_STEPS):
                self._core.step()
            return self._time(case, entered.generated_tokens)
        finally:
            self._end(case)

    def _time(self, case: Case, generated_before: int) -> Timing:
        core, worker, steps = self._core, self._worker, self._spec.steps
        graphs = worker if isinstance(worker, GraphWorker) else None
        before = core.stats(0)
        counts = None if graphs is None else graphs.counts
        stamps = np.empty(steps + 1)
        stamps[0] = time.perf_counter()
        for i in range(steps):
            core.step()
            stamps[i + 1] = time.perf_counter()
        after = core.stats(0)
        if len(core.scheduler.batch.decoding) != case.batch_size:
            raise RuntimeError("requests ended or were retracted while their steps were timed")
        generated = (before.generated_tokens + after.generated_tokens) / 2 - generated_before
        return Timing(
            walls=np.diff(stamps),
            device_s=after.worker_busy - before.worker_busy,
            # The last token generated is a step's first query token.
            length=case.context + generated / case.batch_size + case.draft_length,
            emitted=after.generated_tokens - before.generated_tokens,
            counts=None if counts is None or graphs is None else counts_between(counts, graphs),
            bare_s=(
                None
                if graphs is None or case.draft_length  # replays would run ahead of the pages
                else graphs.replay_seconds(case.batch_size, case.batch_size, steps)
            ),
            plan_s=(after.plan_cpu - before.plan_cpu) / steps,
            commit_s=(after.commit_cpu - before.commit_cpu) / steps,
        )

    def _enter(self, case: Case) -> None:
        core, rng = self._core, self._rng
        params = SamplingParams(
            max_new_tokens=new_tokens(self._spec, case.batch_size, case.context),
            temperature=0.0,
            ignore_eos=True,
        )
        for i in range(case.batch_size):
            prompt = rng.integers(0, self._vocab_size, case.context, dtype=np.int32)
            refused = core.submit(GenerateRequest(f"step-{i}", prompt.tobytes(), params))
            if refused is not None:
                raise RuntimeError(f"a request was refused: {refused.field}: {refused.reason}")
        for _ in range(2 * entry_steps(self._spec, case.batch_size, case.context)):
            if _all_decode(core, case.batch_size):
                return
            for output in core.step():
                if output.finish is not None:
                    raise RuntimeError(f"a request ended early: {output.finish}")
        raise RuntimeError(f"{case.batch_size} requests did not come to decode together")

    def _end(self, case: Case) -> None:
        core = self._core
        for i in range(case.batch_size):
            core.abort(f"step-{i}")
        while core.has_work:
            core.step()
        refused = core.flush_cache()
        if refused is not None:
            raise RuntimeError(f"the engine did not become idle: {refused.reason}")


def _all_decode(core: EngineCore, batch_size: int) -> bool:
    batch = core.scheduler.batch
    return len(batch.decoding) == batch_size and not batch.prefilling
