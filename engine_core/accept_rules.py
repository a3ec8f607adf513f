"""By which rule sampled drafts are accepted, and what that rule does not go with."""

from typing import TYPE_CHECKING, Literal

from .drafter_spec import DrafterSpec
from .refusal import Refused

if TYPE_CHECKING:
    from .config import EngineConfig

AcceptRule = Literal["coupled", "threshold", "rejection", "block"]
DRAWING: frozenset[AcceptRule] = frozenset(("rejection", "block"))  # they know q

_REJECTION = "speculative_use_rejection_sampling"
_BLOCK = "speculative_use_block_verification"
_THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def drawing_flag(config: "EngineConfig") -> str:
    """The field by which drafts are drawn, of configurations that draw them."""
    return _REJECTION if config.speculative_use_rejection_sampling else _BLOCK


def rule_notes(config: "EngineConfig") -> list[str]:
    """What to tell the user of a rule that gives up the promise of the others."""
    return [
        f"{field}: {getattr(config, field)} is lossy: what sampled requests with drafts emit is "
        "not the target's distribution (greedy requests stay exact)"
        for field in _THRESHOLDS
        if getattr(config, field) < 1.0
    ]


def refuse_rule(config: "EngineConfig", spec: DrafterSpec) -> Refused | None:
    """Flags of a rule that go neither with the drafter nor with each other."""
    for field in _THRESHOLDS:
        value: float = getattr(config, field)
        if not 0.0 <= value <= 1.0:
            return Refused(field, f"must be between 0 and 1, got {value}")
        if value < 1.0 and config.draws_drafts:
            return Refused(
                field,
                f"is of drafts that the target alone judges; leave it out, or "
                f"--{drawing_flag(config).replace('_', '-')}",
            )
    if not config.draws_drafts:
        return None
    return _refuse_drawing(drawing_flag(config), spec) or _refuse_blocks(config)


def _refuse_drawing(field: str, spec: DrafterSpec) -> Refused | None:
    """Drafts that were not drawn, or of which nobody knows how."""
    if not spec.gives_q:
        return Refused(
            field,
            f"needs drafts that were drawn with a known probability; {spec.name} has none; leave "
            "it out: without it sampled drafts are accepted by the coupled rule, which keeps the "
            "target's distribution too",
        )
    if spec.tree and not spec.has_model:
        return Refused(field, f"is for chains, and {spec.name} drafts trees; leave it out")
    return None


def _refuse_blocks(config: "EngineConfig") -> Refused | None:
    """Caps that come after the drafts: they keep the law where drafts are judged one by one, which
    nobody has shown of blocks."""
    mode = config.speculative_ragged_verify_mode
    if not config.speculative_use_block_verification or mode in (None, "static"):
        return None
    return Refused(
        _BLOCK,
        f"decides about all of a row's drafts together, and mode {mode} takes some of them away by "
        "what was drafted; use --speculative-ragged-verify-mode static, or "
        "--speculative-use-rejection-sampling alone",
    )
