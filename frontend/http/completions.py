"""POST /v1/completions."""

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...engine_core.refusal import RefusedError
from ...engine_core.sampling_params import SamplingParams
from ..expand import GenerateItem
from ..service import AsyncService, Delta
from .answers import Usage, UsageCounter, best_samples, collect, matched_stop, raise_if_failed
from .body import json_response, read_json
from .errors import HttpError
from .logprobs import CompletionLogprobs, ScoredToken, TextOffsets, completion_logprobs
from .models import check_model
from .prompt_part import PromptLogprobs, ids_of, prompt_logprobs, scored_prompt, with_ids
from .sampling import OpenAIRequest, openai_error, openai_params, request_ids
from .state import ServerState
from .streams import event, stream_response, until_disconnect

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024
MAX_BEST_OF = 128


class CompletionRequest(OpenAIRequest, kw_only=True):
    """``prompt``: text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    return_token_ids: bool | None = None


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One completion, or what is new of it in a stream; fields that were not asked for are absent.

    In a stream ``prompt_token_ids`` come with its first chunk.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    matched_stop: int | str | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


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


def _refuse(body: CompletionRequest) -> None:
    """Refuse fields that do not go together."""
    least = 0 if body.echo or body.prompt_logprobs is not None else 1
    if body.max_tokens is not None and body.max_tokens < least:
        reason = f"must be {least} or more, got {body.max_tokens}"
        raise HttpError(400, f"max_tokens: {reason}", param="max_tokens")
    refuse_stream_options(body)
    if body.prompt_logprobs is not None and body.stream:
        reason = "are not streamed; leave stream out, or use echo with logprobs"
        raise HttpError(400, f"prompt_logprobs: {reason}", param="prompt_logprobs")
    if body.best_of is None or body.best_of == (body.n or 1):
        return
    if not max(1, body.n or 1) <= body.best_of <= MAX_BEST_OF:
        reason = f"must be between n and {MAX_BEST_OF}, got {body.best_of}"
        raise HttpError(400, f"best_of: {reason}", param="best_of")
    if body.stream:
        reason = "is more than n: the best are known at the end only; leave stream out"
        raise HttpError(400, f"best_of: {reason}", param="best_of")


def _params(body: CompletionRequest, state: ServerState) -> SamplingParams:
    """All samples' parameters; those that are ranked, or echoed, need log-probabilities."""
    ranked = body.best_of is not None and body.best_of != (body.n or 1)
    params = openai_params(
        body,
        max_new_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=0 if body.logprobs is None and ranked else body.logprobs,
        defaults=state.sampling_defaults,
    )
    tops = [body.prompt_logprobs, body.logprobs if body.echo else None]
    wanted = [top for top in tops if top is not None]
    return msgspec.structs.replace(
        params,
        n=body.best_of if ranked and body.best_of is not None else params.n,
        prompt_logprobs=max(wanted) if wanted and min(wanted) >= 0 else min(wanted, default=None),
    )


def _items(body: CompletionRequest, state: ServerState) -> list[GenerateItem]:
    _refuse(body)
    params = _params(body, state)
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
    """One accepted request on its way to an answer.

    Of the ``_drawn`` samples of a prompt ``_kept`` are returned.
    """

    def __init__(
        self, body: CompletionRequest, items: list[GenerateItem], service: AsyncService, model: str
    ) -> None:
        if body.echo and not service.tokenizer.has_text:
            reason = "needs the tokenizer that --skip-tokenizer-init left out"
            raise HttpError(501, f"echo: {reason}", param="echo")
        self._body = body
        self._service = service
        self._items = items
        self._sent = [item.prompt for item in items]
        scores = items[0].params.prompt_logprobs is not None
        self._needs_ids = scores or bool(body.return_token_ids) or body.logprobs is not None
        self._model = model
        self._id = items[0].rid or ""
        self._created = int(time.time())
        self._drawn, self._kept = items[0].params.n, body.n or 1
        self._count = len(items) * self._drawn
        self._usage = UsageCounter(len(items), self._drawn)
        options = body.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        self._offsets: dict[int, TextOffsets] = {}
        self._begun = [False] * self._count
        self._every = (
            body.logprobs is not None
            or bool(body.return_token_ids)
            or not service.tokenizer.has_text
        )

    async def whole(self) -> Completion:
        """The answer that is not streamed."""
        deltas = [delta async for delta in self._deltas(stream=False)]
        sequences = collect(deltas, self._count)
        if self._drawn > self._kept:
            sequences = best_samples(sequences, self._drawn, self._kept)
        choices = [
            self._choice(index, sequence.joined(), sequence.deltas)
            for index, sequence in enumerate(sequences)
        ]
        return self._answer(choices, self._usage.total())

    async def events(self) -> AsyncGenerator[bytes]:
        """The chunks of a streamed answer."""
        async with contextlib.aclosing(self._deltas(stream=True)) as deltas:
            async for delta in deltas:
                fresh = bool(self._body.echo) and not self._begun[delta.index]
                if delta.text or delta.finish is not None or self._every or fresh:
                    choice = self._choice(delta.index, delta.text, [delta])
                    yield event(self._answer([choice], self._chunk_usage()))
        if self._include_usage:
            yield event(self._answer([], self._usage.total()))

    async def _deltas(self, stream: bool) -> AsyncGenerator[Delta]:
        try:
            if self._needs_ids:
                self._items = await with_ids(self._items, self._service)
            many = self._service.generate_many(self._items, stream=stream)
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

    def _choice(self, index: int, text: str, deltas: list[Delta]) -> CompletionChoice:
        """A choice of consecutive deltas of one sequence."""
        body, last, tokenizer = self._body, deltas[-1], self._service.tokenizer
        begins, self._begun[index] = not self._begun[index], True
        item = self._items[index // self._kept]
        prompt: list[ScoredToken] = []
        if begins and item.params.prompt_logprobs is not None:
            prompt = scored_prompt(item, deltas[0].prompt_logprobs)
        logprobs = None
        if body.logprobs is not None:
            output = [(entry.token, entry) for delta in deltas for entry in delta.logprobs]
            scored = [*prompt, *output] if body.echo else output
            before = self._begin_offsets(index) if begins else []
            offsets = before[len(before) - len(scored) + len(output) :]
            offsets += self._offsets[index].take(token for token, _ in output)
            logprobs = completion_logprobs(scored, tokenizer, offsets, body.logprobs)
        choice = CompletionChoice(
            index=index,
            text=self._echoed(index) + text if begins and body.echo else text,
            logprobs=logprobs,
            finish_reason=last.finish.kind if last.finish is not None else None,
            matched_stop=matched_stop(last.finish),
        )
        if body.prompt_logprobs is not None:
            found = prompt_logprobs(prompt, tokenizer, body.prompt_logprobs)
            choice = msgspec.structs.replace(choice, prompt_logprobs=found)
        if body.return_token_ids:
            tokens = [token for delta in deltas for token in delta.tokens]
            choice = msgspec.structs.replace(choice, token_ids=tokens)
            if begins:
                choice = msgspec.structs.replace(choice, prompt_token_ids=ids_of(item))
        return choice

    def _begin_offsets(self, index: int) -> list[int]:
        """Where a choice's prompt tokens begin in its text, if they are there."""
        item, echo = self._items[index // self._kept], bool(self._body.echo)
        ids, skip = ids_of(item), item.params.skip_special_tokens
        tokenizer = self._service.tokenizer
        offsets = self._offsets[index] = TextOffsets(tokenizer, [] if echo else ids, skip)
        return offsets.take(ids) if echo else []

    def _echoed(self, index: int) -> str:
        """The prompt's text, as it was sent if it was."""
        item = self._items[index // self._kept]
        sent = self._sent[index // self._kept]
        if isinstance(sent, str):
            return sent
        return self._service.tokenizer.decode(sent, item.params.skip_special_tokens)

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
