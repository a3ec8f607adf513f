"""The model card of a trained draft."""

from ...engine_core.sts_table import StsTable
from ...engine_core.train_spec import TrainSpec, is_block, unroll_of
from .export import tensor_bytes
from .recipe import Exported
from .trainer import Outcome


def model_card(
    spec: TrainSpec,
    exported: Exported,
    outcome: Outcome,
    own_tokens: int,
    corpus_tokens: int,
    sts: StsTable | None,
) -> str:
    """README.md of the draft's folder."""
    drafted = (
        f"{spec.anchors} blocks of {unroll_of(spec)} drafts a row"
        if is_block(spec)
        else f"unroll of {unroll_of(spec)}"
    )
    numbers = sum(
        tensor.numel() for name, tensor in exported.tensors.items() if name not in ("d2t", "t2d")
    )
    serving = exported.config["outrider"]
    assert isinstance(serving, dict)
    minutes = outcome.position.seconds / 60.0
    lines = [
        f"# A draft for {spec.model}: {spec.algorithm}",
        "",
        f"Made by `outrider train --algorithm {spec.algorithm} --model {spec.model}`. It guesses "
        "tokens that the target then checks; it is of no use alone."
        if spec.algorithm != "STANDALONE"
        else f"Made by `outrider train --algorithm STANDALONE --model {spec.model}`.",
        "",
        f"- {numbers / 1e6:.2f} M parameters of its own, "
        f"{tensor_bytes(exported.tensors) / 1e6:.2f} MB in bfloat16.",
        f"- Serving shape: {serving['steps']} steps, topk {serving['topk']}, "
        f"{serving['num_draft_tokens']} draft tokens.",
        f"- Data: {corpus_tokens / 1e6:.1f} M tokens of text and {own_tokens / 1e6:.1f} M tokens "
        f"of the target's own greedy text, {spec.on_policy_tokens} after each prompt. "
        f"Documents whose SHA-1 begins with {_bytes(spec.excluded_bytes)} were left out, those "
        f"with {_bytes(spec.selection_bytes)} kept for the selection.",
        f"- Training: {outcome.position.step} steps of {spec.batch_size} x "
        f"{spec.sequence_length} tokens in {minutes:.1f} minutes, {drafted}, {spec.optimizer}.",
    ]
    found = outcome.selection
    if found is not None:
        rates = ", ".join(f"{rate:.3f}" for rate in found.per_step)
        lines.append(
            f"- Selection split, teacher-forced: accepted step by step {rates}; projected accept "
            f"length {found.projected:.2f}"
            + ("" if found.walked is None else f", over greedy text {found.walked:.2f}")
            + "."
        )
    if sts is not None and sts.ece_before is not None and sts.ece_after is not None:
        lines.append(
            f"- `sts.json` calibrates its confidence: expected calibration error up to "
            f"{max(sts.ece_before):.3f} without it, {max(sts.ece_after):.3f} with it, on rows of "
            "the selection that it was not fitted to."
        )
    if not outcome.finished:
        lines.append("- The schedule was cut before its end: an intermediate state.")
    return "\n".join(lines) + "\n"


def _bytes(values: tuple[int, ...]) -> str:
    return " or ".join(f"byte {value}" for value in values) if values else "no byte"
