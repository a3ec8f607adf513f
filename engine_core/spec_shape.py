"""How much a draft model drafts a round: from flags, the draft's own defaults, or a table."""

from typing import TYPE_CHECKING

from .accept_rules import drawing_flag
from .draft_config import SpecShape
from .drafter_spec import MAX_DRAFT_TOKENS, DrafterSpec
from .refusal import Refused

if TYPE_CHECKING:
    from .config import EngineConfig

PLAIN = SpecShape(0, 1, 1)  # of plain decoding
_CHAIN = SpecShape(3, 1, 4)
# SGLang's choices where nobody says anything, by the target's architecture; else the chain.
_TREES = {"llama": SpecShape(5, 4, 8)}
_FLAGS = {
    "steps": "speculative_num_steps",
    "topk": "speculative_eagle_topk",
    "num_draft_tokens": "speculative_num_draft_tokens",
}
MAX_LEVEL_TOKENS = 64  # a level's forward has the levels before it in its mask, one bit a node
MAX_CUDA_TOPK = 8  # candidates that the kernel on a GPU ranks


def draft_reach(shape: SpecShape) -> int:
    """Tokens from a row's first on that a step may write in the target's pool or the draft's:
    those of a verify row, or the bonus token (STANDALONE's) and all nodes that draft others."""
    return max(shape.num_draft_tokens, 1 + shape.topk * (shape.steps - 1))


def given_shape(config: "EngineConfig") -> SpecShape | Refused | None:
    """What the flags of a draft model say; None when they leave it to the draft or the table.

    A chain has one node a step and the bonus token, whatever ``speculative_num_draft_tokens`` is;
    ``corrected`` says so.
    """
    steps, topk = config.speculative_num_steps, config.speculative_eagle_topk
    nodes = config.speculative_num_draft_tokens
    if steps is None:
        for field, given in (
            ("speculative_eagle_topk", topk),
            ("speculative_num_draft_tokens", nodes),
        ):
            if given is not None:
                return Refused(
                    field,
                    "needs --speculative-num-steps beside it; add it, or leave both out for the "
                    "draft's own shape",
                )
        return None
    topk = 1 if topk is None else topk
    shape = SpecShape(steps, topk, steps + 1 if topk == 1 or nodes is None else nodes)
    refused = refuse_shape(shape)
    if refused is not None:
        return Refused(_FLAGS[refused.field], refused.reason)
    if topk > 1 and nodes is None:
        return Refused(
            "speculative_num_draft_tokens",
            f"a tree of {steps} steps and topk {topk} verifies {steps + 1} to "
            f"{_most_nodes(steps, topk)} nodes, the bonus token included; say how many",
        )
    return shape


def resolve_shape(
    config: "EngineConfig", algorithm: str, architecture: str, own: SpecShape | None
) -> SpecShape | Refused:
    """Flags first, then ``own``, the draft's shape by its config.json, then SGLang's table.

    ``architecture``: the target's. Refused: flags that cannot be, and an accept length to simulate
    beyond the shape.
    """
    shape = given_shape(config)
    if isinstance(shape, Refused):
        return shape
    if shape is None:
        shape = own if own is not None else _table(algorithm, architecture)
    refused = refuse_drawn_tree(config, shape)
    return refused or refuse_simulation(config, shape.steps + 1) or shape


def refuse_drawn_tree(config: "EngineConfig", shape: SpecShape) -> Refused | None:
    """Rejection sampling, of one draft or a block of them, of drafts that branch."""
    if not config.draws_drafts or shape.topk == 1:
        return None
    return Refused(
        drawing_flag(config),
        f"is for chains, and topk is {shape.topk}; set --speculative-num-steps and "
        "--speculative-eagle-topk 1, or leave it out",
    )


def refuse_shape(shape: SpecShape) -> Refused | None:
    """A shape that cannot be, by the name of its field: no more than a row's nodes deep or wide,
    levels that a draft forward can take, and nodes that can all be drafted."""
    steps, topk, nodes = shape.steps, shape.topk, shape.num_draft_tokens
    for field, value in (("steps", steps), ("topk", topk)):
        if not 1 <= value < MAX_DRAFT_TOKENS:
            return Refused(
                field,
                f"must be between 1 and {MAX_DRAFT_TOKENS - 1}, got {value}; ask for that",
            )
    fed = topk * (steps - 1)
    if fed > MAX_LEVEL_TOKENS:
        return Refused(
            "topk",
            f"{topk} branches over {steps} steps feed the draft {fed} nodes in the last one, which "
            f"takes {MAX_LEVEL_TOKENS}; use fewer of either",
        )
    if topk == 1 and nodes != steps + 1:
        return Refused(
            "num_draft_tokens",
            f"{nodes} is not steps + 1, which a chain (topk 1) has; write {steps + 1}",
        )
    if nodes <= steps:
        return Refused(
            "num_draft_tokens",
            f"{nodes} nodes, the bonus token included, cannot be {steps} steps deep; ask for "
            f"{steps + 1} or more, or for fewer steps",
        )
    most = _most_nodes(steps, topk)
    if nodes > most:
        return Refused(
            "num_draft_tokens",
            f"{nodes} exceeds the {most} nodes that {steps} steps of topk {topk} draft and a row "
            f"verifies; ask for {most} or less",
        )
    return None


def corrected(config: "EngineConfig", shape: SpecShape) -> str | None:
    """What to tell the user of flags that ``shape`` changes."""
    asked = config.speculative_num_draft_tokens
    if asked is None or asked == shape.num_draft_tokens:
        return None
    return (
        f"speculative_num_draft_tokens: {asked} becomes {shape.num_draft_tokens}, one for each of "
        f"the {shape.steps} steps of a chain (topk 1) and the bonus token"
    )


def refuse_simulation(config: "EngineConfig", most: int) -> Refused | None:
    """``simulate_accept_length`` against the ``most`` tokens that a verify row can emit."""
    simulated = config.simulate_accept_length
    if simulated is None or 1.0 <= simulated <= most:
        return None
    return Refused(
        "simulate_accept_length",
        f"must be between 1 and the {most} tokens that a step can emit (bonus token included), "
        f"got {simulated}",
    )


def refuse_survival(config: "EngineConfig", spec: DrafterSpec) -> Refused | None:
    """``simulate_survival`` by itself."""
    field, mean = "simulate_survival", config.simulate_survival
    if mean is None:
        return None
    if not 0.0 < mean < 1.0:
        return Refused(field, f"must be above 0 and below 1, got {mean}")
    if config.simulate_accept_length is not None:
        return Refused(field, "simulate_accept_length forces acceptance already; leave one out")
    if not spec.plans_verify:
        reason = f"belongs to drafters that give confidence, {spec.name} does not; leave it out"
        return Refused(field, reason)
    if config.speculative_ragged_verify_mode == "cap-accept":
        return Refused(field, "times verify lengths, of which cap-accept saves none; use compact")
    return None


def _most_nodes(steps: int, topk: int) -> int:
    """Of a row: the bonus token, topk candidates of the first step, topk for each kept later."""
    return min(MAX_DRAFT_TOKENS, 1 + topk + (steps - 1) * topk * topk)


def _table(algorithm: str, architecture: str) -> SpecShape:
    return _CHAIN if algorithm == "STANDALONE" else _TREES.get(architecture, _CHAIN)
