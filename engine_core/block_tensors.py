"""The tensors of a block draft by our names (block_drafts.md 1.14, 2.5 and 2.6)."""

from .draft_config import DraftConfig
from .model_config import ModelConfig
from .tensor_shapes import IGNORABLE, UNUSED, Shapes, body_shapes

MARKOV = "model.markov_head."
CONFIDENCE = "model.confidence_head."
_SPARE = (*UNUSED, *IGNORABLE, "rotary_emb.original_inv_freq", "verifier_norm.weight")


def block_shapes(config: DraftConfig) -> Shapes:
    """Of a DFLASH or DSPARK draft as its checkpoint has them. Raises ValueError for others."""
    block, model = config.block, config.model
    if block is None:
        raise ValueError(f"{config.algorithm} drafts have no block")
    hidden = model.hidden_size
    shapes: Shapes = {
        "model.fc.weight": (hidden, fc_width(config)),
        "model.hidden_norm.weight": (hidden,),
        "model.norm.weight": (hidden,),
    }
    for index in range(model.num_hidden_layers):
        shapes[f"model.layers.{index}.input_layernorm.weight"] = (hidden,)
        shapes |= body_shapes(model, index, hidden)
    if block.markov is not None:
        shapes |= _markov_shapes(model, block.markov.kind, block.markov.rank)
        if block.confidence:
            rank = block.markov.rank if block.confidence_with_markov else 0
            shapes[f"{CONFIDENCE}proj.weight"] = (1, hidden + rank)
            shapes[f"{CONFIDENCE}proj.bias"] = (1,)
    return shapes


def fc_width(config: DraftConfig) -> int:
    """Columns of the checkpoint's ``fc``, which may take a layer twice."""
    if config.block is None or not config.block.fc_order:
        return config.feature_size
    return len(config.block.fc_order) * config.feature_size // len(config.feature_layers)


def is_spare(name: str, config: DraftConfig) -> bool:
    """Whether a block draft's checkpoint may hold our ``name`` though nobody reads it: tables that
    are computed, what is the target's, and a confidence head that nothing plans by.
    """
    asked = config.block is not None and config.block.confidence
    return name.endswith(_SPARE) or (name.startswith(CONFIDENCE) and not asked)


def _markov_shapes(model: ModelConfig, kind: str, rank: int) -> Shapes:
    vocab, hidden = model.vocab_size, model.hidden_size
    shapes: Shapes = {
        f"{MARKOV}markov_w1.weight": (vocab, rank),
        f"{MARKOV}markov_w2.weight": (vocab, rank),
    }
    if kind == "gated":
        shapes[f"{MARKOV}gate_proj.weight"] = (rank, hidden + rank)
        shapes[f"{MARKOV}gate_proj.bias"] = (rank,)
    elif kind == "rnn":
        shapes[f"{MARKOV}joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        shapes[f"{MARKOV}joint_proj.bias"] = (3 * rank,)
    return shapes
