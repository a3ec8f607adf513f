"""Offline benchmark: the same prompts with and without speculation, in turns.

Two cores exist, one a side, and only one works at a time. Before every round the caches are
emptied: neither a prefix nor an n-gram of an earlier round helps a later one. What a drafter
learns from earlier prompts of the same round does count; that is how it is used.

A round of each side comes first and is not counted. On a GPU it compiles the kernels of steps with
prefill rows, of which there is a variant for every range of sizes: decode-only steps are captured
at the start, these are not.
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence

import msgspec

from ...engine_core.config import EngineConfig
from ...engine_core.draft_config import SpecShape
from ...engine_core.messages import CoreStats
from ...engine_core.sampling_params import SamplingParams
from ..engine_handle import EngineHandle, start_engine
from ..expand import GenerateItem
from ..llm import flush_cache, raise_failed
from .measure import CoreCost, Speculation, Spread, Timing, core_cost, speculation, spread
from .prompts import BenchPrompt


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over the prompts. ``outputs``: token ids of every prompt, in order."""

    seconds: float
    output_tokens: int
    timings: list[Timing]
    before: CoreStats
    after: CoreStats
    outputs: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the time of the whole pass."""
        return self.output_tokens / self.seconds


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one side over all rounds; ``output_tokens_per_s`` is the rounds' median.

    ``draft_shape``: how much a draft model drafted a round, by flag or by its own config.json.
    """

    drafter: str | None
    draft_shape: SpecShape | None
    num_threads: int
    output_tokens_per_s: float
    output_tokens_per_s_rounds: list[float]
    decode_tokens_per_s: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: Spread | None
    inter_token_ms: Spread | None
    core: CoreCost
    speculation: Speculation


class OfflineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything ``outrider bench offline`` writes. ``speedup``: median over the rounds of
    speculative over baseline tokens/s of the same round. ``differing_outputs``: prompts whose
    greedy tokens differ between the sides (None when sampling). ``simulated``: the accept lengths
    of the speculative side were forced, so its times mean something and its outputs do not.
    """

    simulated: bool
    model: str
    prompts: str
    kind: str | None
    num_prompts: int
    batch_size: int
    repeat: int
    temperature: float
    speedup: float | None
    speedup_rounds: list[float]
    accept_length: float | None
    accept_rate: float | None
    differing_outputs: int | None
    baseline: Side
    speculative: Side | None
    config: dict[str, object]


async def bench_offline(
    config: EngineConfig,
    prompts: Sequence[BenchPrompt],
    *,
    source: str,
    kind: str | None,
    batch_size: int,
    repeat: int,
    temperature: float,
    say: Callable[[str], object],
) -> OfflineReport:
    """Measure ``prompts`` with ``config`` and without speculation, ``repeat`` rounds each.

    The baseline's requests are decoded without any drafts, those that grammars force among them.
    Without an algorithm in ``config`` there is no other side, unless prompts have grammars: then it
    is the same engine with what these force. Raises what starting an engine raises, RefusedError
    for a prompt that does not fit, EngineDead.
    """
    plain = config.without_speculation()
    async with contextlib.AsyncExitStack() as stack:
        baseline = await start_engine(plain)
        stack.push_async_callback(baseline.stop)
        engines = {"baseline": baseline}
        forces = any(prompt.grammar is not None for prompt in prompts)
        if config.speculative_algorithm is not None or forces:
            # Both sides run with the threads that the first one found best.
            threads = config.num_threads or baseline.service.info.num_threads
            same = msgspec.structs.replace(config, num_threads=threads)
            engines["speculative"] = await start_engine(same)
            stack.push_async_callback(engines["speculative"].stop)
        for name, engine in engines.items():
            done = await _round(engine, prompts, batch_size, temperature, name != "baseline")
            say(f"round 0, not counted, {name}: {done.tokens_per_s:.1f} tokens/s")
        rounds: dict[str, list[Round]] = {name: [] for name in engines}
        for number in range(repeat):
            order = list(engines) if number % 2 == 0 else list(reversed(engines))
            for name in order:
                await flush_cache(engines[name].service)
                drafts = name != "baseline"
                done = await _round(engines[name], prompts, batch_size, temperature, drafts)
                rounds[name].append(done)
                say(f"round {number + 1}/{repeat} {name}: {done.tokens_per_s:.1f} tokens/s")
        sides = {name: _side(engine, rounds[name]) for name, engine in engines.items()}
    spec = sides.get("speculative")
    ratios = [
        s.tokens_per_s / b.tokens_per_s
        for b, s in zip(rounds["baseline"], rounds.get("speculative", []), strict=False)
    ]
    return OfflineReport(
        simulated=config.simulated,
        model=config.model,
        prompts=source,
        kind=kind,
        num_prompts=len(prompts),
        batch_size=batch_size,
        repeat=repeat,
        temperature=temperature,
        speedup=statistics.median(ratios) if ratios else None,
        speedup_rounds=ratios,
        accept_length=None if spec is None else spec.speculation.accept_length,
        accept_rate=None if spec is None else spec.speculation.accept_rate,
        differing_outputs=_differing(rounds) if temperature == 0 else None,
        baseline=sides["baseline"],
        speculative=spec,
        config=msgspec.structs.asdict(config),
    )


def _differing(rounds: dict[str, list[Round]]) -> int | None:
    if "speculative" not in rounds:
        return None
    pairs = zip(rounds["baseline"][0].outputs, rounds["speculative"][0].outputs, strict=True)
    return sum(plain != spec for plain, spec in pairs)


async def _round(
    engine: EngineHandle,
    prompts: Sequence[BenchPrompt],
    batch_size: int,
    temperature: float,
    drafts: bool,
) -> Round:
    """Run all prompts, ``batch_size`` of them at a time, with or without ``drafts``."""
    service = engine.service
    items = [
        GenerateItem(
            prompt=await service.tokens_of(prompt.prompt),
            params=SamplingParams(
                max_new_tokens=prompt.max_tokens,
                temperature=temperature,
                seed=number,
                grammar=prompt.grammar,
            ),
            speculative=drafts,
        )
        for number, prompt in enumerate(prompts)
    ]
    timings = [Timing(sent=0.0) for _ in items]
    outputs: list[list[int]] = [[] for _ in items]
    waiting = iter(range(len(items)))

    async def one_after_another() -> None:
        for number in waiting:
            timing = timings[number]
            timing.sent = time.perf_counter()
            async for delta in service.generate_many([items[number]]):
                raise_failed(delta)
                timing.chunk(time.perf_counter(), len(delta.tokens))
                timing.prompt_tokens = delta.meta_info.prompt_tokens
                outputs[number] += delta.tokens

    before = await service.core.stats()
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(batch_size, len(items))):
            group.create_task(one_after_another())
    seconds = time.perf_counter() - started
    return Round(
        seconds=seconds,
        output_tokens=sum(t.tokens for t in timings),
        timings=timings,
        before=before,
        after=await service.core.stats(),
        outputs=outputs,
    )


def _side(engine: EngineHandle, rounds: list[Round]) -> Side:
    timings = [t for r in rounds for t in r.timings]
    first = [t.first - t.sent for t in timings if t.first is not None]
    gaps = [gap for t in timings for gap in t.gaps]
    rates = [r.tokens_per_s for r in rounds]
    info = engine.service.info
    totals = _joined(rounds)
    return Side(
        drafter=info.drafter,
        draft_shape=info.draft_shape,
        num_threads=info.num_threads,
        output_tokens_per_s=statistics.median(rates),
        output_tokens_per_s_rounds=rates,
        decode_tokens_per_s=len(gaps) / max(sum(gaps), 1e-9),
        output_tokens=rounds[0].output_tokens,
        prompt_tokens=sum(t.prompt_tokens for t in rounds[0].timings),
        cached_tokens=rounds[0].after.cached_tokens - rounds[0].before.cached_tokens,
        ttft_ms=spread(first),
        inter_token_ms=spread(gaps),
        core=core_cost(*totals),
        speculation=speculation(*totals),
    )


def _joined(rounds: list[Round]) -> tuple[CoreStats, CoreStats]:
    """The counters around all rounds: nothing else ran between them but a cache flush."""
    return rounds[0].before, rounds[-1].after
