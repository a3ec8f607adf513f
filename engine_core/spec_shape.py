"""How much a draft model drafts a round: from flags, the draft's own defaults, or a table."""

from typing import TYPE_CHECKING

from .draft_config import SpecShape
from .drafter_spec import MAX_DRAFT_TOKENS
from .refusal import Refused

if TYPE_CHECKING:
    from .config import EngineConfig

PLAIN = SpecShape(0, 1, 1)  # of plain decoding
_CHAIN = SpecShape(3, 1, 4)
# SGLang's choices where nobody says anything, by the target's architecture; else the chain.
_TREES = {"llama": SpecShape(5, 4, 8)}
MAX_LEVEL_TOKENS = 64  # a level's forward has the levels before it in its mask, one bit a node


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
    refused = _refuse_steps(steps, topk)
    if refused is not None:
        return refused
    if topk == 1:
        return SpecShape(steps, 1, steps + 1)
    most = _most_nodes(steps, topk)
    if nodes is None:
        return Refused(
            "speculative_num_draft_tokens",
            f"a tree of {steps} steps and topk {topk} verifies {steps + 1} to {most} nodes, the "
            "bonus token included; say how many",
        )
    if nodes <= steps:
        return Refused(
            "speculative_num_draft_tokens",
            f"{nodes} nodes, the bonus token included, cannot be {steps} steps deep; ask for "
            f"{steps + 1} or more, or for fewer --speculative-num-steps",
        )
    if nodes > most:
        return Refused(
            "speculative_num_draft_tokens",
            f"{nodes} exceeds the {most} nodes that {steps} steps of topk {topk} draft and a row "
            f"verifies; ask for {most} or less",
        )
    return SpecShape(steps, topk, nodes)


def resolve_shape(
    config: "EngineConfig", algorithm: str, architecture: str, own: SpecShape | None
) -> SpecShape | Refused:
    """Flags first, then ``own``, the draft's shape by its config.json, then SGLang's table.

    ``architecture``: the target's. Refused: a shape that cannot be, wherever it is from, and an
    accept length to simulate beyond it.
    """
    shape = given_shape(config)
    if shape is None:
        shape = own if own is not None else _table(algorithm, architecture)
        refused = refuse_shape(shape)
        if refused is not None:
            return Refused(
                "speculative_draft_model_path", f'its config.json: "outrider": {refused}'
            )
    if isinstance(shape, Refused):
        return shape
    return refuse_simulation(config, shape.num_draft_tokens) or shape


def refuse_shape(shape: SpecShape) -> Refused | None:
    """Check a shape that does not come from flags."""
    refused = _refuse_steps(shape.steps, shape.topk)
    if refused is not None:
        return refused
    if shape.topk == 1 and shape.num_draft_tokens != shape.steps + 1:
        return Refused("num_draft_tokens", f"of a chain must be steps + 1 = {shape.steps + 1}")
    most = _most_nodes(shape.steps, shape.topk)
    if not shape.steps < shape.num_draft_tokens <= most:
        return Refused("num_draft_tokens", f"must be between {shape.steps + 1} and {most}")
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


def refuse_simulation(config: "EngineConfig", width: int) -> Refused | None:
    """``simulate_accept_length`` against ``width`` nodes of a verify row."""
    simulated = config.simulate_accept_length
    if simulated is None or 1.0 <= simulated <= width:
        return None
    return Refused(
        "simulate_accept_length",
        f"must be between 1 and the {width} nodes of a verify row (bonus token included), "
        f"got {simulated}",
    )


def _refuse_steps(steps: int, topk: int) -> Refused | None:
    """No more than a row's nodes deep or wide, and levels that a draft forward can take."""
    for field, value in (("speculative_num_steps", steps), ("speculative_eagle_topk", topk)):
        if not 1 <= value < MAX_DRAFT_TOKENS:
            return Refused(field, f"must be between 1 and {MAX_DRAFT_TOKENS - 1}, got {value}")
    if topk * (steps - 1) > MAX_LEVEL_TOKENS:
        return Refused(
            "speculative_eagle_topk",
            f"{topk} branches over {steps} steps feed the draft {topk * (steps - 1)} nodes in its "
            f"last step, of which it takes {MAX_LEVEL_TOKENS}; lower it or --speculative-num-steps",
        )
    return None


def _most_nodes(steps: int, topk: int) -> int:
    """Of a row: the bonus token, topk candidates of the first step, topk for each kept later."""
    return min(MAX_DRAFT_TOKENS, 1 + topk + (steps - 1) * topk * topk)


def _table(algorithm: str, architecture: str) -> SpecShape:
    return _CHAIN if algorithm == "STANDALONE" else _TREES.get(architecture, _CHAIN)
