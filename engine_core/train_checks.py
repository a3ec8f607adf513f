"""Why a training run cannot be, by its spec alone."""

import msgspec

from .refusal import Refused
from .spec_shape import refuse_shape
from .train_spec import TrainSpec, is_block, serving_shape, unroll_of, weighting_of

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "draft_vocab_size",
    "block_size",
    "sliding_window",
    "markov_rank",
)
_COUNTS = ("steps", "batch_size", "log_every", "selection_every", "selection_rows", "anchors")
_ABOVE_0 = (
    "minutes",
    "max_minutes",
    "checkpoint_minutes",
    "matrix_lr",
    "adam_lr",
    "prompt_weight",
    "step_decay",
    "grad_clip",
    "decay_gamma",
)
_FROM_0 = (
    "seed",
    "feature_weight",
    "weight_decay",
    "ce_weight",
    "l1_weight",
    "confidence_weight",
)
_PARTS = (
    "on_policy_share",
    "prompt_weight",
    "hard_weight",
    "survival_floor",
    "start_focus",
    "dpace_alpha",
    "confidence_greedy",
    "warmup",
    "decay",
    "ema",
)


_OF_STEPS = ("unroll", "step_decay", "feature_weight", "draft_steps", "topk", "num_draft_tokens")
_OF_BLOCKS = (
    "block_size",
    "mask_token_id",
    "sliding_window",
    "sliding_layers",
    "anchors",
    "block_weighting",
    "decay_gamma",
    "dpace_alpha",
)
_OF_DSPARK = (
    "markov_rank",
    "markov_head",
    "ce_weight",
    "l1_weight",
    "confidence_weight",
    "confidence_greedy",
)


def refuse_train(spec: TrainSpec) -> Refused | None:
    """Why the spec cannot be trained by, whatever its model and data are."""
    if spec.steps is None and spec.minutes is None:
        return Refused("minutes", "give --minutes or --steps: how long the schedule lasts")
    if spec.steps is not None and spec.minutes is not None:
        return Refused("steps", "the schedule ends by --steps or by --minutes, not by both")
    return (
        _refuse_values(spec)
        or _refuse_schedule(spec)
        or _refuse_split(spec)
        or _refuse_unused(spec)
        or _refuse_lengths(spec)
        or _refuse_serving(spec)
    )


def _refuse_values(spec: TrainSpec) -> Refused | None:
    """Flags out of their range; the comparisons are false for NaN."""
    for name in (*_COUNTS, "unroll", *_SIZES):
        value = getattr(spec, name)
        if value is not None and value < 1:
            return Refused(name, f"must be 1 or more, is {value}")
    for name in _ABOVE_0:
        value = getattr(spec, name)
        if value is not None and not value > 0:
            return Refused(name, f"must be above 0, is {value}")
    for name in _FROM_0:
        value = getattr(spec, name)
        if not value >= 0:
            return Refused(name, f"must be 0 or more, is {value}")
    if spec.algorithm == "DSPARK" and not spec.ce_weight + spec.l1_weight:
        return Refused("l1_weight", "is 0 like ce_weight: nothing would be learnt; raise either")
    for name in _PARTS:
        value = getattr(spec, name)
        if not 0.0 <= value <= 1.0:
            return Refused(name, f"must be between 0 and 1, is {value}")
    return None


def _refuse_schedule(spec: TrainSpec) -> Refused | None:
    if spec.ema == 1.0:
        return Refused("ema", "must be below 1, where the average never leaves the first weights")
    if spec.warmup + spec.decay > 1.0:
        return Refused(
            "decay", f"{spec.decay} and a warmup of {spec.warmup} exceed the schedule; lower either"
        )
    return None


def _refuse_split(spec: TrainSpec) -> Refused | None:
    for name in ("selection_bytes", "excluded_bytes"):
        wrong = next((value for value in getattr(spec, name) if not 0 <= value < 256), None)
        if wrong is not None:
            return Refused(name, f"{wrong} is no byte; give values from 0 to 255")
    both = sorted(set(spec.selection_bytes) & set(spec.excluded_bytes))
    if both:
        return Refused(
            "selection_bytes", f"{both[0]} is among the excluded bytes too; name it in one of them"
        )
    return None


def _refuse_unused(spec: TrainSpec) -> Refused | None:
    """A flag that would change nothing beside the others."""
    without_rows = "needs --on-policy-rows, without which there is no such text"
    without_muon = "is Muon's; it needs --optimizer muon"
    block, of_dspark = is_block(spec), spec.algorithm == "DSPARK"
    of_steps = f"is of drafts step by step; {spec.algorithm} drafts a block (--block-size)"
    of_blocks, of_dspark_alone = "is DFLASH's and DSPARK's", "is DSPARK's alone"
    dpace = weighting_of(spec) == "dpace"
    unused: tuple[tuple[str, bool, str], ...] = (
        ("on_policy_tokens", not spec.on_policy_rows, without_rows),
        ("on_policy_prompts", not spec.on_policy_rows, without_rows),
        ("on_policy_share", not spec.on_policy_rows, without_rows),
        ("on_policy_source", not spec.on_policy_rows, without_rows),
        ("on_policy_cache", not spec.on_policy_rows, without_rows),
        ("matrix_lr", spec.optimizer != "muon", without_muon),
        ("weight_decay", spec.optimizer != "muon", without_muon),
        ("feature_weight", spec.algorithm in ("EAGLE3", "STANDALONE"), "is EAGLE's alone"),
        ("start_focus", spec.algorithm == "STANDALONE", "is of drafts that read the target"),
        *((name, block, of_steps) for name in _OF_STEPS),
        *((name, not block, of_blocks) for name in _OF_BLOCKS),
        *((name, not of_dspark, of_dspark_alone) for name in _OF_DSPARK),
        ("loss", of_dspark, "is for other drafts; DSPARK has --ce-weight and --l1-weight"),
        ("sliding_layers", spec.sliding_window is None, "needs --sliding-window"),
        ("dpace_alpha", not dpace, "needs --block-weighting dpace"),
        ("decay_gamma", dpace and not of_dspark, "needs --block-weighting decay"),
    )
    defaults = {field.name: field.default for field in msgspec.structs.fields(TrainSpec)}
    for name, idle, reason in unused:
        if idle and getattr(spec, name) != defaults[name]:
            return Refused(name, f"{reason}; leave it out")
    return None


def _refuse_lengths(spec: TrainSpec) -> Refused | None:
    unroll = unroll_of(spec)
    if unroll < 1:
        return Refused("block_size", "must be 2 or more: the bonus token is one of them")
    if unroll > 16 and not is_block(spec):
        return Refused("unroll", f"must be 1 to 16, is {unroll}")
    drafted = f"{unroll} drafted tokens" if is_block(spec) else f"an unroll of {unroll}"
    if spec.sequence_length < unroll + 2:
        return Refused("sequence_length", f"must be {unroll + 2} or more with {drafted}")
    if spec.on_policy_rows < 0:
        return Refused("on_policy_rows", f"must be 0 or more, is {spec.on_policy_rows}")
    if spec.on_policy_rows and not unroll < spec.on_policy_tokens < spec.sequence_length:
        return Refused(
            "on_policy_tokens",
            f"must be above {unroll} with {drafted}, and below sequence_length "
            f"({spec.sequence_length}), is {spec.on_policy_tokens}",
        )
    longest = spec.sequence_length - spec.on_policy_tokens
    if not all(1 <= prompt <= longest for prompt in spec.on_policy_prompts):
        return Refused(
            "on_policy_prompts",
            f"each must be 1 to {longest}, what sequence_length leaves beside on_policy_tokens; "
            f"are {list(spec.on_policy_prompts)}",
        )
    if len(spec.on_policy_prompts) > max(1, spec.on_policy_rows):
        return Refused("on_policy_prompts", "are more than there are on_policy_rows to have them")
    if spec.on_policy_rows and len(spec.on_policy_prompts) > spec.selection_rows:
        return Refused(
            "selection_rows", "are fewer than on_policy_prompts, each of which needs one"
        )
    return None


def _refuse_serving(spec: TrainSpec) -> Refused | None:
    """A shape that the trained draft could not be served with."""
    if spec.topk != 1 and spec.num_draft_tokens is None:
        return Refused("num_draft_tokens", "a tree (topk above 1) needs it")
    refused = refuse_shape(serving_shape(spec))
    if refused is None:
        return None
    steps = "block_size" if is_block(spec) else "draft_steps"
    field = {"steps": steps}.get(refused.field, refused.field)
    return Refused(field, refused.reason)
