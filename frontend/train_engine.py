"""What training asks of the engine: the target's own text, and a draft's accept length."""

from collections.abc import Sequence

import msgspec

from ..engine_core.refusal import RefusedError
from ..engine_core.train_spec import TrainSpec
from .errors import OutriderError
from .flags import UsageError
from .llm import LLM
from .results import GenerationResult

_MEASURED_TOKENS = 128


class Measured(msgspec.Struct, frozen=True):
    """``accept_length``: tokens of verify steps over those steps, pooled over all prompts."""

    accept_length: float
    tokens: int


def answer_prompts(
    spec: TrainSpec, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    """The target's greedy continuation of each prompt, exactly ``new_tokens`` long."""
    with LLM(spec.model, device=spec.device, skip_tokenizer_init=True) as llm:
        return [list(result.outputs[0].token_ids) for result in _greedy(llm, prompts, new_tokens)]


def measure_draft(
    spec: TrainSpec, prompts: Sequence[Sequence[int]], new_tokens: int = _MEASURED_TOKENS
) -> Measured | str:
    """The draft's accept length on greedy continuations, all its steps drafted wherever there is
    room; why not, if the engine refuses it.
    """
    try:
        llm = LLM(
            spec.model,
            device=spec.device,
            skip_tokenizer_init=True,
            speculative_algorithm=spec.algorithm,
            speculative_draft_model_path=spec.output,
            speculative_length_policy="fixed",  # as accept lengths are defined, and projected
        )
    except (RefusedError, OutriderError, UsageError) as error:
        return str(error)
    with llm:
        results = _greedy(llm, prompts, new_tokens)
    rounds, verified = 0.0, 0.0
    for result in results:
        meta = result.outputs[0].meta_info
        steps = _number(meta, "spec_verify_ct")
        rounds += steps
        verified += steps * _number(meta, "spec_accept_length")
    tokens = sum(len(result.outputs[0].token_ids) for result in results)
    return Measured(verified / rounds if rounds else 1.0, tokens)


def _greedy(llm: LLM, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[GenerationResult]:
    return llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        temperature=0.0,
        max_new_tokens=new_tokens,
        ignore_eos=True,
    )


def _number(meta: dict[str, object], name: str) -> float:
    value = meta.get(name, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
