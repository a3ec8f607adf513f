"""The asynchronous service behind HTTP and SDK: check, tokenize, submit, detokenize, stream."""

import asyncio
import contextlib
import itertools
import time
from array import array
from collections.abc import AsyncGenerator, Sequence

import msgspec

from ..engine_core.ids import i32
from ..engine_core.messages import (
    CoreInfo,
    FinishReason,
    GenerateRequest,
    RequestOutput,
    RequestStats,
)
from ..engine_core.plan import TokenLogprobs
from ..engine_core.refusal import Refused, RefusedError
from ..engine_core.sampling_params import SamplingParams
from .bad_words import ban_words
from .claims import Claims
from .core_client import CoreClient, Mailbox
from .detokenizer import Detokenizer
from .expand import GenerateItem, child_params, child_rid, new_rid
from .meta_info import MetaInfo, final_meta_info, running_meta_info
from .metrics import Metrics
from .tokenizer import Tokenizer

_THREAD_ABOVE_CHARS = 20_000  # longer texts are tokenized off the event loop


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of one sequence. ``index``: prompt * n + sample, prompts in order.

    ``text`` is whole characters only; ``tokens`` are all new ids, stop token included.
    ``meta_info`` is complete with ``finish``, which comes exactly once a sequence.
    ``prompt_logprobs``, where they were asked for, are those of the prompt's tokens from position
    max(1, ``logprob_start_len``) on and come with the first delta of a sequence.
    """

    index: int
    rid: str
    text: str
    tokens: list[int]
    logprobs: tuple[TokenLogprobs, ...]
    finish: FinishReason | None
    meta_info: MetaInfo
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class _Sequence:
    """One sequence in flight: its detokenizer, counters and times (seconds)."""

    def __init__(
        self,
        index: int,
        rid: str,
        params: SamplingParams,
        prompt: list[int],
        tokenizer: Tokenizer,
    ) -> None:
        self.index = index
        self.rid = rid
        self.prompt_tokens = len(prompt)
        self.completion_tokens = 0
        self.started = time.monotonic()
        self.last_output = self.started
        self.finished = False
        self.detokenizer = Detokenizer(
            tokenizer,
            prompt,
            stops=params.stop,
            skip_special=params.skip_special_tokens,
            no_stop_trim=params.no_stop_trim,
            include_stop=params.include_stop_str_in_output,
        )


class AsyncService:
    """Generation over one core. Belongs to the event loop of its ``core``.

    Raises RefusedError when the tokenizer does not fit the core's model.
    """

    def __init__(
        self,
        core: CoreClient,
        tokenizer: Tokenizer,
        info: CoreInfo,
        metrics: Metrics | None = None,
    ) -> None:
        if tokenizer.max_id >= info.vocab_size:
            raise RefusedError(
                Refused(
                    "tokenizer_path",
                    f"{tokenizer.folder} has token ids up to {tokenizer.max_id}, the model has "
                    f"{info.vocab_size} tokens; use the tokenizer of the model",
                )
            )
        self.core = core
        self.tokenizer = tokenizer
        self.info = info
        self.metrics = metrics or Metrics()
        self._claims = Claims()
        # The core never sees an id twice, so nothing late can reach a request that reuses one.
        self._prefix = new_rid()[:16]
        self._serials = itertools.count(1)
        self._end_reason: str | None = None

    @property
    def open_requests(self) -> int:
        """Requests that have not ended yet."""
        return self._claims.requests

    def replace_core(self, core: CoreClient, info: CoreInfo) -> None:
        """Go on with a restarted core; what was open on the old one has failed."""
        self.core, self.info = core, info

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        rid: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        speculative: bool = True,
        stream: bool = True,
        scope: str = "",
    ) -> AsyncGenerator[Delta]:
        """Complete one prompt ``params.n`` times; yields deltas of all samples as they come.

        ``rid`` is in use within ``scope`` until the request has ended or was left.
        Raises RefusedError before the first delta for what cannot be served. Closing the
        generator, or cancelling its task, aborts the request.
        """
        item = GenerateItem(
            prompt=prompt,
            params=params,
            rid=rid,
            priority=priority,
            cache_salt=cache_salt,
            speculative=speculative,
        )
        many = self.generate_many([item], stream=stream, scope=scope)
        async with contextlib.aclosing(many):  # leaving must not wait for a garbage collection
            async for delta in many:
                yield delta

    async def generate_many(
        self, items: Sequence[GenerateItem], *, stream: bool = True, scope: str = ""
    ) -> AsyncGenerator[Delta]:
        """Complete several prompts; like :meth:`generate`, with prompt-major ``index``."""
        prompts = [await self.tokens_of(item.prompt) for item in items]
        for prompt, item in zip(prompts, items, strict=True):
            self._refuse(prompt, item)
        items = [self._with_banned_tokens(item) for item in items]
        requests: list[GenerateRequest] = []
        sequences: dict[str, _Sequence] = {}  # by the core's ids
        ids: list[tuple[str, list[str]]] = []
        for prompt, item in zip(prompts, items, strict=True):
            rid = item.rid or new_rid()
            children = self._children(prompt, item, stream)
            for sample, child in enumerate(children):
                name = child_rid(rid, sample, item.params.n)
                sequences[child.rid] = _Sequence(
                    len(sequences), name, child.params, prompt, self.tokenizer
                )
            ids.append((rid, [child.rid for child in children]))
            requests += children
        core = self.core  # a restart may replace it meanwhile
        claim = self._claims.claim(scope, ids)
        try:
            mailbox = Mailbox()
            core.submit(requests, mailbox)
            self.metrics.requests.inc(len(requests))
            remaining = len(requests)
            try:
                while remaining:
                    for output in await mailbox.take():
                        sequence = sequences[output.rid]
                        remaining -= output.finish is not None
                        yield self._delta(sequence, output)
            finally:
                for core_id, sequence in sequences.items():
                    if not sequence.finished:
                        core.forget(core_id)
                        self.metrics.observe_left()
        finally:
            self._claims.release(claim)

    async def tokens_of(
        self, prompt: str | list[int], add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a prompt; long texts are tokenized in a thread."""
        if isinstance(prompt, list):
            return prompt
        if len(prompt) > _THREAD_ABOVE_CHARS:
            return await asyncio.to_thread(self.tokenizer.encode, prompt, add_special_tokens)
        return self.tokenizer.encode(prompt, add_special_tokens)

    def abort(self, rid: str, scope: str = "") -> int:
        """Ask for the end of the request, or sample, with exactly this id within its scope.

        Returns how many samples ended.
        """
        return sum(map(self.core.abort, self._claims.samples(scope, rid)))

    def abort_all(self) -> int:
        """Ask for the end of every request of this frontend; returns how many were open."""
        return self.core.abort_all()

    def end_all(self, reason: str) -> int:
        """Like :meth:`abort_all`, for good: aborted requests are told ``reason`` from now on."""
        self._end_reason = reason
        return self.abort_all()

    def _children(
        self, prompt: list[int], item: GenerateItem, stream: bool
    ) -> list[GenerateRequest]:
        wire_prompt = array("i", prompt).tobytes()
        return [
            GenerateRequest(
                rid=f"{self._prefix}-{next(self._serials)}",
                prompt=wire_prompt,
                params=child_params(item.params, sample),
                priority=item.priority,
                cache_salt=item.cache_salt,
                stream=stream,
                speculative=item.speculative,
            )
            for sample in range(item.params.n)
        ]

    def _with_banned_tokens(self, item: GenerateItem) -> GenerateItem:
        """The item with its bad words as token ids. Raises RefusedError."""
        if not item.params.bad_words:
            return item
        params = ban_words(item.params, self.tokenizer)
        refused = params.refuse(self.info.vocab_size)
        if refused is not None:
            raise RefusedError(msgspec.structs.replace(refused, field="bad_words"))
        return msgspec.structs.replace(item, params=params)

    def _refuse(self, prompt: list[int], item: GenerateItem) -> None:
        refused = item.params.refuse(self.info.vocab_size) or self._refuse_prompt(
            prompt, item.params.max_new_tokens
        )
        if refused is None and not -(2**31) <= item.priority < 2**31:
            refused = Refused("priority", "must fit into 32 bits, signed")
        if refused is not None:
            raise RefusedError(refused)

    def _refuse_prompt(self, prompt: list[int], max_new_tokens: int) -> Refused | None:
        limit = self.info.context_length
        if not prompt:
            return Refused("prompt", "is empty; send at least one token")
        if len(prompt) >= limit:
            return Refused(
                "prompt",
                f"has {len(prompt)} tokens, the context is {limit}; shorten it by at least "
                f"{len(prompt) - limit + 1}",
            )
        if len(prompt) + max_new_tokens > limit:
            return Refused(
                "max_new_tokens",
                f"{max_new_tokens} after a prompt of {len(prompt)} tokens exceeds the context of "
                f"{limit}; ask for at most {limit - len(prompt)}",
            )
        for token in prompt:
            if not 0 <= token < self.info.vocab_size:
                return Refused(
                    "prompt",
                    f"token id {token} is outside the vocabulary of {self.info.vocab_size} tokens",
                )
        return None

    def _delta(self, sequence: _Sequence, output: RequestOutput) -> Delta:
        tokens: list[int] = i32(output.tokens).tolist()
        finish = output.finish
        if finish is not None and (finish.kind, finish.status) == ("abort", 200):
            # What was asked for here, too, the core takes for the client's wish.
            message = self._end_reason or finish.message
            finish = msgspec.structs.replace(finish, message=message)
        now = time.monotonic()
        self.metrics.observe_output(
            len(tokens),
            now - sequence.started,
            now - sequence.last_output,
            sequence.completion_tokens,
        )
        sequence.completion_tokens += len(tokens)
        sequence.last_output = now
        sequence.finished = finish is not None
        return Delta(
            index=sequence.index,
            rid=sequence.rid,
            text=sequence.detokenizer.push(tokens, finish),
            tokens=tokens,
            logprobs=output.logprobs,
            finish=finish,
            meta_info=self._meta_info(sequence, finish, output.stats, now),
            prompt_logprobs=output.prompt_logprobs,
        )

    def _meta_info(
        self, seq: _Sequence, finish: FinishReason | None, stats: RequestStats | None, now: float
    ) -> MetaInfo:
        if finish is None:
            return running_meta_info(
                seq.rid, seq.prompt_tokens, seq.completion_tokens, self.info.simulated
            )
        latency = now - seq.started
        self.metrics.observe_finish(latency, seq.completion_tokens, finish.kind)
        if stats is None:  # refused or lost before the core counted anything
            stats = RequestStats(
                seq.prompt_tokens, seq.completion_tokens, 0, 0, 0, 0, 0, 0, 0, (), None
            )
        speculation = self.info.drafter is not None
        return final_meta_info(seq.rid, finish, stats, latency, speculation, self.info.simulated)
