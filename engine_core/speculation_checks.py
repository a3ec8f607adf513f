"""The flags of speculation, checked before anything is loaded."""

from typing import TYPE_CHECKING

import msgspec

from .accept_rules import refuse_rule
from .block_shape import BLOCK_FLAGS, refuse_block
from .drafter_spec import (
    MAX_DRAFT_TOKENS,
    MIN_DRAFT_TOKENS,
    NGRAM,
    NGRAM_BY_SOURCE,
    DrafterSpec,
    find_drafter,
)
from .ragged_verify import refuse_ragged
from .refusal import Refused
from .spec_shape import given_shape, refuse_drawn_tree, refuse_simulation, refuse_survival

if TYPE_CHECKING:
    from .config import EngineConfig


_DRAFT_MODEL_FIELDS = (
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_load_format",
    "speculative_draft_model_quantization",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_token_map",
)
_NO_TOKEN_MAP = {
    "EAGLE3": "EAGLE3's draft vocabulary is in its checkpoint (d2t); leave it out",
    "STANDALONE": "STANDALONE drafts from its whole vocabulary; leave it out",
    "DFLASH": "DFLASH drafts by the target's whole head; leave it out",
    "DSPARK": "DSPARK drafts by the target's whole head; leave it out",
}
_DRAFT_MODEL = "a draft model, which only STANDALONE, EAGLE, EAGLE3, DFLASH and DSPARK have"


def refuse_speculation(config: "EngineConfig") -> Refused | None:
    """Check by itself what belongs to speculation; a flag of another algorithm is refused."""
    if config.speculative_algorithm is None:
        for field in _changed(config, "speculative_"):
            if field.startswith("speculative_ngram_"):
                return _needs_ngram(field)
            return Refused(field, "needs --speculative-algorithm; name one or leave this out")
        for field in _changed(config, "simulate_"):
            return Refused(field, "needs --speculative-algorithm; name one or leave this out")
        return None
    spec = find_drafter(config.speculative_algorithm)
    if isinstance(spec, Refused):
        return spec
    if spec is not NGRAM:
        for field in _changed(config, "speculative_ngram_"):
            return _needs_ngram(field)
    for algorithm, (field, _) in BLOCK_FLAGS.items():
        if spec.name != algorithm and getattr(config, field) is not None:
            return Refused(field, f"needs --speculative-algorithm {algorithm}; leave it out")
    window = config.speculative_draft_window_size
    if window is not None and spec.name not in BLOCK_FLAGS:
        return Refused(
            "speculative_draft_window_size",
            f"is of DFLASH and DSPARK, whose drafts keep a window alone; {spec.name} has "
            f"{'KV of the whole context' if spec.has_model else 'no KV of its own'}; leave it out",
        )
    if window is not None and window < 1:
        return Refused("speculative_draft_window_size", f"must be 1 or more, got {window}")
    sourced = NGRAM_BY_SOURCE[config.speculative_ngram_source] if spec is NGRAM else spec
    refused = refuse_ragged(config, sourced)
    if refused is not None:
        return refused
    refused = refuse_survival(config, spec)
    if refused is not None:
        return refused
    refused = refuse_rule(config, spec)
    if refused is not None:
        return refused
    given = config.speculative_num_draft_tokens
    width = spec.default_num_draft_tokens if given is None else given
    if not MIN_DRAFT_TOKENS <= width <= MAX_DRAFT_TOKENS:
        alone = (
            " (the bonus token alone, which leaves no draft); ask for 2 or more"
            if width == 1
            else ""
        )
        return Refused(
            "speculative_num_draft_tokens",
            f"must be between {MIN_DRAFT_TOKENS} and {MAX_DRAFT_TOKENS}, got {width}{alone}",
        )
    if spec.has_model:
        return _refuse_draft_model(config, spec)
    if not spec.host and config.tp_size > 1:
        return Refused(
            "tp_size",
            f"{spec.name} drafts on the device, from a target of one rank so far; use 1, or a "
            "drafter on the host",
            501,
        )
    for field in _DRAFT_MODEL_FIELDS:
        if getattr(config, field) is not None:
            return Refused(field, f"belongs to {_DRAFT_MODEL}, {spec.name} does not; leave it out")
    refused = refuse_simulation(config, width)
    if refused is not None or spec is not NGRAM:
        return refused
    return _refuse_ngram(config, width)


def _refuse_draft_model(config: "EngineConfig", spec: DrafterSpec) -> Refused | None:
    """What can be known before the draft and its target are."""
    if config.tp_size > 1:
        return Refused(
            "tp_size",
            f"{spec.name}: a draft model runs beside a target of one rank so far; use 1, or "
            "--speculative-algorithm NGRAM",
            501,
        )
    path = config.speculative_draft_model_path
    if path is None and config.speculative_draft_model_revision is not None:
        return Refused(
            "speculative_draft_model_revision",
            "needs --speculative-draft-model-path; name a Hugging Face id or leave this out",
        )
    if config.speculative_token_map is not None and spec.name in _NO_TOKEN_MAP:
        return Refused("speculative_token_map", _NO_TOKEN_MAP[spec.name])
    rounds = spec.name in ("EAGLE", "EAGLE3")
    if config.speculative_draft_model_quantization is not None and not rounds:
        return Refused(
            "speculative_draft_model_quantization",
            f"is of EAGLE and EAGLE3; a {spec.name} draft runs as its checkpoint is; leave it out",
        )
    if spec.name in BLOCK_FLAGS:
        return refuse_block(config, spec.name)
    shape = given_shape(config)
    if shape is None:
        # The draft's config.json decides; no row has more nodes than this.
        return refuse_simulation(config, MAX_DRAFT_TOKENS)
    if isinstance(shape, Refused):
        return shape
    return refuse_drawn_tree(config, shape) or refuse_simulation(config, shape.steps + 1)


def _changed(config: "EngineConfig", prefix: str) -> list[str]:
    """Fields that start so and do not have their default."""
    return [
        field.name
        for field in msgspec.structs.fields(config)
        if field.name.startswith(prefix) and getattr(config, field.name) != field.default
    ]


def _needs_ngram(field: str) -> Refused:
    return Refused(field, "needs --speculative-algorithm NGRAM; leave it out")


def _refuse_ngram(config: "EngineConfig", width: int) -> Refused | None:
    low, high = config.speculative_ngram_min_bfs_breadth, config.speculative_ngram_max_bfs_breadth
    depth = config.speculative_ngram_max_trie_depth
    budget = config.speculative_ngram_external_sam_budget
    checks: tuple[tuple[str, bool, str], ...] = (
        (
            "speculative_ngram_max_bfs_breadth",
            1 <= high < 2**31,
            "must be between 1 and 2147483647",
        ),
        (
            "speculative_ngram_min_bfs_breadth",
            1 <= low <= high,
            f"must be between 1 and max_bfs_breadth = {high}",
        ),
        ("speculative_ngram_max_trie_depth", 2 <= depth <= 64, "must be between 2 and 64"),
        (
            "speculative_ngram_capacity",
            depth < config.speculative_ngram_capacity < 2**31,
            f"must exceed the trie depth of {depth} and be at most 2147483647",
        ),
        (
            "speculative_ngram_external_sam_budget",
            0 <= budget <= width - 1,
            f"must be between 0 and num_draft_tokens - 1 = {width - 1}",
        ),
        (
            "speculative_ngram_external_corpus_max_tokens",
            config.speculative_ngram_external_corpus_max_tokens >= 1,
            "must be 1 or more",
        ),
    )
    for field, ok, reason in checks:
        if not ok:
            return Refused(field, f"{reason}, got {getattr(config, field)}")
    if config.speculative_ngram_source == "gpu":
        return _refuse_trie_flags(config)
    if config.speculative_ngram_external_corpus_path is not None and budget == 0:
        return Refused(
            "speculative_ngram_external_sam_budget",
            "must be 1 or more when an external corpus is given",
        )
    if config.speculative_ngram_external_corpus_path is not None and config.skip_tokenizer_init:
        return Refused(
            "speculative_ngram_external_corpus_path",
            "needs the tokenizer that --skip-tokenizer-init leaves out; leave one out",
        )
    return None


def _refuse_trie_flags(config: "EngineConfig") -> Refused | None:
    """Flags of the trie, which the match on the device does not have."""
    shared = ("speculative_ngram_source", "speculative_ngram_max_trie_depth")
    for field in _changed(config, "speculative_ngram_"):
        if field not in shared:
            return Refused(
                field,
                "belongs to the trie on the host; leave it out, or use --speculative-ngram-source "
                "cpu or both",
            )
    return None
