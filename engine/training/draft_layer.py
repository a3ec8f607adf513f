"""A draft's layer before training: its shape, and its first parameters."""

import msgspec
import torch

from ...engine_core.model_config import ModelConfig
from ...engine_core.refusal import Refused, RefusedError
from ...engine_core.train_spec import TrainSpec


def layer_model(spec: TrainSpec, target: ModelConfig, widening: int) -> ModelConfig:
    """A Llama layer as wide as the target. Raises RefusedError."""
    if spec.hidden_size not in (None, target.hidden_size):
        raise RefusedError(
            Refused(
                "hidden_size",
                f"must be the target's ({target.hidden_size}), whose embedding the draft reads",
            )
        )
    if spec.num_hidden_layers not in (None, 1):
        raise RefusedError(Refused("num_hidden_layers", f"{spec.algorithm} is trained with 1"))
    heads = spec.num_attention_heads or target.num_attention_heads
    kv_heads = spec.num_key_value_heads or target.num_key_value_heads
    head_dim = spec.head_dim or target.head_dim
    check_heads(heads, kv_heads, head_dim)
    return msgspec.structs.replace(
        target,
        architecture="llama",
        intermediate_size=spec.intermediate_size or widening * target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=False,
        sliding_windows=(0,),
    )


def check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    """Raises RefusedError for heads that attention cannot have."""
    if heads % kv_heads:
        reason = f"{kv_heads} does not divide the {heads} query heads; give one that does"
        raise RefusedError(Refused("num_key_value_heads", reason))
    if head_dim % 2:
        reason = f"{head_dim} is odd, which rotary embeddings cannot turn; give an even one"
        raise RefusedError(Refused("head_dim", reason))


def learnt_matrix(
    size: tuple[int, int], generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """float32[out, in], drawn on the CPU so that devices agree."""
    drawn: torch.Tensor = torch.randn(size, generator=generator) * size[1] ** -0.5
    return drawn.to(device).requires_grad_()


def copy_leaves(parameters: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    """Set each parameter to the tensor of its name."""
    with torch.no_grad():
        for name, leaf in parameters.items():
            leaf.copy_(tensors[name])


def learnt_qwen3_layer(
    prefix: str, model: ModelConfig, generator: torch.Generator, device: torch.device
) -> dict[str, torch.Tensor]:
    """A Qwen3 layer's parameters by the checkpoint's names; it adds nothing at first."""
    hidden, inner = model.hidden_size, model.intermediate_size
    matrices = {
        "self_attn.q_proj": (model.q_size, hidden),
        "self_attn.k_proj": (model.kv_size, hidden),
        "self_attn.v_proj": (model.kv_size, hidden),
        "self_attn.o_proj": (hidden, model.q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = {
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
        "self_attn.q_norm": model.head_dim,
        "self_attn.k_norm": model.head_dim,
    }
    made = {
        f"{prefix}.{name}.weight": learnt_matrix(size, generator, device)
        for name, size in matrices.items()
    }
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        made[f"{prefix}.{name}.weight"].data.zero_()
    return made | {f"{prefix}.{name}.weight": learnt_norm(n, device) for name, n in norms.items()}


def learnt_norm(size: int, device: torch.device) -> torch.Tensor:
    """Ones."""
    return torch.ones(size, device=device, requires_grad=True)
