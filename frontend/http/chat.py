"""POST /v1/chat/completions."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...engine_core.refusal import Refused, RefusedError
from ...engine_core.sampling_params import SamplingParams
from ..expand import GenerateItem
from ..service import AsyncService, Delta
from ..tool_calls.answer import AnswerParts
from ..tool_calls.declared import Tool, ToolChoice
from ..tool_calls.request import ToolUse, tool_use, with_tools
from .answers import Collected, Usage, UsageCounter, collect, matched_stop, raise_if_failed
from .body import json_response, read_json
from .chat_answers import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
    MessageDelta,
    answer_message,
    message_delta,
)
from .chat_messages import ChatMessage, plain_messages
from .completions import refuse_stream_options
from .errors import HttpError
from .logprobs import ChatLogprobs, chat_logprobs
from .models import check_model
from .prompt_part import PromptLogprobs, ids_of, prompt_logprobs, scored_prompt
from .sampling import OpenAIRequest, openai_error, openai_params, request_ids
from .state import ServerState
from .streams import event, stream_response, until_disconnect

MAX_TOP_LOGPROBS = 20
_NOTHING = MessageDelta()


class ChatRequest(OpenAIRequest, kw_only=True):
    """``max_tokens`` left out: until the end of the context; ``tool_choice``: auto with tools."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, streamed or not."""
    state: ServerState = request.app.state.server
    service = state.require()
    body = await read_json(request, ChatRequest, state.max_body_bytes)
    check_model(body.model, state)
    use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, state.tool_call_parser)
    item = await _item(body, use, service, state)
    job = _Job(body, use, item, service, state.model_name)
    if body.stream:
        return await stream_response(request, job.events())
    return json_response(await until_disconnect(request.receive, job.whole()))


async def _item(
    body: ChatRequest, use: ToolUse, service: AsyncService, state: ServerState
) -> GenerateItem:
    refuse_stream_options(body)
    if body.prompt_logprobs is not None and body.stream:
        reason = "are not streamed; leave stream out"
        raise HttpError(400, f"prompt_logprobs: {reason}", param="prompt_logprobs")
    if not body.messages:
        raise HttpError(400, "messages: is empty; send at least one message", param="messages")
    asked = _asked_tokens(body)
    logprobs = _asked_logprobs(body)
    text = service.tokenizer.render_chat(plain_messages(body.messages), tools=use.shown)
    prompt = await service.tokens_of(text, add_special_tokens=False)
    room = min(service.info.context_length, service.info.max_total_tokens) - len(prompt)
    params: SamplingParams = openai_params(
        body,
        max_new_tokens=max(room, 1) if asked is None else asked,
        logprobs=logprobs,
        defaults=state.sampling_defaults,
    )
    return GenerateItem(
        prompt=prompt,
        params=msgspec.structs.replace(
            with_tools(params, use, service.tokenizer), prompt_logprobs=body.prompt_logprobs
        ),
        rid=request_ids(body.rid, 1, "chatcmpl-")[0],
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        speculative=body.speculative is not False,
    )


def _asked_tokens(body: ChatRequest) -> int | None:
    newer, older = body.max_completion_tokens, body.max_tokens
    if newer is not None and older is not None and newer != older:
        raise HttpError(
            400,
            "max_completion_tokens: differs from max_tokens; give one of the two",
            param="max_completion_tokens",
        )
    asked, name = (newer, "max_completion_tokens") if newer is not None else (older, "max_tokens")
    if asked is not None and asked < 1:
        raise HttpError(400, f"{name}: must be 1 or more, got {asked}", param=name)
    return asked


def _asked_logprobs(body: ChatRequest) -> int | None:
    top = body.top_logprobs
    if top is not None and not body.logprobs:
        raise HttpError(400, "top_logprobs: needs logprobs true", param="top_logprobs")
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise HttpError(
            400,
            f"top_logprobs: must be between 0 and {MAX_TOP_LOGPROBS}, got {top}",
            param="top_logprobs",
        )
    return (top or 0) if body.logprobs else None


class _Job:
    """One accepted conversation on its way to an answer."""

    def __init__(
        self,
        body: ChatRequest,
        use: ToolUse,
        item: GenerateItem,
        service: AsyncService,
        model: str,
    ) -> None:
        self._service = service
        self._item = item
        self._model = model
        self._created = int(time.time())
        self._n = item.params.n
        self._use = use
        self._parts = [AnswerParts(use) for _ in range(self._n)]
        self._logprobs = body.logprobs is True
        self._prompt_top = body.prompt_logprobs
        self._ids = body.return_token_ids is True
        self._usage = UsageCounter(1, self._n)
        options = body.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        newer = body.max_completion_tokens is not None
        self._length_name = "max_completion_tokens" if newer else "max_tokens"

    async def whole(self) -> ChatCompletion:
        """The answer that is not streamed."""
        deltas = [delta async for delta in self._deltas(stream=False)]
        sequences = collect(deltas, self._n)
        return ChatCompletion(
            id=self._item.rid or "",
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[self._choice(sequence) for sequence in sequences],
            usage=self._usage.total(),
            prompt_logprobs=self._scores(sequences[0]),
            prompt_token_ids=ids_of(self._item) if self._ids else msgspec.UNSET,
            simulated=self._service.info.simulated,
        )

    async def events(self) -> AsyncGenerator[bytes]:
        """The chunks of a streamed answer: the role first, then text, then usage if asked."""
        started: set[int] = set()
        async with contextlib.aclosing(self._deltas(stream=True)) as deltas:
            async for delta in deltas:
                if delta.index not in started:
                    started.add(delta.index)
                    role = MessageDelta(role="assistant", content="")
                    choice = ChunkChoice(index=delta.index, delta=role)
                    yield self._chunk([choice], first=len(started) == 1)
                choice = self._chunk_choice(delta)
                new = choice.delta != _NOTHING or delta.finish is not None
                if new or self._logprobs or self._ids:
                    yield self._chunk([choice])
        if self._include_usage:
            yield self._chunk([], last=True)

    async def _deltas(self, stream: bool) -> AsyncGenerator[Delta]:
        many = self._service.generate_many([self._item], stream=stream)
        try:
            async with contextlib.aclosing(many) as deltas:
                async for delta in deltas:
                    raise_if_failed(delta)
                    self._usage.add(delta)
                    yield delta
        except RefusedError as error:
            told = RefusedError(await self._told(error.refused))
            raise openai_error(told, self._length_name, "messages") from None

    async def _told(self, refused: Refused) -> Refused:
        """A refusal with what the request's tools have to do with it."""
        if refused.field == "prompt" and self._use.shown:
            reason = (
                f"{refused.reason}; the tools are a part of it: fewer or shorter ones help, too"
            )
            return msgspec.structs.replace(refused, reason=reason)
        if refused.field == "tools" and refused.status == 400 and self._use.blame is not None:
            return await asyncio.to_thread(self._use.blame, refused)  # of long schemas
        return refused

    def _choice(self, sequence: Collected) -> ChatChoice:
        index, finish = sequence.last.index, sequence.last.finish
        parts = self._parts[index]
        return ChatChoice(
            index=index,
            message=answer_message(*parts.add(sequence.joined(), last=True)),
            logprobs=self._chat_logprobs(sequence.deltas),
            finish_reason=parts.finish(finish),
            matched_stop=matched_stop(finish),
            token_ids=sequence.tokens if self._ids else msgspec.UNSET,
        )

    def _chunk_choice(self, delta: Delta) -> ChunkChoice:
        parts = self._parts[delta.index]
        return ChunkChoice(
            index=delta.index,
            delta=message_delta(*parts.add(delta.text, last=delta.finish is not None)),
            logprobs=self._chat_logprobs([delta]),
            finish_reason=parts.finish(delta.finish),
            matched_stop=matched_stop(delta.finish),
            token_ids=delta.tokens if self._ids else msgspec.UNSET,
        )

    def _scores(self, sequence: Collected) -> PromptLogprobs | msgspec.UnsetType:
        if self._prompt_top is None:
            return msgspec.UNSET
        scored = scored_prompt(self._item, sequence.deltas[0].prompt_logprobs)
        return prompt_logprobs(scored, self._service.tokenizer, self._prompt_top)

    def _chat_logprobs(self, deltas: list[Delta]) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        entries = [entry for delta in deltas for entry in delta.logprobs]
        return chat_logprobs(entries, self._service.tokenizer)

    def _chunk(self, choices: list[ChunkChoice], first: bool = False, last: bool = False) -> bytes:
        usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
        if last or self._continuous:
            usage = self._usage.total()
        elif self._include_usage:
            usage = None
        return event(
            ChatChunk(
                id=self._item.rid or "",
                object="chat.completion.chunk",
                created=self._created,
                model=self._model,
                choices=choices,
                usage=usage,
                prompt_token_ids=ids_of(self._item) if first and self._ids else msgspec.UNSET,
                simulated=self._service.info.simulated,
            )
        )
