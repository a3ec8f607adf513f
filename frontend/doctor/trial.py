"""The run of ``outrider doctor``: the same prompts without and with drafts, in one engine."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...engine_core.config import EngineConfig
from ...engine_core.divergence import TIE_GAP, Divergence, first_divergence
from ...engine_core.draft_finding import Finding
from ...engine_core.messages import CoreInfo
from ...engine_core.sampling_params import SamplingParams
from ..bench.measure import Speculation, speculation
from ..engine_handle import load_tokenizer
from ..llm import LLM
from ..logit_gap import logit_gap
from ..tokenizer import Tokenizer
from .acceptance import Position, loops, positions

_CHECK = "exactness"


class Trial(NamedTuple):
    """What both runs gave. ``outputs``: the tokens without drafts, by prompt."""

    info: CoreInfo
    spec: Speculation
    table: tuple[Position, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    outputs: list[list[int]]
    stopped: int
    looping: int
    exactness: Finding
    divergences: list[Divergence]


def encode(config: EngineConfig, prompts: Iterable[str | list[int]], chat: bool) -> list[list[int]]:
    """Token ids of prompts. ``chat``: as a user's messages, if the model has a template for them.

    Raises ModelNotFound, RefusedError.
    """
    tokenizer = load_tokenizer(config)
    return [_encode(tokenizer, prompt, chat) for prompt in prompts]


def _encode(tokenizer: Tokenizer, prompt: str | list[int], chat: bool) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if chat and tokenizer.chat_template is not None:
        text = tokenizer.render_chat([{"role": "user", "content": prompt}])
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode(prompt)


def run_trial(config: EngineConfig, prompts: Sequence[list[int]], max_new_tokens: int) -> Trial:
    """Greedy outputs of all prompts at a time, first with ``speculative: false``.

    ``config`` drafts at fixed length. Raises what starting an engine raises, RefusedError for a
    prompt that does not fit, EngineDead.
    """
    params = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens)
    with LLM.from_config(config) as llm:
        plain = _outputs(llm, prompts, params, drafts=False)
        llm.flush_cache()
        before = llm.stats()
        results = llm.generate(list(prompts), params)
        after = llm.stats()
        outputs = [list(result.token_ids) for result in results]
        different = list(_divergences(llm, prompts, params, plain, outputs))
        finding = _exactness(llm, prompts, params, plain, different)
        info = llm.info
    drafted = _minus(after.spec_drafted_per_pos, before.spec_drafted_per_pos)
    accepted = _minus(after.spec_accepted_per_pos, before.spec_accepted_per_pos)
    return Trial(
        info=info,
        spec=speculation(before, after),
        table=positions(drafted, accepted),
        drafted=drafted,
        accepted=accepted,
        outputs=plain,
        stopped=len(results),
        looping=sum(loops(output) for output in plain),
        exactness=finding,
        divergences=different,
    )


def _outputs(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, drafts: bool
) -> list[list[int]]:
    results = llm.generate(list(prompts), params, speculative=drafts)
    return [list(result.token_ids) for result in results]


def _divergences(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    plain: Sequence[list[int]],
    others: Sequence[list[int]],
) -> Iterable[Divergence]:
    for number, (prompt, want, got) in enumerate(zip(prompts, plain, others, strict=True)):
        found = _divergence(llm, number, prompt, params, want, got)
        if found is not None:
            yield found


def _divergence(
    llm: LLM,
    number: int,
    prompt: list[int],
    params: SamplingParams,
    want: list[int],
    got: list[int],
) -> Divergence | None:
    return first_divergence(
        number, want, got, lambda at, a, b: logit_gap(llm, prompt, want[:at], params, a, b)
    )


def _exactness(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    plain: Sequence[list[int]],
    different: Sequence[Divergence],
) -> Finding:
    tokens = sum(map(len, plain))
    if not different:
        return Finding(
            _CHECK, "ok", f"{tokens} tokens of {len(plain)} outputs are those of plain decoding"
        )
    worst = max(divergence.gap for divergence in different)
    if worst < TIE_GAP:
        return Finding(
            _CHECK,
            "ok",
            f"{len(different)} of {len(plain)} outputs part from plain decoding at a tie: two "
            f"logits less than {TIE_GAP:g} apart",
        )
    if llm.info.dtype == "float32":
        return Finding(
            _CHECK,
            "failed",
            f"{len(different)} of {len(plain)} outputs differ from plain decoding, by logits "
            f"{worst:.3g} apart",
            "this must not happen whatever the draft is: please report it with both folders",
        )
    return _rounding(llm, prompts, params, plain, different, worst)


def _rounding(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    plain: Sequence[list[int]],
    different: Sequence[Divergence],
    worst: float,
) -> Finding:
    """Half precision rounds by the batch's shape: compare with what that does to plain decoding."""
    alone = [_outputs(llm, [prompt], params, drafts=False)[0] for prompt in prompts]
    gaps = [divergence.gap for divergence in _divergences(llm, prompts, params, plain, alone)]
    usual = max(gaps, default=0.0)
    found = (
        f"{len(different)} of {len(plain)} outputs part from plain decoding, by logits up to "
        f"{worst:.3g} apart; plain decoding alone and in a batch by up to {usual:.3g}"
    )
    if worst <= usual:
        return Finding(_CHECK, "ok", f"{found}: {llm.info.dtype} rounds by the batch")
    remedy = "run it with --dtype float32, in which they must be equal"
    return Finding(_CHECK, "warning", found, remedy)


def _minus(after: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    padded = [*before, *[0] * (len(after) - len(before))]
    return tuple(a - b for a, b in zip(after, padded, strict=True))
