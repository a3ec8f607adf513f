"""What ``outrider train`` is asked for: the draft's shape, its data and how it learns."""

from typing import Literal

import msgspec

from .draft_config import SpecShape
from .refusal import Refused
from .spec_shape import refuse_shape

DEFAULT_UNROLL = 5
LossKind = Literal["kl", "lk"]
OnPolicySource = Literal["engine", "dense"]
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "draft_vocab_size",
)


class TrainSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training run.

    Data. ``data``: files or folders (text, JSON lines, token ids; engine/training/token_files.py).
    ``selection_data``: files that nothing is learnt from; without any, documents whose SHA-1
    begins with a byte of ``selection_bytes`` are kept for it. Documents of ``excluded_bytes`` are
    left out altogether. ``on_policy_rows``: in so many rows of ``sequence_length`` tokens a prompt
    is followed by ``on_policy_tokens`` tokens of the target's own greedy text.
    ``on_policy_prompts``: how many tokens such prompts have, in turns; what room they leave is
    another prompt with its continuation, or text. None given: one that fills the row.
    ``on_policy_share``: such rows' part of a batch. ``prompt_weight``: weight in the loss of all
    text that is not the target's own.

    Draft. ``initial_draft``: folder of a draft of the same form, whose weights are the first ones.
    ``unroll``: how many steps are drafted in training, each from the last one's output.
    ``feature_layers``: target layers whose entering streams EAGLE3 takes. ``draft_vocab_size``: the
    most frequent tokens only; None for all of them through the target's head (EAGLE3).

    Loss. ``hard_weight``: the part of the wanted distribution that is put on the target's first
    choice. ``step_decay`` to the power i weighs step i, times the probability that the steps
    before were accepted, of which ``survival_floor`` remains where one was wrong.
    ``feature_weight``: of EAGLE's smooth L1 loss on features.

    Time. ``steps`` or ``minutes`` set the schedule's end; ``max_minutes`` ends this command early,
    to be continued with ``resume``.
    """

    algorithm: str
    model: str
    data: tuple[str, ...]
    output: str
    resume: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool | None = None
    seed: int = 0
    # Data
    selection_data: tuple[str, ...] = ()
    selection_bytes: tuple[int, ...] = (8,)
    excluded_bytes: tuple[int, ...] = (7,)
    sequence_length: int = 512
    on_policy_rows: int = 0
    on_policy_tokens: int = 192
    on_policy_prompts: tuple[int, ...] = ()
    on_policy_share: float = 0.8
    on_policy_source: OnPolicySource = "engine"
    on_policy_cache: str | None = None
    selection_rows: int = 512
    prompt_weight: float = 0.3
    # Draft
    initial_draft: str | None = None
    unroll: int | None = None
    feature_layers: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    own_head: bool = False
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    # Loss
    loss: LossKind = "kl"
    hard_weight: float = 0.5
    step_decay: float = 1.0
    survival_floor: float = 0.3
    feature_weight: float = 0.1
    # Optimisation
    batch_size: int = 128
    optimizer: Literal["muon", "adamw"] = "muon"
    matrix_lr: float = 0.02
    adam_lr: float = 3e-3
    weight_decay: float = 0.0
    warmup: float = 0.01
    decay: float = 0.6
    schedule: Literal["linear", "cosine"] = "linear"
    grad_clip: float = 1.0
    ema: float = 0.0
    # Time
    steps: int | None = None
    minutes: float | None = None
    max_minutes: float | None = None
    checkpoint_minutes: float = 5.0
    log_every: int = 20
    selection_every: int = 500
    # Export
    draft_steps: int | None = None
    topk: int = 1
    num_draft_tokens: int | None = None


_COUNTS = ("steps", "batch_size", "log_every", "selection_every", "selection_rows")
_ABOVE_0 = (
    "minutes",
    "max_minutes",
    "checkpoint_minutes",
    "matrix_lr",
    "adam_lr",
    "prompt_weight",
    "step_decay",
    "grad_clip",
)
_FROM_0 = ("seed", "feature_weight", "weight_decay")
_PARTS = (
    "on_policy_share",
    "prompt_weight",
    "hard_weight",
    "survival_floor",
    "warmup",
    "decay",
    "ema",
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
    unused: tuple[tuple[str, bool, str], ...] = (
        ("on_policy_tokens", not spec.on_policy_rows, without_rows),
        ("on_policy_prompts", not spec.on_policy_rows, without_rows),
        ("on_policy_share", not spec.on_policy_rows, without_rows),
        ("on_policy_source", not spec.on_policy_rows, without_rows),
        ("on_policy_cache", not spec.on_policy_rows, without_rows),
        ("matrix_lr", spec.optimizer != "muon", without_muon),
        ("weight_decay", spec.optimizer != "muon", without_muon),
        ("feature_weight", spec.algorithm in ("EAGLE3", "STANDALONE"), "is EAGLE's alone"),
    )
    defaults = {field.name: field.default for field in msgspec.structs.fields(TrainSpec)}
    for name, idle, reason in unused:
        if idle and getattr(spec, name) != defaults[name]:
            return Refused(name, f"{reason}; leave it out")
    return None


def _refuse_lengths(spec: TrainSpec) -> Refused | None:
    unroll = unroll_of(spec)
    if unroll > 16:
        return Refused("unroll", f"must be 1 to 16, is {unroll}")
    if spec.sequence_length < unroll + 2:
        return Refused(
            "sequence_length", f"must be {unroll + 2} or more with an unroll of {unroll}"
        )
    if spec.on_policy_rows < 0:
        return Refused("on_policy_rows", f"must be 0 or more, is {spec.on_policy_rows}")
    if spec.on_policy_rows and not unroll < spec.on_policy_tokens < spec.sequence_length:
        return Refused(
            "on_policy_tokens",
            f"must be above the unroll ({unroll}) and below sequence_length "
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
    return None


def _refuse_serving(spec: TrainSpec) -> Refused | None:
    """A shape that the trained draft could not be served with."""
    if spec.topk != 1 and spec.num_draft_tokens is None:
        return Refused("num_draft_tokens", "a tree (topk above 1) needs it")
    refused = refuse_shape(serving_shape(spec))
    if refused is None:
        return None
    field = {"steps": "draft_steps"}.get(refused.field, refused.field)
    return Refused(field, refused.reason)


def unroll_of(spec: TrainSpec) -> int:
    """Steps that training drafts."""
    return DEFAULT_UNROLL if spec.unroll is None else spec.unroll


def serving_shape(spec: TrainSpec) -> SpecShape:
    """How the draft's config.json says that it serves best."""
    steps = unroll_of(spec) if spec.draft_steps is None else spec.draft_steps
    nodes = steps + 1 if spec.num_draft_tokens is None else spec.num_draft_tokens
    return SpecShape(steps, spec.topk, nodes)
