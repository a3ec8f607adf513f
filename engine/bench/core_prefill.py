"""Prefill through the real core: whole prompts in the engine's own chunks, one token each."""

import gc
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...engine_core.messages import GenerateRequest
from ...engine_core.model_config import ModelConfig
from ...engine_core.sampling_params import SamplingParams
from ...engine_core.step_bench import PrefillRow, StepBenchSpec
from ...engine_core.step_floor import Rates, prefill_operations
from ..build import Engine
from ..worker import GraphWorker

_TURNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTiming:
    """``walls`` float64[turns]: seconds until every prompt has its token; the others are a turn's
    means. ``replays``: steps that replayed a CUDA graph, None for a worker without any."""

    walls: npt.NDArray[np.float64]
    device_s: float
    steps: float
    replays: float | None


class CorePrefill:
    """Times the prefill of batches on an engine, which is idle between them."""

    def __init__(self, engine: Engine, spec: StepBenchSpec) -> None:
        self._core = engine.core
        self._worker = engine.worker
        self._vocab_size = engine.info.vocab_size
        self._rng = np.random.default_rng(spec.seed)

    def measure(self, prompts: int, length: int) -> PrefillTiming:
        """Prefill ``prompts`` of ``length`` random tokens, first untimed: kernels are compiled.

        Raises RuntimeError if a prompt is refused, ends early or finds a prefix in the cache.
        """
        self._turn(prompts, length)
        gc.collect()
        gc.freeze()  # as a core process does once it is up
        graphs = self._worker if isinstance(self._worker, GraphWorker) else None
        replays = 0 if graphs is None else graphs.counts.prefill_replays
        before = self._core.stats(0)
        walls = np.array([self._turn(prompts, length) for _ in range(_TURNS)])
        after = self._core.stats(0)
        if after.cached_tokens != before.cached_tokens:
            raise RuntimeError("prompts that are to be timed were found in the cache")
        return PrefillTiming(
            walls=walls,
            device_s=(after.worker_busy - before.worker_busy) / _TURNS,
            steps=(after.steps - before.steps) / _TURNS,
            replays=(
                None if graphs is None else (graphs.counts.prefill_replays - replays) / _TURNS
            ),
        )

    def _turn(self, prompts: int, length: int) -> float:
        core = self._core
        params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        tokens = self._rng.integers(0, self._vocab_size, (prompts, length), dtype=np.int32)
        for i, prompt in enumerate(tokens):
            refused = core.submit(GenerateRequest(f"prefill-{i}", prompt.tobytes(), params))
            if refused is not None:
                raise RuntimeError(f"a prompt was refused: {refused.field}: {refused.reason}")
        left, ended = prompts, 0.0
        began = time.perf_counter()
        while core.has_work:
            finishes = [o.finish for o in core.step() if o.finish is not None]
            if finishes:
                ended = time.perf_counter()
                left -= sum(finish.kind == "length" for finish in finishes)
        refused = core.flush_cache()
        if left or refused is not None:
            raise RuntimeError(f"{left} of {prompts} prompts did not get their token")
        return ended - began


def prefill_row(
    model: ModelConfig,
    rates: Rates,
    prompts: int,
    length: int,
    chunk_tokens: int,
    timing: PrefillTiming,
) -> PrefillRow:
    """The report's row."""
    work = prefill_operations(model, prompts, length)
    wall = float(np.median(timing.walls))
    return PrefillRow(
        batch_size=prompts,
        prompt_tokens=length,
        chunk_tokens=chunk_tokens,
        steps=timing.steps,
        graph_replays=timing.replays,
        wall_ms=wall * 1e3,
        device_ms=timing.device_s * 1e3,
        tokens_per_s=prompts * length / wall,
        linear_operations=work.linear,
        attention_operations=work.attention,
        tflop_per_s=work.total / wall * 1e-12,
        matmul_share=work.total / wall / rates.matmul,
        device_matmul_share=work.total / timing.device_s / rates.matmul,
    )
