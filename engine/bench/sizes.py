"""How large an engine must be for the steps that are to be measured."""

import msgspec

from ...engine_core.config import EngineConfig
from ...engine_core.memory_parts import OVERRUN_TOKENS
from ...engine_core.refusal import Refused
from ...engine_core.step_bench import StepBenchSpec

WARM_UP_STEPS = 8
_SPARE_PAGES = 4  # of a request: rounding, and steps in flight


def new_tokens(spec: StepBenchSpec, batch_size: int, context: int) -> int:
    """Tokens that a request must be able to generate: those entered first decode meanwhile."""
    steps = entry_steps(spec, batch_size, context) + WARM_UP_STEPS + spec.steps + 4
    return steps * round_tokens(spec)


def round_tokens(spec: StepBenchSpec) -> int:
    """Most tokens that a request gets of a step of the engine's loop; ``spec`` is resolved."""
    if spec.config.speculative_algorithm is None:
        return 1
    return spec.config.speculative_num_draft_tokens or 1


def entry_steps(spec: StepBenchSpec, batch_size: int, context: int) -> int:
    """Most steps until the prompts of a batch are in."""
    chunk = spec.config.chunked_prefill_size
    return 4 + batch_size + (0 if chunk == -1 else 2 * (batch_size * context // chunk))


def verify_tokens(spec: StepBenchSpec, context: int) -> int:
    """The longest that a request gets when every draft is accepted."""
    return context + (spec.steps + WARM_UP_STEPS + 2) * (1 + max(spec.draft_lengths))


def sized(spec: StepBenchSpec, context_length: int) -> EngineConfig | Refused:
    """The engine's configuration with slots and KV for the largest batch at each length."""
    page = spec.config.page_size
    largest = 0
    for context in spec.contexts:
        for batch_size in spec.batch_sizes:
            # Two steps in flight write behind the last token, a draft's tree up to 64 each.
            beyond = 0 if round_tokens(spec) == 1 else OVERRUN_TOKENS
            longest = context + new_tokens(spec, batch_size, context) + beyond
            if max(spec.draft_lengths) > 0:
                longest = max(longest, verify_tokens(spec, context))
            if longest > context_length:
                return Refused(
                    "context",
                    f"{context}: requests grow to {longest} tokens at batch size {batch_size}, "
                    f"past the model's {context_length}; ask for less, for fewer steps or raise "
                    "--chunked-prefill-size",
                )
            largest = max(largest, batch_size * (-(-longest // page) + _SPARE_PAGES))
    for length in spec.prefill_lengths:
        if length >= context_length:
            return Refused(
                "prefill_lengths",
                f"{length}: a prompt and its token are past the model's {context_length}; ask for "
                "less",
            )
        largest = max(largest, max(spec.batch_sizes) * (-(-(length + 1) // page) + _SPARE_PAGES))
    return msgspec.structs.replace(
        spec.config,
        max_total_tokens=largest * page,
        max_running_requests=max(spec.batch_sizes),
        skip_tokenizer_init=True,
    )
