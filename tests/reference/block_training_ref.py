"""Block drafts one block at a time, straight from their equations; imports nothing of outrider.

Weights by checkpoint names, float64. Shapes: H hidden size, K drafted tokens, V vocabulary.
"""

import math
from typing import NamedTuple

import torch

Named = dict[str, torch.Tensor]


class Shape(NamedTuple):
    """A draft's layers; ``windows``: of each, 0 for a full one."""

    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    eps: float
    windows: tuple[int, ...]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotary embedding of [heads, D] at one position."""
    half = x.shape[-1] // 2
    angles = position * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    low, high = x[:, :half], x[:, half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def block_hidden(
    weights: Named, shape: Shape, features: torch.Tensor, entering: torch.Tensor
) -> torch.Tensor:
    """[rows, H] after the final norm, of a block whose embeddings are ``entering`` [rows, H] and
    whose context are all of ``features`` [P, W]: it stands at positions P and on.
    """
    begin, rows = len(features), len(entering)
    context = norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], shape.eps)
    h = entering
    for index, window in enumerate(shape.windows):
        layer = {
            name.removeprefix(f"layers.{index}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"layers.{index}.")
        }
        x = norm(h, layer["input_layernorm.weight"], shape.eps)
        sources = [*context, *x]

        def split(name: str, source: torch.Tensor, layer: Named = layer) -> torch.Tensor:
            return (layer[f"self_attn.{name}_proj.weight"] @ source).view(-1, shape.head_dim)

        keys = [
            turn(
                norm(split("k", source), layer["self_attn.k_norm.weight"], shape.eps),
                position,
                shape.theta,
            )
            for position, source in enumerate(sources)
        ]
        values = [split("v", source) for source in sources]
        outs = []
        for row in range(rows):
            at = begin + row
            query = norm(split("q", x[row]), layer["self_attn.q_norm.weight"], shape.eps)
            query = turn(query, at, shape.theta)
            seen = [t for t in range(begin + rows) if not window or (t <= at and at - t < window)]
            mixed = []
            for head in range(shape.heads):
                kv = head // (shape.heads // shape.kv_heads)
                scores = torch.stack([query[head] @ keys[t][kv] for t in seen])
                chances = (scores / math.sqrt(shape.head_dim)).softmax(0)
                mixed.append(sum(c * values[t][kv] for c, t in zip(chances, seen, strict=True)))
            outs.append(layer["self_attn.o_proj.weight"] @ torch.cat(mixed))
        h = h + torch.stack(outs)
        y = norm(h, layer["post_attention_layernorm.weight"], shape.eps)
        gate = torch.nn.functional.silu(y @ layer["mlp.gate_proj.weight"].T)
        h = h + (gate * (y @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return norm(h, weights["norm.weight"], shape.eps)


def markov_biases(
    weights: Named, kind: str, hidden: torch.Tensor, before: list[int]
) -> torch.Tensor:
    """[K, V]: what the token before each of rows ``hidden`` [K, H] adds to their logits."""
    w1, w2 = weights["markov_head.markov_w1.weight"], weights["markov_head.markov_w2.weight"]
    state = torch.zeros(w1.shape[1], dtype=w1.dtype)
    made = []
    for h, token in zip(hidden, before, strict=True):
        e = w1[token]
        if kind == "vanilla":
            latent = e
        elif kind == "gated":
            gate = weights["markov_head.gate_proj.weight"] @ torch.cat((h, e))
            latent = torch.sigmoid(gate + weights["markov_head.gate_proj.bias"]) * e
        else:
            joint = weights["markov_head.joint_proj.weight"] @ torch.cat((state, e, h))
            a, c, o = (joint + weights["markov_head.joint_proj.bias"]).chunk(3)
            keep = torch.sigmoid(a)
            state = keep * state + (1 - keep) * torch.tanh(c)
            latent = torch.tanh(o)
        made.append(w2 @ latent)
    return torch.stack(made)


def confidence(weights: Named, hidden: torch.Tensor, before: list[int]) -> torch.Tensor:
    """[K] raw logits of the confidence head."""
    proj, bias = weights["confidence_head.proj.weight"][0], weights["confidence_head.proj.bias"]
    e = weights["markov_head.markov_w1.weight"][before]
    return torch.cat((hidden, e), dim=-1) @ proj + bias


def decay(drafts: int, gamma: float) -> list[float]:
    return [math.exp(-i / gamma) for i in range(drafts)]


def dpace(chances: list[float], valid: list[bool], alpha: float) -> list[float]:
    """A token's weight: the sum, over it and those behind it, of products of smoothed chances."""
    smoothed = [
        (1 - alpha) * q + alpha if ok else 1.0 for q, ok in zip(chances, valid, strict=True)
    ]
    reached = [math.prod(smoothed[: i + 1]) for i in range(len(smoothed))]
    return [
        sum(reached[j] for j in range(i, len(reached)) if valid[j]) for i in range(len(reached))
    ]


def alive(text: list[int], top: list[int], floor: float) -> list[float]:
    """What is left of each token's weight behind tokens that the target would not have chosen."""
    left, made = 1.0, []
    for token, chosen in zip(text, top, strict=True):
        made.append(left)
        left *= 1.0 if token == chosen else floor
    return made
