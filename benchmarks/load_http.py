"""Load and faults: many HTTP requests, random aborts and disconnects, memory and pages watched.

Starts ``outrider serve``, records the right answers one at a time, then sends the same requests
at the given concurrency while a seeded share of them is aborted or cut off. Every request that
was left alone must be answered exactly as before; afterwards the free pages (after a cache flush)
equal the initial count. A second phase sends more requests and watches resident memory.

    python benchmarks/load_http.py --json benchmarks/results/load-cpu.json
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ROOT / "benchmarks" / "prompts" / "pycoder_prompts.jsonl"


class Job(NamedTuple):
    """One request and its right answer."""

    prompt: str
    max_tokens: int
    ids: list[int]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serve(
    *flags: str, modules: Path | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run ``outrider serve`` on the embedded model until the block ends; yields its base URL.

    ``modules``: a folder that it can import from.
    """
    env = dict(os.environ)
    if modules is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(modules), env.get("PYTHONPATH"))))
    port = free_port()
    command = [sys.executable, "-m", "outrider", "serve", "--model", "pycoder"]
    process = subprocess.Popen([*command, "--port", str(port), *flags], env=env)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not become ready")
            time.sleep(0.1)
        yield url, process
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()


def resident_bytes(process: subprocess.Popen[bytes]) -> int:
    """Resident memory of the server and its children."""
    parent = psutil.Process(process.pid)
    return sum(p.memory_info().rss for p in [parent, *parent.children(recursive=True)])


async def generate(client: httpx.AsyncClient, prompt: str, max_tokens: int, rid: str) -> list[int]:
    """One greedy request through /generate; the output ids."""
    body = {
        "text": prompt,
        "rid": rid,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True},
    }
    answer = await client.post("/generate", json=body)
    answer.raise_for_status()
    ids: list[int] = answer.json()["output_ids"]
    return ids


async def stream_and_leave(client: httpx.AsyncClient, job: Job, rid: str, events: int) -> None:
    """Read a few chunks of a stream, then drop the connection."""
    body = {
        "text": job.prompt,
        "rid": rid,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True},
    }
    async with client.stream("POST", "/generate", json=body) as answer:
        async for _ in answer.aiter_lines():
            events -= 1
            if events <= 0:
                return


async def aborted(client: httpx.AsyncClient, job: Job, rid: str, delay: float) -> None:
    """Abort a request through the API while it runs; it must still be answered."""
    task = asyncio.create_task(
        client.post(
            "/generate",
            json={
                "text": job.prompt,
                "rid": rid,
                "sampling_params": {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True},
            },
        )
    )
    await asyncio.sleep(delay)
    await client.post("/abort_request", json={"rid": rid})
    await asyncio.wait_for(task, 60)


async def storm(
    client: httpx.AsyncClient,
    jobs: list[Job],
    count: int,
    concurrency: int,
    seed: int,
    faults: float,
) -> dict[str, int]:
    """Send ``count`` requests; returns how many were right, wrong, aborted and cut off."""
    rng = random.Random(seed)
    gate = asyncio.Semaphore(concurrency)
    tally = {"right": 0, "wrong": 0, "aborted": 0, "disconnected": 0}
    plan = [(rng.choice(jobs), rng.random(), rng.random()) for _ in range(count)]

    async def one(index: int) -> None:
        job, kind, detail = plan[index]
        rid = f"load-{seed}-{index}"
        async with gate:
            if kind < faults / 2:
                await aborted(client, job, rid, detail * 0.5)
                tally["aborted"] += 1
            elif kind < faults:
                await stream_and_leave(client, job, rid, 1 + int(detail * 8))
                tally["disconnected"] += 1
            else:
                ids = await generate(client, job.prompt, job.max_tokens, rid)
                tally["right" if ids == job.ids else "wrong"] += 1

    await asyncio.gather(*(one(i) for i in range(count)))
    return tally


async def pages(client: httpx.AsyncClient) -> tuple[int, int]:
    """Free and total KV pages once the engine is idle and its cache flushed."""
    for _ in range(100):
        answer = await client.post("/flush_cache")
        if answer.status_code == 200:
            break
        await asyncio.sleep(0.1)
    state = (await client.get("/server_info")).json()["internal_states"][0]
    return int(state["free_pages"]), int(state["total_pages"])


async def run(
    url: str, process: subprocess.Popen[bytes], args: argparse.Namespace
) -> dict[str, object]:
    """Both phases; the report."""
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    rng = random.Random(0)
    limits = httpx.Limits(max_connections=args.concurrency * 2)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        initial = await pages(client)
        jobs = []
        for i, row in enumerate(rows[:: len(rows) // args.jobs][: args.jobs]):
            text, tokens = row["prompt"][-600:], rng.randint(8, 32)
            jobs.append(Job(text, tokens, await generate(client, text, tokens, f"reference-{i}")))
        start = time.perf_counter()
        first = await storm(client, jobs, args.requests, args.concurrency, 1, args.faults)
        seconds = time.perf_counter() - start
        after_storm = await pages(client)
        warm = await storm(client, jobs, args.memory_requests // 4, args.concurrency, 2, 0.1)
        before = resident_bytes(process)
        soak = await storm(client, jobs, args.memory_requests, args.concurrency, 3, 0.1)
        after = resident_bytes(process)
        final = await pages(client)
    return {
        "command": "python benchmarks/load_http.py " + " ".join(sys.argv[1:]),
        "storm": {"requests": args.requests, "concurrency": args.concurrency, **first},
        "storm_seconds": round(seconds, 1),
        "pages": {"initial": initial, "after_storm": after_storm, "after_soak": final},
        "warm_up": warm,
        "soak": {"requests": args.memory_requests, **soak},
        "resident_mb": {"before": before / 2**20, "after": after / 2**20},
        "ok": first["wrong"] + soak["wrong"] + warm["wrong"] == 0
        and initial == after_storm == final
        and after - before < 16 * 2**20,
    }


def main() -> int:
    """Run it; exit status 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--memory-requests", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--faults", type=float, default=0.3)
    args = parser.parse_args()
    # A small pool: KV pages are resident only once used, and would count as growth until then.
    flags = ("--speculative-algorithm", "NGRAM", "--max-running-requests", "64")
    with serve(*flags, "--max-total-tokens", "16384") as (url, process):
        report = asyncio.run(run(url, process, args))
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
