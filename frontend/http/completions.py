"""POST /v1/completions."""

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...engine_core.refusal import RefusedError
from ..expand import GenerateItem
from ..service import AsyncService, Delta
from .answers import Usage, UsageCounter, collect, matched_stop, raise_if_failed
from .body import json_response, read_json
from .errors import HttpError
from .logprobs import CompletionLogprobs, completion_logprobs
from .models import check_model
from .sampling import OpenAIRequest, openai_error, openai_params, request_ids
from .state import ServerState
from .streams import event, stream_response, until_disconnect

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024


class CompletionRequest(OpenAIRequest, kw_only=True):
    """``prompt``: text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One completion, or what is new of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    matched_stop: int | str | None


class Completion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An answer, or one chunk of a streamed one. ``simulated``: its accept lengths were forced."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    simulated: bool = False


async def completions(request: Request) -> Response:
    """Complete one prompt or a batch, streamed or not."""
    state: ServerState = request.app.state.server
    service = state.require()
    body = await read_json(request, CompletionRequest, state.max_body_bytes)
    check_model(body.model, state)
    items = _items(body, state)
    job = _Job(body, items, service, state.model_name)
    if body.stream:
        return await stream_response(request, job.events())
    return json_response(await until_disconnect(request.receive, job.whole()))


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of a request: one text, one list of ids, or a list of either kind."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise HttpError(400, "prompt: is empty; send text or token ids", param="prompt")
    if all(isinstance(part, int) for part in prompt):
        return [[part for part in prompt if isinstance(part, int)]]
    parts: list[str | list[int]] = [p for p in prompt if not isinstance(p, int)]
    if len(parts) < len(prompt) or len({type(part) for part in parts}) > 1:
        raise HttpError(
            400, "prompt: mixes texts, ids and lists of ids; send one kind", param="prompt"
        )
    if len(parts) > MAX_PROMPTS:
        raise HttpError(400, f"prompt: at most {MAX_PROMPTS} in one request", param="prompt")
    return parts


def refuse_stream_options(body: OpenAIRequest) -> None:
    """Refuse stream options on a request that does not stream."""
    if body.stream_options is not None and not body.stream:
        raise HttpError(
            400, "stream_options: needs stream true; leave it out", param="stream_options"
        )


def _items(body: CompletionRequest, state: ServerState) -> list[GenerateItem]:
    if body.echo:
        raise HttpError(
            501, "echo: is not supported yet; prepend the prompt on the client", param="echo"
        )
    if body.max_tokens is not None and body.max_tokens < 1:
        raise HttpError(
            400, f"max_tokens: must be 1 or more, got {body.max_tokens}", param="max_tokens"
        )
    refuse_stream_options(body)
    params = openai_params(
        body,
        max_new_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        defaults=state.sampling_defaults,
    )
    prompts = split_prompts(body.prompt)
    rids = request_ids(body.rid, len(prompts), "cmpl-")
    return [
        GenerateItem(
            prompt=prompt,
            params=params,
            rid=rid,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            speculative=body.speculative is not False,
        )
        for prompt, rid in zip(prompts, rids, strict=True)
    ]


class _Job:
    """One accepted request on its way to an answer."""

    def __init__(
        self, body: CompletionRequest, items: list[GenerateItem], service: AsyncService, model: str
    ) -> None:
        self._service = service
        self._items = items
        self._model = model
        self._id = items[0].rid or ""
        self._created = int(time.time())
        n = items[0].params.n
        self._count = len(items) * n
        self._logprobs = body.logprobs is not None
        self._usage = UsageCounter(len(items), n)
        options = body.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        self._offsets = [0] * self._count
        self._every = self._logprobs or not service.tokenizer.has_text

    async def whole(self) -> Completion:
        """The answer that is not streamed."""
        deltas = [delta async for delta in self._deltas(stream=False)]
        choices = [
            self._choice(sequence.last, sequence.joined(), sequence.deltas)
            for sequence in collect(deltas, self._count)
        ]
        return self._answer(choices, self._usage.total())

    async def events(self) -> AsyncGenerator[bytes]:
        """The chunks of a streamed answer."""
        async with contextlib.aclosing(self._deltas(stream=True)) as deltas:
            async for delta in deltas:
                if delta.text or delta.finish is not None or self._every:
                    choice = self._choice(delta, delta.text, [delta])
                    yield event(self._answer([choice], self._chunk_usage()))
        if self._include_usage:
            yield event(self._answer([], self._usage.total()))

    async def _deltas(self, stream: bool) -> AsyncGenerator[Delta]:
        many = self._service.generate_many(self._items, stream=stream)
        try:
            async with contextlib.aclosing(many) as deltas:
                async for delta in deltas:
                    raise_if_failed(delta)
                    self._usage.add(delta)
                    yield delta
        except RefusedError as error:
            raise openai_error(error) from None

    def _chunk_usage(self) -> Usage | msgspec.UnsetType | None:
        if self._continuous:
            return self._usage.total()
        return None if self._include_usage else msgspec.UNSET

    def _choice(self, last: Delta, text: str, deltas: list[Delta]) -> CompletionChoice:
        logprobs = None
        if self._logprobs:
            entries = [entry for delta in deltas for entry in delta.logprobs]
            offset = self._offsets[last.index]
            logprobs = completion_logprobs(entries, self._service.tokenizer, offset)
            self._offsets[last.index] += sum(map(len, logprobs.tokens))
        return CompletionChoice(
            index=last.index,
            text=text,
            logprobs=logprobs,
            finish_reason=last.finish.kind if last.finish is not None else None,
            matched_stop=matched_stop(last.finish),
        )

    def _answer(
        self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None
    ) -> Completion:
        return Completion(
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            simulated=self._service.info.simulated,
        )
