"""Requests for engines of several ranks, and what their tokens are held against."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import exactness
import torch

from outrider.engine.build import build_engine
from outrider.engine.parallel.worker import ParallelWorker
from outrider.engine.worker import EngineWorker
from outrider.engine_core.assembly import assemble
from outrider.engine_core.config import EngineConfig, resolve_config
from outrider.engine_core.core import EngineCore
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.refusal import Refused
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.step_times import measure_times

from ..cores import drive, request, tokens_of

VOCAB = 40
PROMPTS = [([1, 5, 9, 2, 30] * 4)[: 9 + 3 * n] for n in range(4)]
Tokens = dict[str, list[int]]


def requests(max_new_tokens: int = 30, logprobs: int | None = 1) -> list[GenerateRequest]:
    """Greedy ones, and two that sample with penalties and log-probabilities."""
    greedy = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, ignore_eos=True)
    drawn = SamplingParams(
        temperature=0.8, seed=5, max_new_tokens=max_new_tokens, ignore_eos=True,
        frequency_penalty=0.3, logprobs=logprobs,
    )  # fmt: skip
    return [
        request(f"r{number}", prompt, greedy if number % 2 == 0 else drawn)
        for number, prompt in enumerate(PROMPTS)
    ]


def run(core: EngineCore) -> Tokens:
    return {rid: tokens_of(some) for rid, some in drive(core, requests()).items()}


def core_on(worker: EngineWorker, config: EngineConfig) -> EngineCore:
    """A new core over a worker that is idle."""
    worker.reset()
    resolved = resolve_config(config, worker.info())
    assert not isinstance(resolved, Refused)
    worker.prepare(resolved)
    times = None if resolved.drafter is None else measure_times(worker, 32)
    return assemble(resolved, worker, times, None, None).core


def float64_gap(folder: Path) -> exactness.GapOf:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)

    def gap(prefix: Sequence[int], a: int, b: int) -> float:
        with torch.inference_mode():
            logits = model(torch.tensor([list(prefix)])).logits[0, -1]
        return float(logits[a] - logits[b])

    return gap


def assert_same(folder: Path, expected: Tokens, got: Tokens) -> None:
    """Equal but for ties of greedy tokens (float64 gap below 1e-4), of which there are few."""
    assert {rid: len(tokens) for rid, tokens in got.items()} == dict.fromkeys(expected, 30)
    if got == expected:
        return
    prompts = [exactness.Prompt(f"r{n}", prompt, 30) for n, prompt in enumerate(PROMPTS)]
    found = exactness.divergences(prompts, expected, got, float64_gap(folder))
    assert not [d for d in found if not d.tie], found
    assert len(found) <= 1


def step_for_ever(core: EngineCore) -> None:
    while True:
        core.step()


@contextmanager
def doomed_engine(config: EngineConfig) -> Iterator[tuple[EngineCore, EngineWorker, int]]:
    """An engine whose rank 1, of that process id, is about to end; its shutdown is short."""
    engine = build_engine(config)
    worker = engine.worker
    assert isinstance(worker, ParallelWorker)
    try:
        yield engine.core, worker, worker._ranks.pids[0]
    finally:
        began = time.monotonic()
        engine.shutdown()
        assert time.monotonic() - began < 5.0
