"""Benchmark of servers: the customary table, acceptance, and the baseline beside it."""

import asyncio
import contextlib
import math
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx
import msgspec

from ...engine_core.config import EngineConfig
from ..errors import OutriderError
from .load import read_server, send_all
from .measure import CoreCost, Speculation, Spread, Timing, core_cost, speculation, spread
from .prompts import BenchPrompt

READY_TIMEOUT_S = 600.0


class ServingResult(msgspec.Struct, frozen=True, kw_only=True):
    """One server's numbers; latencies in milliseconds, throughput in tokens or requests a second.

    ``speculation`` and ``core`` are None for a server without ``/server_info`` counters.
    ``simulated``: the server says that its accept lengths are forced.
    """

    base_url: str
    simulated: bool
    completed: int
    failed: int
    first_error: str | None
    duration_s: float
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    input_throughput: float
    output_throughput: float
    total_throughput: float
    concurrency: float
    e2e_ms: Spread | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    speculation: Speculation | None
    core: CoreCost | None


class ServingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything ``outrider bench serve`` writes. ``speedup``: ratio of output throughput.

    ``baseline`` is None only with ``--no-baseline``. ``simulated``: of either server.
    """

    simulated: bool
    prompts: str
    kind: str | None
    num_prompts: int
    request_rate: float | None
    max_concurrency: int | None
    temperature: float
    speedup: float | None
    accept_length: float | None
    baseline: ServingResult | None
    measured: ServingResult


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent to each server."""

    prompts: tuple[BenchPrompt, ...]
    concurrency: int | None
    request_rate: float
    temperature: float
    ignore_eos: bool
    seed: int
    api_key: str | None


async def measure_server(base_url: str, load: Load) -> ServingResult:
    """Warm one server up with a request, then load it. Raises OutriderError if it is not up."""
    headers = {} if load.api_key is None else {"authorization": f"Bearer {load.api_key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=base_url, headers=headers, timeout=None, limits=limits
    ) as client:
        model = await _model(client, base_url)

        async def send(prompts: Sequence[BenchPrompt]) -> list[Timing]:
            return await send_all(
                client,
                model,
                prompts,
                concurrency=load.concurrency,
                request_rate=load.request_rate,
                temperature=load.temperature,
                ignore_eos=load.ignore_eos,
                seed=load.seed,
            )

        await send(load.prompts[:1])
        with contextlib.suppress(httpx.HTTPError):  # other servers may not have it
            await client.post("/flush_cache", params={"timeout": 10})
        before, _ = await read_server(client)
        started = time.perf_counter()
        timings = await send(load.prompts)
        seconds = time.perf_counter() - started
        after, simulated = await read_server(client)
    spec, core = None, None
    if before is not None and after is not None:
        spec, core = speculation(before, after), core_cost(before, after)
    return _result(base_url, simulated, timings, seconds, spec, core)


async def _model(client: httpx.AsyncClient, base_url: str) -> str:
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise OutriderError(f"no OpenAI-compatible server answers at {base_url}: {error}") from None


def _result(
    base_url: str,
    simulated: bool,
    timings: list[Timing],
    seconds: float,
    spec: Speculation | None,
    core: CoreCost | None,
) -> ServingResult:
    good = [t for t in timings if t.error is None and t.first is not None]
    failed = [t for t in timings if t.error is not None or t.first is None]
    latencies = [t.last - t.sent for t in good]
    inputs = sum(t.prompt_tokens for t in good)
    outputs = sum(t.tokens for t in good)
    tpot = [(t.last - (t.first or 0.0)) / (t.tokens - 1) for t in good if t.tokens > 1]
    return ServingResult(
        base_url=base_url,
        simulated=simulated,
        completed=len(good),
        failed=len(failed),
        first_error=(failed[0].error or "no token came") if failed else None,
        duration_s=seconds,
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        request_throughput=len(good) / seconds,
        input_throughput=inputs / seconds,
        output_throughput=outputs / seconds,
        total_throughput=(inputs + outputs) / seconds,
        concurrency=sum(latencies) / seconds,
        e2e_ms=spread(latencies),
        ttft_ms=spread([(t.first or 0.0) - t.sent for t in good]),
        tpot_ms=spread(tpot),
        itl_ms=spread([gap for t in good for gap in t.gaps]),
        speculation=spec,
        core=core,
    )


async def bench_serving(
    measured_url: str,
    baseline_url: str | None,
    load: Load,
    *,
    source: str,
    kind: str | None,
    say: Callable[[str], object],
) -> ServingReport:
    """Measure the baseline server, if there is one, and then the server in question."""
    baseline = None
    if baseline_url is not None:
        say(f"measuring the baseline at {baseline_url}")
        baseline = await measure_server(baseline_url, load)
    say(f"measuring {measured_url}")
    measured = await measure_server(measured_url, load)
    speedup = None
    if baseline is not None and baseline.output_throughput > 0:
        speedup = measured.output_throughput / baseline.output_throughput
    spec = measured.speculation
    return ServingReport(
        simulated=measured.simulated or (baseline is not None and baseline.simulated),
        prompts=source,
        kind=kind,
        num_prompts=len(load.prompts),
        request_rate=load.request_rate if math.isfinite(load.request_rate) else None,
        max_concurrency=load.concurrency,
        temperature=load.temperature,
        speedup=speedup,
        accept_length=None if spec is None else spec.accept_length,
        baseline=baseline,
        measured=measured,
    )


@contextlib.asynccontextmanager
async def served(config: EngineConfig) -> AsyncIterator[str]:
    """Run ``outrider serve`` with ``config`` in a process of its own; yields its base URL."""
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        port = _free_port()
        file = Path(folder) / "config.json"
        file.write_bytes(msgspec.json.encode(config))
        command = [sys.executable, "-P", "-m", "outrider", "serve", "--config", str(file)]
        child = subprocess.Popen([*command, "--port", str(port), "--log-level", "warning"])
        try:
            url = f"http://127.0.0.1:{port}"
            await _await_ready(child, url)
            yield url
        finally:
            child.terminate()
            try:
                await asyncio.to_thread(child.wait, 60.0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _await_ready(child: "subprocess.Popen[bytes]", url: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    async with httpx.AsyncClient(base_url=url, timeout=5.0) as client:
        while time.monotonic() < deadline:
            if child.poll() is not None:
                raise OutriderError(f"the server ended at start with status {child.returncode}")
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get("/health")).status_code == 200:
                    return
            await asyncio.sleep(0.1)
    raise OutriderError(f"the server at {url} was not ready within {READY_TIMEOUT_S:g} s")
