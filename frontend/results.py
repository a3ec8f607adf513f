"""What generation returns to Python code: results, their completions, and stream chunks."""

from collections.abc import Sequence

import msgspec

from ..engine_core.ids import f32, i32
from ..engine_core.messages import FinishReason
from ..engine_core.plan import TokenLogprobs
from .meta_info import MetaInfo


class Chunk(msgspec.Struct, frozen=True):
    """New text and tokens of one completion since its last chunk.

    ``finish_reason`` ("stop", "length") and ``meta_info`` come with the last chunk only,
    ``prompt_logprobs`` with the first. ``index`` tells the completions of one prompt apart when
    ``n`` > 1.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    finish_reason: str | None = None
    meta_info: dict[str, object] | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def output_ids(self) -> tuple[int, ...]:
        """SGLang's name of ``token_ids``."""
        return self.token_ids


class Completion(msgspec.Struct, frozen=True):
    """One finished completion. ``stop_reason``: the stop string or token id that ended it.

    ``prompt_logprobs``: of the prompt's tokens from position max(1, ``logprob_start_len``) on.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    meta_info: dict[str, object]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def output_ids(self) -> tuple[int, ...]:
        """SGLang's name of ``token_ids``."""
        return self.token_ids


class GenerationResult(msgspec.Struct, frozen=True):
    """A prompt and its completions; the attributes below are those of the first one."""

    prompt: str | tuple[int, ...]
    prompt_tokens: int
    outputs: tuple[Completion, ...]

    @property
    def text(self) -> str:
        """Generated text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Generated token ids, a matched stop token included."""
        return self.outputs[0].token_ids

    @property
    def output_ids(self) -> tuple[int, ...]:
        """SGLang's name of ``token_ids``."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why it ended: "stop", "length" or "abort"."""
        return self.outputs[0].finish_reason

    @property
    def meta_info(self) -> dict[str, object]:
        """Counters under SGLang's names."""
        return self.outputs[0].meta_info

    @property
    def completion_tokens(self) -> int:
        """Generated tokens of all completions."""
        return sum(len(output.token_ids) for output in self.outputs)

    def summary(self) -> dict[str, object]:
        """The object that ``outrider generate --json`` prints."""
        fields: dict[str, object] = {
            "text": self.text,
            "output_ids": self.output_ids,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reason": self.finish_reason,
            "meta_info": self.meta_info,
        }
        if self.outputs[0].logprobs:
            fields["logprobs"] = plain_logprobs(self.outputs[0].logprobs)
        if self.outputs[0].prompt_logprobs:
            fields["prompt_logprobs"] = plain_logprobs(self.outputs[0].prompt_logprobs)
        return fields


class Collector:
    """Joins the chunks of one completion."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish: FinishReason | None = None
        self.meta: MetaInfo | None = None

    def add(
        self,
        text: str,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish: FinishReason | None,
        meta: MetaInfo | None,
        prompt_logprobs: Sequence[TokenLogprobs],
    ) -> None:
        """Take one chunk in order."""
        self.prompt_logprobs += prompt_logprobs
        self.text.append(text)
        self.tokens += tokens
        self.logprobs += logprobs
        if finish is not None:
            self.finish, self.meta = finish, meta

    def completion(self) -> Completion:
        """The finished completion; only after the chunk with ``finish``."""
        assert self.finish is not None
        return Completion(
            index=self.index,
            text="".join(self.text),
            token_ids=tuple(self.tokens),
            finish_reason=self.finish.kind,
            stop_reason=self.finish.matched,
            meta_info=self.meta.to_dict() if self.meta is not None else {},
            logprobs=tuple(self.logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
        )


def plain_logprobs(entries: Sequence[TokenLogprobs]) -> list[dict[str, object]]:
    """Log-probabilities for JSON, one object a token; ``top_logprobs``: the best, best first."""
    return [
        {
            "token": entry.token,
            "logprob": entry.value,
            "rank": entry.rank,
            "top_logprobs": [
                {"token": token, "logprob": value}
                for token, value in zip(
                    i32(entry.top_ids).tolist(), f32(entry.top_values).tolist(), strict=True
                )
            ],
        }
        for entry in entries
    ]


def token_tuple(buffer: bytes) -> tuple[int, ...]:
    """Wire bytes (int32) as Python ints."""
    return tuple(i32(buffer).tolist())
