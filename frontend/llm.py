"""The offline engine: ``outrider.LLM`` starts a core process of its own and drives it.

It runs the very same core and service as the server, on an event loop in a thread.
"""

import asyncio
import atexit
import weakref
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from ..engine_core.config import EngineConfig
from ..engine_core.messages import CoreInfo, CoreStats
from ..engine_core.refusal import Refused, RefusedError
from ..engine_core.sampling_params import SamplingParams
from .engine_handle import EngineHandle, start_engine
from .errors import EngineClosed, EngineDead, RequestFailed
from .expand import GenerateItem
from .flags import engine_config
from .launch import start_core
from .loop_thread import LoopThread
from .results import Chunk, Collector, GenerationResult
from .sampling_flags import params_from
from .service import AsyncService, Delta

T = TypeVar("T")
Prompt = str | Sequence[int] | Mapping[str, object]
Params = SamplingParams | Mapping[str, object]


class LLM:
    """An engine of this process, gone with it.

    ``model``: `pycoder`, a local folder or a Hugging Face id. Every name of an engine flag is a
    keyword with underscores (docs/flags.md); ``speculative_config`` takes vLLM's keys. Raises an
    error that names a keyword it does not know.
    """

    def __init__(self, model: str | None = None, **engine_flags: object) -> None:
        named = {} if model is None else {"model": model}
        self._open(engine_config({**named, **engine_flags}))

    @classmethod
    def from_config(cls, config: EngineConfig, trace: str | None = None) -> Self:
        """An engine from a finished configuration. ``trace``: file it records its steps in."""
        self = cls.__new__(cls)
        self._open(config, trace)
        return self

    def _open(self, config: EngineConfig, trace: str | None = None) -> None:
        self.config = config
        self._loop = LoopThread("outrider-llm")
        self._engine: EngineHandle | None = None
        try:
            start = start_core if trace is None else partial(start_core, trace=trace)
            self._engine = self._loop.run(start_engine(config, start=start))
        except BaseException:
            self._loop.close()
            raise
        atexit.register(_shutdown, weakref.ref(self))

    @property
    def info(self) -> CoreInfo:
        """What the core runs with: sizes, device, threads."""
        return self._service().info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        **sampling: object,
    ) -> list[GenerationResult]:
        """Generate for one or several prompts; results come in the prompts' order.

        A prompt is text, a list of token ids, or ``{"prompt": ...}`` / ``{"prompt_token_ids":
        ...}``. ``sampling_params`` is one for all or one each; keywords override its fields.
        Raises RefusedError for what cannot be served; then nothing was generated.
        """
        items = _items(prompts, sampling_params, sampling)
        return self._run(_generate(self._service(), items))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        rid: str | None = None,
        **sampling: object,
    ) -> Iterator[Chunk]:
        """Yield chunks of one prompt as they come; leaving the loop early aborts the request."""
        [item] = _items([prompt], sampling_params, sampling, rid)
        return self._loop.iterate(_stream(self._service(), item))

    def abort(self, rid: str | None = None) -> None:
        """End the request ``rid`` (from another thread), or all of them."""
        self._run(_abort(self._service(), rid))

    def stats(self) -> CoreStats:
        """The core's gauges and counters."""
        return self._run(self._service().core.stats())

    def flush_cache(self) -> None:
        """Empty the radix cache and the learned n-grams. Raises RefusedError unless idle."""
        self._run(flush_cache(self._service()))

    def shutdown(self) -> None:
        """End the core process; idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._loop.run(engine.stop())
            self._loop.close()

    def _exit(self) -> None:
        """End the core when the interpreter exits: no thread can be started any more then."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.abandon()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _service(self) -> AsyncService:
        if self._engine is None:
            raise EngineClosed("this LLM was shut down; make a new one")
        return self._engine.service

    def _run(self, work: Coroutine[object, object, T]) -> T:
        return self._loop.run(work)


def _shutdown(reference: "weakref.ref[LLM]") -> None:
    llm = reference()
    if llm is not None:
        llm._exit()


def _items(
    prompts: Prompt | Sequence[Prompt],
    params: Params | Sequence[Params] | None,
    sampling: Mapping[str, object],
    rid: str | None = None,
) -> list[GenerateItem]:
    many = _as_list(prompts)
    if params is None or isinstance(params, SamplingParams | Mapping):
        each: list[Params | None] = [params] * len(many)
    else:
        each = list(params)
        if len(each) != len(many):
            raise RefusedError(
                Refused("sampling_params", f"{len(each)} given for {len(many)} prompts")
            )
    request = {k: sampling[k] for k in ("priority", "cache_salt", "speculative") if k in sampling}
    rest = {k: v for k, v in sampling.items() if k not in request}
    return [_item(p, one, request, rest, rid) for p, one in zip(many, each, strict=True)]


def _item(
    prompt: Prompt,
    params: Params | None,
    request: Mapping[str, object],
    sampling: Mapping[str, object],
    rid: str | None,
) -> GenerateItem:
    base = params if isinstance(params, SamplingParams) else None
    if isinstance(params, Mapping):
        base = params_from(params)
    priority = request.get("priority", 0)
    cache_salt = request.get("cache_salt", "")
    speculative = request.get("speculative", True)
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise RefusedError(Refused("priority", "must be a whole number"))
    if not isinstance(cache_salt, str):
        raise RefusedError(Refused("cache_salt", "must be a string"))
    if not isinstance(speculative, bool):
        raise RefusedError(Refused("speculative", "must be True or False"))
    return GenerateItem(
        prompt=_prompt(prompt),
        params=params_from(sampling, base),
        rid=rid,
        priority=priority,
        cache_salt=cache_salt,
        speculative=speculative,
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed: list[Prompt] = []
    numbers: list[int] = []
    for one in prompts:
        if isinstance(one, int):
            numbers.append(one)
        else:
            listed.append(one)
    if numbers and listed:
        raise RefusedError(Refused("prompts", "mixes token ids and prompts; nest the ids in lists"))
    return [numbers] if numbers else listed


def _prompt(prompt: Prompt) -> str | list[int]:
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown or len(prompt) != 1:
            raise RefusedError(
                Refused("prompt", 'a mapping has one key, "prompt" or "prompt_token_ids"')
            )
        [value] = prompt.values()
        if isinstance(value, str):
            return value
        if not isinstance(value, Sequence):
            raise RefusedError(Refused("prompt", "must be text or a list of token ids"))
        prompt = value
    if isinstance(prompt, str):
        return prompt
    ids = list(prompt)
    if not all(isinstance(token, int) and -(2**31) <= token < 2**31 for token in ids):
        raise RefusedError(Refused("prompt", "must be text or a list of token ids"))
    return ids


async def _generate(service: AsyncService, items: list[GenerateItem]) -> list[GenerationResult]:
    collectors: list[Collector] = []
    for item in items:
        collectors += [Collector(sample) for sample in range(item.params.n)]
    async for delta in service.generate_many(items, stream=False):
        raise_failed(delta)
        collectors[delta.index].add(
            delta.text,
            delta.tokens,
            delta.logprobs,
            delta.finish,
            delta.meta_info,
            delta.prompt_logprobs,
        )
    results: list[GenerationResult] = []
    position = 0
    for item in items:
        mine = collectors[position : position + item.params.n]
        position += item.params.n
        meta = mine[0].meta
        results.append(
            GenerationResult(
                prompt=item.prompt if isinstance(item.prompt, str) else tuple(item.prompt),
                prompt_tokens=0 if meta is None else meta.prompt_tokens,
                outputs=tuple(one.completion() for one in mine),
            )
        )
    return results


async def _stream(service: AsyncService, item: GenerateItem) -> AsyncGenerator[Chunk, None]:
    async for delta in service.generate_many([item]):
        raise_failed(delta)
        yield Chunk(
            text=delta.text,
            token_ids=tuple(delta.tokens),
            index=delta.index,
            finish_reason=None if delta.finish is None else delta.finish.kind,
            meta_info=None if delta.finish is None else delta.meta_info.to_dict(),
            logprobs=delta.logprobs,
            prompt_logprobs=delta.prompt_logprobs,
        )


def raise_failed(delta: Delta) -> None:
    """Raise for a request that the engine ended with an error; an asked-for abort is none."""
    finish = delta.finish
    if finish is None or finish.kind != "abort" or finish.status == 200:
        return
    message = finish.message or "the engine ended the request"
    if finish.status == 503:
        raise EngineDead(message)
    raise RequestFailed(message, finish.status)


async def _abort(service: AsyncService, rid: str | None) -> None:
    if rid is None:
        service.abort_all()
    else:
        service.abort(rid)


async def flush_cache(service: AsyncService, timeout_s: float = 10.0) -> None:
    """Empty the caches, waiting for requests that just ended to be given up."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        reply = await service.core.flush_cache()
        if reply.refused is None:
            return
        if asyncio.get_running_loop().time() > deadline:
            raise RefusedError(reply.refused)
        await asyncio.sleep(0.02)
