"""Engine flags that ``bench step`` has no use for, and why: field by field."""

from ...engine_core.config import EngineConfig, is_speculation

_SIZES = (
    "max_total_tokens",
    "max_running_requests",
    "max_queued_requests",
    "cuda_graph_max_bs",
)
_TEXT = ("skip_tokenizer_init", "tokenizer_path", "served_model_name", "stream_interval")
_SPECULATION = tuple(filter(is_speculation, EngineConfig.__struct_fields__))
# Without those of speculation, of which there are many.
NOT_SPECULATION = {
    **dict.fromkeys(_SIZES, "`bench step` sets it by itself, from the batch sizes; leave it out"),
    **dict.fromkeys(_TEXT, "`bench step` runs on token ids and answers nobody; leave it out"),
}
ABSENT = {
    **NOT_SPECULATION,
    **dict.fromkeys(
        _SPECULATION, "`bench step` verifies random drafts (--draft-lengths); leave it out"
    ),
}
