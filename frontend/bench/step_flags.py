"""Engine flags that ``bench step`` and ``profile sps`` have no use for, and why: field by field."""

from typing import NamedTuple

from ...engine_core.config import EngineConfig
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


class Measuring(NamedTuple):
    """A command that times steps, and its flag for the lengths of random drafts."""

    command: str
    lengths: str

    @property
    def random(self) -> str:
        """Why it takes no drafter without a model."""
        return f"{self.command} verifies random drafts ({self.lengths}) where no model drafts"

    def not_ngram(self) -> dict[str, str]:
        """Fields that it has no use for, without those of NGRAM, of which there are many."""
        sizes = f"{self.command} sets it by itself, from the batch sizes; leave it out"
        text = f"{self.command} runs on token ids and answers nobody; leave it out"
        return {
            **dict.fromkeys(_SIZES, sizes),
            **dict.fromkeys(_TEXT, text),
            "grammar_threads": f"{self.command} has no requests with a grammar; leave it out",
            "speculative_length_policy": f"{self.command} drafts in every step; leave it out",
        }

    def absent(self) -> dict[str, str]:
        """All fields that it has no use for."""
        return {**self.not_ngram(), **dict.fromkeys(_NGRAM, f"{self.random}; leave it out")}


BENCH_STEP = Measuring("`bench step`", "--draft-lengths")
PROFILE_SPS = Measuring("`profile sps`", "--gamma")


def check_rounds(measuring: Measuring, config: EngineConfig, lengths_given: bool) -> None:
    """Speculation is that of a draft model, and takes no other drafts. Raises UsageError."""
    if config.speculative_algorithm is None:
        return
    spec = find_drafter(config.speculative_algorithm)
    if isinstance(spec, Refused) or not spec.has_model:
        raise UsageError(
            f"speculative_algorithm: {measuring.random}; name one with a draft model, or "
            "leave it out"
        )
    if lengths_given:
        raise UsageError(
            f"{measuring.lengths}: a draft model drafts --speculative-num-steps tokens; leave one "
            "out"
        )
