"""Running a batch file: a bounded window of requests in flight, one output line an input line."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec

from ..engine_core.refusal import RefusedError
from ..engine_core.sampling_params import SamplingParams
from .batch_input import BadItem, Item, OpenAIItem, PromptItem, read_items
from .batch_output import OutputFile
from .engine_handle import EngineHandle
from .errors import EngineDead
from .expand import GenerateItem
from .http import ServerState, create_app
from .results import Collector, Completion, plain_logprobs
from .sampling_defaults import load_sampling_defaults


class BatchSummary(msgspec.Struct, kw_only=True):
    """What a batch run did. ``skipped``: lines that an earlier run had finished; ``simulated``:
    accept lengths were forced, texts mean nothing.

    ``spec_accept_length``: tokens of verify steps over verify steps, pooled over this run; None
    when nothing was verified. Times are seconds.
    """

    model: str
    input: str
    output: str
    simulated: bool = False
    lines: int = 0
    completed: int = 0
    errors: int = 0
    skipped: int = 0
    repaired_bytes: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    elapsed_s: float = 0.0
    output_tokens_per_s: float = 0.0
    spec_accept_length: float | None = None
    spec_accept_rate: float | None = None


class BatchRun:
    """One run over one engine; ``progress`` is called with every line that is settled."""

    def __init__(
        self,
        engine: EngineHandle,
        output: OutputFile,
        summary: BatchSummary,
        progress: Callable[[], object],
    ) -> None:
        self._engine = engine
        self._service = engine.service
        self._output = output
        self._summary = summary
        self._progress = progress
        self._dead: EngineDead | None = None
        state = ServerState(
            engine.config.served_model_name or engine.config.model,
            sampling_defaults=load_sampling_defaults(engine.service.tokenizer.folder),
        )
        # OpenAI lines go through the server's own application, so they mean exactly the same.
        self._http = httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(engine.service, state)),
            base_url="http://batch",
            timeout=None,
        )

    async def run(self, path: Path, base: SamplingParams) -> BatchSummary:
        """Run what the output does not hold yet. Raises EngineDead when the core ends; every
        line that is written then is whole, and the same command goes on from there.
        """
        started = time.monotonic()
        before = await self._service.core.stats()
        window = self._window()
        pending: set[asyncio.Task[None]] = set()
        try:
            for item in self._unfinished(path, base):
                if isinstance(item, BadItem):
                    self._write_bad(item)
                    continue
                pending.add(asyncio.create_task(self._settle(item)))
                while len(pending) >= window:
                    pending = await self._some_done(pending)
            while pending:
                pending = await self._some_done(pending)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            await self._http.aclose()
        after = await self._service.core.stats()
        summary = self._summary
        summary.elapsed_s = time.monotonic() - started
        summary.prompt_tokens = after.prompt_tokens - before.prompt_tokens
        summary.completion_tokens = after.generated_tokens - before.generated_tokens
        summary.output_tokens_per_s = summary.completion_tokens / max(summary.elapsed_s, 1e-9)
        if after.spec_drafts > before.spec_drafts:
            drafts = after.spec_drafts - before.spec_drafts
            summary.spec_accept_length = (
                after.spec_verify_tokens - before.spec_verify_tokens
            ) / drafts
            proposed = after.spec_draft_tokens - before.spec_draft_tokens
            accepted = after.spec_accepted_tokens - before.spec_accepted_tokens
            summary.spec_accept_rate = accepted / max(proposed, 1)
        return summary

    def _unfinished(self, path: Path, base: SamplingParams) -> Iterator[Item]:
        """Items that the output lacks; the second line of an id becomes a bad one."""
        finished, seen = self._output.finished, set[int | str]()
        for item in read_items(path, base):
            self._summary.lines += 1
            if item.id not in seen:
                seen.add(item.id)
            elif not isinstance(item, BadItem):
                reason = f"id: {item.id!r} is used by an earlier line"
                item = BadItem(item.line, item.id, reason, isinstance(item, OpenAIItem))
            done = (
                finished.has_line(item.line)
                if isinstance(item, BadItem)
                else finished.has_id(item.id)
            )
            if done:
                self._summary.skipped += 1
                self._progress()
            else:
                yield item

    def _window(self) -> int:
        """Requests in flight: as many wait as run, unless the queue is shorter."""
        running = self._service.info.max_running_requests
        limit = self._engine.config.max_queued_requests
        return running + (running if limit is None else min(running, limit))

    async def _some_done(self, pending: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        done, rest = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # a bug, or EngineDead
        return rest

    async def _settle(self, item: PromptItem | OpenAIItem) -> None:
        if isinstance(item, OpenAIItem):
            record, failed = await self._openai(item)
        else:
            record, failed = await self._prompt(item)
        if self._service.core.dead.is_set() and failed:
            raise EngineDead(self._service.core.dead_reason)
        self._write(record, failed)

    async def _prompt(self, item: PromptItem) -> tuple[dict[str, object], bool]:
        collectors = [Collector(sample) for sample in range(max(item.params.n, 1))]
        request = GenerateItem(
            prompt=item.prompt if isinstance(item.prompt, str) else list(item.prompt),
            params=item.params,
            priority=item.priority,
            cache_salt=item.cache_salt,
            speculative=item.speculative,
        )
        try:
            deltas = self._service.generate_many([request], stream=False)
            async with contextlib.aclosing(deltas):
                async for delta in deltas:
                    if delta.finish is not None and delta.finish.status != 200:
                        return {"id": item.id, "error": delta.finish.message or "failed"}, True
                    collectors[delta.index].add(
                        delta.text,
                        delta.tokens,
                        delta.logprobs,
                        delta.finish,
                        delta.meta_info,
                        delta.prompt_logprobs,
                    )
        except RefusedError as error:
            return {"id": item.id, "error": str(error)}, True
        outputs = [collector.completion() for collector in collectors]
        if len(outputs) == 1:
            return {"id": item.id, **_fields(outputs[0])}, False
        choices = [{"index": output.index, **_fields(output)} for output in outputs]
        return {"id": item.id, "choices": choices}, False

    async def _openai(self, item: OpenAIItem) -> tuple[dict[str, object], bool]:
        headers = {"content-type": "application/json"}
        response = await self._http.post(item.url, content=item.body, headers=headers)
        body = msgspec.Raw(response.content)
        answer = {
            "status_code": response.status_code,
            "request_id": response.headers.get("x-request-id", f"req_{uuid.uuid4().hex}"),
            "body": body,
        }
        record: dict[str, object] = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": item.id,
            "response": answer,
            "error": None,
        }
        return record, response.status_code != 200

    def _write_bad(self, item: BadItem) -> None:
        record: dict[str, object]
        if item.openai:
            record = {
                "id": f"batch_req_{uuid.uuid4().hex}",
                "custom_id": str(item.id),
                "response": None,
                "error": {"code": "invalid_request", "message": item.error},
                "line": item.line,
            }
        else:
            record = {"id": item.id, "error": item.error, "line": item.line}
        self._write(record, True)

    def _write(self, record: dict[str, object], failed: bool) -> None:
        self._output.write(msgspec.json.encode(record))
        if failed:
            self._summary.errors += 1
        else:
            self._summary.completed += 1
        self._progress()


def _fields(output: Completion) -> dict[str, object]:
    fields: dict[str, object] = {
        "text": output.text,
        "output_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "meta_info": output.meta_info,
    }
    if output.logprobs:
        fields["logprobs"] = plain_logprobs(output.logprobs)
    if output.prompt_logprobs:
        fields["prompt_logprobs"] = plain_logprobs(output.prompt_logprobs)
    return fields
