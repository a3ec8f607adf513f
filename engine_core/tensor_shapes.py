"""The tensors of a model by its config: names as checkpoints have them, and shapes."""

from collections.abc import Collection

from .draft_config import DraftConfig
from .model_config import ModelConfig

Shapes = dict[str, tuple[int, ...]]

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Endings of names that a checkpoint may have beside its model's: buffers that old ones carry (the
# table is computed from config.json instead), and in drafts what is the target's or training's.
IGNORABLE = ("rotary_emb.inv_freq",)
UNUSED = ("embed_tokens.weight", "lm_head.weight", "t2d")


def decoder_shapes(config: ModelConfig) -> Shapes:
    """Of a whole dense decoder; a tied head is the embedding."""
    table, hidden = (config.vocab_size, config.hidden_size), config.hidden_size
    shapes: Shapes = {EMBED: table, "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = table
    for index in range(config.num_hidden_layers):
        shapes[f"model.layers.{index}.input_layernorm.weight"] = (hidden,)
        shapes |= body_shapes(config, index, hidden)
    return shapes


def body_shapes(config: ModelConfig, index: int, width: int) -> Shapes:
    """Of layer ``index`` without its input norm; attention takes in ``width`` elements."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv, head = config.q_size, config.kv_size, config.head_dim
    matrices = (
        ("self_attn.q_proj", q, width, config.qkv_bias),
        ("self_attn.k_proj", kv, width, config.qkv_bias),
        ("self_attn.v_proj", kv, width, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    prefix = f"model.layers.{index}."
    shapes: Shapes = {f"{prefix}post_attention_layernorm.weight": (hidden,)}
    for name, outputs, inputs, bias in matrices:
        shapes[f"{prefix}{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{prefix}{name}.bias"] = (outputs,)
    for name in ("q_norm", "k_norm") if config.qk_norm else ():
        shapes[f"{prefix}self_attn.{name}.weight"] = (head,)
    return shapes


def draft_shapes(config: DraftConfig, stored: Collection[str]) -> Shapes:
    """Of an EAGLE or EAGLE3 draft, by our names, without its maps of token ids.

    ``stored``: our names of what its checkpoint has. A later layer of an EAGLE3 draft has either
    of two norms, and where it has both one is used.
    """
    model, three = config.model, config.algorithm == "EAGLE3"
    hidden = model.hidden_size
    shapes: Shapes = {}
    if config.owns_embedding:
        shapes[EMBED] = (model.vocab_size, hidden)
    if config.owns_head:
        shapes[HEAD] = (config.draft_vocab_size, hidden)
    if config.has_fc:
        shapes["model.fc.weight"] = (hidden, config.feature_size + (0 if three else hidden))
    if config.fc_bias:
        shapes["model.fc.bias"] = (hidden,)
    if config.norm_before_fc:
        shapes["model.input_norm.weight"] = (config.feature_size,)
    chunks = max(len(config.feature_layers), 1)
    for index in range(chunks if config.chunk_norms else 0):
        shapes[f"model.fc_norm.{index}.weight"] = (config.feature_size // chunks,)
    if three:
        shapes["model.norm.weight"] = (hidden,)
    for index in range(model.num_hidden_layers):
        first_of_three = three and index == 0
        shapes |= body_shapes(model, index, 2 * hidden if first_of_three else hidden)
        norm = f"model.layers.{index}.hidden_norm.weight"
        plain = f"model.layers.{index}.input_layernorm.weight"
        if first_of_three:
            shapes |= {norm: (hidden,), plain: (hidden,)}
        elif index or config.first_layer_norm:
            shapes[norm if norm in stored else plain] = (hidden,)
    return shapes
