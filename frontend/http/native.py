"""POST /generate: SGLang's native endpoint."""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...engine_core.plan import TokenLogprobs
from ...engine_core.refusal import Refused, RefusedError
from ...engine_core.sampling_params import MAX_COUNT, MAX_TOP_LOGPROBS
from ..expand import GenerateItem
from ..service import AsyncService, Delta
from .answers import raise_if_failed
from .body import json_response, read_json
from .completions import MAX_PROMPTS
from .errors import HttpError
from .logprobs import NativeLogprob, ScoredToken, native_logprob, top_of
from .prompt_part import scored_prompt, with_ids
from .sampling import NativeSampling, native_params, request_ids
from .state import ServerState
from .streams import event, stream_response, until_disconnect

T = TypeVar("T")


class NativeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``text`` or ``input_ids``, one prompt or a list; other fields once or one a prompt."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    speculative: bool | None = None


async def generate(request: Request) -> Response:
    """Complete one prompt or a batch, streamed or not."""
    state: ServerState = request.app.state.server
    service = state.require()
    body = await read_json(request, NativeRequest, state.max_body_bytes)
    job = _Job(body, _items(body), service, state.cumulative_streams)
    if body.stream:
        return await stream_response(request, job.events())
    return json_response(await until_disconnect(request.receive, job.whole()))


def _prompts(body: NativeRequest) -> tuple[list[str | list[int]], bool]:
    """The prompts, and whether the request is a batch (then the answer is a list)."""
    if (body.text is None) == (body.input_ids is None):
        raise HttpError(400, "text: give exactly one of text and input_ids", param="text")
    if isinstance(body.text, str):
        return [body.text], False
    name = "text" if body.text is not None else "input_ids"
    given: Sequence[str | int | list[int]] = body.text or body.input_ids or []
    if not given:
        raise HttpError(400, f"{name}: is empty; send at least one token", param=name)
    if all(isinstance(part, int) for part in given):
        return [[part for part in given if isinstance(part, int)]], False
    parts: list[str | list[int]] = [part for part in given if not isinstance(part, int)]
    if len(parts) < len(given):
        raise HttpError(400, f"{name}: mixes ids and lists of ids; send one kind", param=name)
    if len(parts) > MAX_PROMPTS:
        raise HttpError(400, f"{name}: at most {MAX_PROMPTS} in one request", param=name)
    return parts, True


def _spread(name: str, value: T | list[T] | None, default: T, count: int) -> list[T]:
    """One value a prompt, from a single one or a list of the batch's length."""
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if len(value) != count:
        raise HttpError(400, f"{name}: has {len(value)} values for {count} prompts", param=name)
    return value


def _items(body: NativeRequest) -> list[GenerateItem]:
    prompts, batch = _prompts(body)
    count = len(prompts)
    starts = _spread("logprob_start_len", body.logprob_start_len, -1, count)
    wanted = _spread("return_logprob", body.return_logprob, False, count)
    if any(start != -1 and not want for start, want in zip(starts, wanted, strict=True)):
        raise HttpError(
            400, "logprob_start_len: needs return_logprob true", param="logprob_start_len"
        )
    tops = _spread("top_logprobs_num", body.top_logprobs_num, 0, count)
    if any(top and not want for top, want in zip(tops, wanted, strict=True)):
        raise HttpError(
            400, "top_logprobs_num: needs return_logprob true", param="top_logprobs_num"
        )
    if body.return_text_in_logprobs and not any(wanted):
        raise HttpError(
            400,
            "return_text_in_logprobs: needs return_logprob true",
            param="return_text_in_logprobs",
        )
    for name, values, least, most in (
        ("logprob_start_len", starts, -1, MAX_COUNT),
        ("top_logprobs_num", tops, 0, MAX_TOP_LOGPROBS),
    ):
        wrong = next((value for value in values if not least <= value <= most), None)
        if wrong is not None:
            reason = f"{name}: must be between {least} and {most}, got {wrong}"
            raise HttpError(400, reason, param=name)
    samplings = _spread("sampling_params", body.sampling_params, NativeSampling(), count)
    params = [
        native_params(sampling, top if want else None, start)
        for sampling, want, top, start in zip(samplings, wanted, tops, starts, strict=True)
    ]
    if not batch and isinstance(body.rid, list):
        raise RefusedError(Refused("rid", "is a list for a single prompt; send one text"))
    rids = request_ids([body.rid] if isinstance(body.rid, str) and not batch else body.rid, count)
    return [
        GenerateItem(
            prompt=prompt,
            params=one,
            rid=rid,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            speculative=body.speculative is not False,
        )
        for prompt, one, rid in zip(prompts, params, rids, strict=True)
    ]


def _as_sent(refused: Refused, prompt: str) -> Refused:
    """The refusal of a field where a client finds it in its request; ``prompt``: the prompt's."""
    field = refused.field
    if field == "prompt":
        field = prompt
    elif field.split(".")[0] in NativeSampling.__struct_fields__:
        field = f"sampling_params.{field}"
    return msgspec.structs.replace(refused, field=field)


class _Job:
    """One accepted request on its way to an answer."""

    def __init__(
        self,
        body: NativeRequest,
        items: list[GenerateItem],
        service: AsyncService,
        cumulative: bool,
    ) -> None:
        self._service = service
        self._items = items
        self._cumulative = cumulative
        self._with_text = bool(body.return_text_in_logprobs)
        self._item_of = [number for number, i in enumerate(items) for _ in range(i.params.n)]
        self._logprobs = [items[number].params.logprobs for number in self._item_of]
        self._parts = [_Parts(first=True) for _ in self._logprobs]
        self._prompt_name = "text" if body.text is not None else "input_ids"
        self._single = not _prompts(body)[1] and len(self._parts) == 1

    async def whole(self) -> dict[str, object] | list[dict[str, object]]:
        """The answer that is not streamed: an object, or a list for batches and n > 1."""
        last: dict[int, Delta] = {}
        async for delta in self._deltas(stream=False):
            self._parts[delta.index].add(delta)
            last[delta.index] = delta
        answers = [self._answer(last[i], self._parts[i]) for i in range(len(self._parts))]
        return answers[0] if self._single else answers

    async def events(self) -> AsyncGenerator[bytes]:
        """The chunks of a streamed answer; batches carry an ``index``."""
        async with contextlib.aclosing(self._deltas(stream=True)) as deltas:
            async for delta in deltas:
                parts = self._parts[delta.index]
                parts.add(delta)
                if not self._cumulative:
                    self._parts[delta.index] = _Parts(first=False)
                answer = self._answer(delta, parts)
                yield event(answer if self._single else answer | {"index": delta.index})

    async def _deltas(self, stream: bool) -> AsyncGenerator[Delta]:
        try:
            if any(item.params.prompt_logprobs is not None for item in self._items):
                self._items = await with_ids(self._items, self._service)
            many = self._service.generate_many(self._items, stream=stream)
            async with contextlib.aclosing(many) as deltas:
                async for delta in deltas:
                    raise_if_failed(delta)
                    yield delta
        except RefusedError as error:
            raise RefusedError(_as_sent(error.refused, self._prompt_name)) from None

    def _answer(self, last: Delta, parts: "_Parts") -> dict[str, object]:
        meta = last.meta_info.to_dict()
        if self._logprobs[last.index] is not None:
            with_top = bool(self._logprobs[last.index])
            output: list[ScoredToken] = [(entry.token, entry) for entry in parts.logprobs]
            meta |= self._native_logprobs("output", output, with_top)
            item = self._items[self._item_of[last.index]]
            if item.params.prompt_logprobs is not None and parts.first:
                prompt = scored_prompt(item, parts.prompt_logprobs)
                meta |= self._native_logprobs("input", prompt, with_top)
        return {"text": parts.joined(), "output_ids": parts.tokens, "meta_info": meta}

    def _native_logprobs(
        self, which: str, scored: list[ScoredToken], with_top: bool
    ) -> dict[str, object]:
        def triple(token: int, value: float | None) -> NativeLogprob:
            return native_logprob(token, value, self._service.tokenizer, self._with_text)

        found: dict[str, object] = {
            f"{which}_token_logprobs": [
                triple(token, None if entry is None else entry.value) for token, entry in scored
            ],
            f"{which}_token_logprobs_length": len(scored),
        }
        if with_top:
            found[f"{which}_top_logprobs"] = [
                None if entry is None else [triple(token, value) for token, value in top_of(entry)]
                for _, entry in scored
            ]
        return found


class _Parts:
    """What one sequence has produced, from its ``first`` delta on or later."""

    def __init__(self, first: bool) -> None:
        self.first = first
        self._text: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []

    def add(self, delta: Delta) -> None:
        """Append one delta."""
        self._text.append(delta.text)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs

    def joined(self) -> str:
        """The text so far."""
        return "".join(self._text)
