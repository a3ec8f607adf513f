"""Load on a server over HTTP: arrivals, concurrency, and what each request saw."""

import asyncio
import math
import random
import time
from collections.abc import Sequence

import httpx
import msgspec

from ...engine_core.messages import CoreStats
from .measure import Timing
from .prompts import BenchPrompt


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    text: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, object] | None = None


_chunk = msgspec.json.Decoder(_Chunk)


async def send_all(
    client: httpx.AsyncClient,
    model: str,
    prompts: Sequence[BenchPrompt],
    *,
    concurrency: int | None,
    request_rate: float,
    temperature: float,
    ignore_eos: bool,
    seed: int,
) -> list[Timing]:
    """Send every prompt to ``/v1/completions``, streaming.

    ``request_rate``: requests a second with Poisson gaps, inf: all at once. ``concurrency``: most
    requests in flight; a request's clock starts when it is sent, not while it waits for its turn.
    """
    gate = asyncio.Semaphore(concurrency or len(prompts))
    arrivals = random.Random(seed)

    async def one(prompt: BenchPrompt) -> Timing:
        async with gate:
            return await _send(client, model, prompt, temperature, ignore_eos)

    tasks: list[asyncio.Task[Timing]] = []
    for prompt in prompts:
        tasks.append(asyncio.create_task(one(prompt)))
        if math.isfinite(request_rate):
            await asyncio.sleep(arrivals.expovariate(request_rate))
    return list(await asyncio.gather(*tasks))


async def _send(
    client: httpx.AsyncClient, model: str, prompt: BenchPrompt, temperature: float, ignore_eos: bool
) -> Timing:
    body: dict[str, object] = {
        "model": model,
        "prompt": prompt.prompt,
        "max_tokens": prompt.max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if ignore_eos:
        body["ignore_eos"] = True
    if prompt.json_schema is not None:
        body["guided_json"] = prompt.json_schema
    timing = Timing(sent=time.perf_counter())
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                timing.error = f"HTTP {response.status_code}: {text[:200]}"
                return timing
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    _take(timing, line[5:].strip())
    except (httpx.HTTPError, msgspec.MsgspecError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    return timing


def _take(timing: Timing, data: str) -> None:
    if data == "[DONE]":
        return
    now = time.perf_counter()
    chunk = _chunk.decode(data)
    if chunk.error is not None:
        timing.error = str(chunk.error.get("message", "error"))
        return
    if chunk.usage is not None:
        timing.prompt_tokens = chunk.usage.prompt_tokens
        timing.chunk(now, chunk.usage.completion_tokens - timing.tokens)
    elif any(choice.text for choice in chunk.choices):
        timing.chunk(now, 1)  # a server that does not count: a chunk is taken for a token


async def read_server(client: httpx.AsyncClient) -> tuple[CoreStats | None, bool]:
    """What ``/server_info`` says: the core's counters, and whether accept lengths are forced.

    The counters are None when it is no outrider server.
    """
    try:
        response = await client.get("/server_info")
        info = msgspec.json.decode(response.content, type=dict[str, object])
        states = msgspec.convert(info.get("internal_states"), list[dict[str, object]])
        names = [f.name for f in msgspec.structs.fields(CoreStats) if f.name != "call"]
        values = [states[0][name] for name in names]
        stats = msgspec.convert([CoreStats.__struct_config__.tag, 0, *values], CoreStats)
        return stats, info.get("simulated") is True
    except (httpx.HTTPError, msgspec.MsgspecError, KeyError, IndexError):
        return None, False
