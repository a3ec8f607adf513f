"""Engine flags that ``bench step`` and ``profile sps`` have no use for, and why: field by field."""

from ...engine_core.config import EngineConfig, is_speculation
from ...engine_core.drafter_spec import find_drafter
from ...engine_core.refusal import Refused
from ..flags import UsageError

_SIZES = (
    "max_total_tokens",
    "max_running_requests",
    "max_queued_requests",
    "cuda_graph_max_bs",
)
_TEXT = ("skip_tokenizer_init", "tokenizer_path", "served_model_name", "stream_interval")
_NGRAM = tuple(
    name for name in EngineConfig.__struct_fields__ if name.startswith("speculative_ngram_")
)
_RANDOM = "`bench step` verifies random drafts (--draft-lengths) where no model drafts"


def _sizes_and_text(command: str) -> dict[str, str]:
    return {
        **dict.fromkeys(_SIZES, f"{command} sets it by itself, from the batch sizes; leave it out"),
        **dict.fromkeys(_TEXT, f"{command} runs on token ids and answers nobody; leave it out"),
    }


# Without those of NGRAM, of which there are many.
NOT_NGRAM = {
    **_sizes_and_text("`bench step`"),
    "speculative_length_policy": "`bench step` drafts in every step; leave it out",
}
ABSENT = {**NOT_NGRAM, **dict.fromkeys(_NGRAM, f"{_RANDOM}; leave it out")}
PROFILE_ABSENT = {
    **_sizes_and_text("`profile sps`"),
    **dict.fromkeys(
        filter(is_speculation, EngineConfig.__struct_fields__),
        "`profile sps` verifies random drafts; leave it out",
    ),
}


def check_rounds(config: EngineConfig, draft_lengths: list[int] | None) -> None:
    """Speculation is that of a draft model, and takes no other drafts. Raises UsageError."""
    if config.speculative_algorithm is None:
        return
    spec = find_drafter(config.speculative_algorithm)
    if isinstance(spec, Refused) or not spec.has_model:
        raise UsageError(
            f"speculative_algorithm: {_RANDOM}; name one with a draft model, or leave it out"
        )
    if draft_lengths is not None:
        raise UsageError(
            "--draft-lengths: a draft model drafts --speculative-num-steps tokens; leave one out"
        )
