"""What ``outrider train`` is asked for: the draft's shape, its data and how it learns."""

from typing import Literal

import msgspec

from .draft_config import MarkovKind, SpecShape

DEFAULT_UNROLL = 5
DEFAULT_BLOCK = {"DFLASH": 8, "DSPARK": 7}
LossKind = Literal["kl", "lk"]
BlockWeighting = Literal["decay", "dpace"]
OnPolicySource = Literal["engine", "dense"]


class TrainSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training run.

    Data. ``data``: files or folders (text, JSON lines, token ids; engine/training/token_files.py).
    ``selection_data``: files that nothing is learnt from; without any, documents whose SHA-1
    begins with a byte of ``selection_bytes`` are kept for it. Documents of ``excluded_bytes`` are
    left out altogether. ``on_policy_rows``: in so many rows of ``sequence_length`` tokens a prompt
    is followed by ``on_policy_tokens`` tokens of the target's own greedy text.
    ``on_policy_prompts``: how many tokens such prompts have, in turns; what room they leave is
    further prompts with their continuations, or text. None given: one that fills the row.
    ``on_policy_share``: such rows' part of a batch. ``prompt_weight``: weight in the loss of all
    text that is not the target's own.

    Draft. ``initial_draft``: folder of a draft of the same form, whose weights are the first ones;
    MLPs may be narrower than there, and a block draft may have further layers and another Markov
    head.
    ``unroll``: how many steps are drafted in training, each from the last one's output.
    ``feature_layers``: target layers whose entering streams EAGLE3, DFLASH and DSPARK take.
    ``draft_vocab_size``: the most frequent tokens only; None for all of them through the target's
    head (EAGLE3). ``block_size``: DFLASH's tokens of a block, the bonus token among them, or the
    tokens that DSPARK drafts. ``mask_token_id``: what stands in a block for tokens to come; None
    for the tokenizer's. ``sliding_window``: of the draft's ``sliding_layers``, all of them if none
    are named. ``markov_rank``, ``markov_head``: of DSPARK's head between the tokens of a block.

    Loss. ``hard_weight``: the part of the wanted distribution that is put on the target's first
    choice. A round of serving begins behind a token that was not foreseen: ``start_focus`` of the
    weight of drafts is by how improbable the target found the token that they begin behind, the
    rest is the same for all. ``step_decay`` to the power i weighs step i, times the probability
    that the steps before were accepted, of which ``survival_floor`` remains where one was wrong.
    ``feature_weight``: of EAGLE's smooth L1 loss on features. Block drafts learn from blocks behind
    ``anchors`` tokens of a row. ``block_weighting``: "decay", by which a block's tokens weigh
    exp(-i / ``decay_gamma``), or "dpace", by the draft's own chance of being accepted up to them,
    smoothed by ``dpace_alpha``. ``ce_weight``, ``l1_weight``, ``confidence_weight``: the parts of
    DSPARK's loss. ``confidence_greedy``: how far its confidence is of greedy decoding, where a
    draft is accepted or not, instead of rejection sampling's acceptance probability.

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
    block_size: int | None = None
    mask_token_id: int | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    markov_rank: int | None = None
    markov_head: MarkovKind = "vanilla"
    # Loss
    loss: LossKind = "kl"
    hard_weight: float = 0.5
    start_focus: float = 0.6
    step_decay: float = 1.0
    survival_floor: float = 0.3
    feature_weight: float = 0.1
    anchors: int = 64
    block_weighting: BlockWeighting | None = None
    decay_gamma: float = 4.0
    dpace_alpha: float = 0.5
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    confidence_greedy: float = 1.0
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


def is_block(spec: TrainSpec) -> bool:
    """Whether it is a block draft's."""
    return spec.algorithm in DEFAULT_BLOCK


def unroll_of(spec: TrainSpec) -> int:
    """Tokens that training drafts, one after the other or as a block."""
    if is_block(spec):
        size = DEFAULT_BLOCK[spec.algorithm] if spec.block_size is None else spec.block_size
        return size - 1 if spec.algorithm == "DFLASH" else size
    return DEFAULT_UNROLL if spec.unroll is None else spec.unroll


def weighting_of(spec: TrainSpec) -> BlockWeighting:
    """How a block's tokens are weighed."""
    return spec.block_weighting or ("dpace" if spec.algorithm == "DFLASH" else "decay")


def serving_shape(spec: TrainSpec) -> SpecShape:
    """How the draft's config.json says that it serves best."""
    steps = unroll_of(spec) if spec.draft_steps is None else spec.draft_steps
    nodes = steps + 1 if spec.num_draft_tokens is None else spec.num_draft_tokens
    return SpecShape(steps, spec.topk, nodes)
