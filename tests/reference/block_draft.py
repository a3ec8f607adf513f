"""Block drafts from the equations (block_drafts.md 1.2 to 2.6): dense, in float64, without pages.

Names are the checkpoints'; H channels, V tokens, r the Markov head's rank.
"""

from dataclasses import dataclass

import torch

Tensors = dict[str, torch.Tensor]


@dataclass
class Equations:
    """Which of the variants a draft is, and its sizes; by layer ``windows`` (0: all is seen) and
    whether a block's rows see only those before them (``causal``).

    ``whole_block``: a window is the block's, w tokens in front of its first row.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    windows: list[int]
    causal: list[bool]
    whole_block: bool = False
    embed_scale: float = 1.0
    first_row: int = 1
    markov: str = ""  # vanilla, gated or rnn
    confidence_with_markov: bool = False


@dataclass
class Context:
    """Keys and values of P positions in each layer, [P, kv heads, head_dim]."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of x [T, heads, D], whose halves are the pairs."""
    half = x.shape[-1] // 2
    angles = positions.double()[:, None] * theta ** (-torch.arange(half).double() / half)
    turned = (
        torch.complex(x[..., :half], x[..., half:])
        * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.cat((turned.real, turned.imag), dim=-1)


def seen(equations: Equations, layer: int, before: int, rows: int) -> torch.Tensor:
    """bool[rows, before + rows]: what a block behind ``before`` positions sees in a layer."""
    window, causal = equations.windows[layer], equations.causal[layer]
    visible = torch.zeros(rows, before + rows, dtype=torch.bool)
    for i in range(rows):
        for t in range(before + rows):
            own = t >= before
            if own and causal and t - before > i:
                continue
            if window and equations.whole_block:
                near = own or t >= before - window
            else:
                near = not window or abs(before + i - t) < window
            visible[i, t] = near
    return visible


class BlockReference:
    """A draft over the target's ``embed`` [V, H] and ``head`` [V, H]."""

    def __init__(
        self, equations: Equations, tensors: Tensors, embed: torch.Tensor, head: torch.Tensor
    ) -> None:
        self.equations = equations
        self.weights = {name: tensor.double() for name, tensor in tensors.items()}
        self.embed, self.head = embed.double(), head.double()

    def inject(self, features: torch.Tensor) -> Context:
        """Of the target's features [P, K * H], layer beside layer, from position 0 on."""
        context = features.double() @ self.weights["fc.weight"].T
        context = norm(context, self.weights["hidden_norm.weight"], self.equations.eps)
        places = torch.arange(len(features))
        found = [self._keys_values(layer, context, places) for layer in self._layers()]
        return Context([keys for keys, _ in found], [values for _, values in found])

    def forward(self, context: Context, ids: torch.Tensor) -> torch.Tensor:
        """Normed hidden states [B, H] of a block of ids [B] right behind the context."""
        equations, weights = self.equations, self.weights
        before = len(context.keys[0])
        places = before + torch.arange(len(ids))
        stream = self.embed[ids] * equations.embed_scale
        for layer in self._layers():
            prefix = f"layers.{layer}."
            x = norm(stream, weights[f"{prefix}input_layernorm.weight"], equations.eps)
            query = self._heads(layer, "q", x)
            query = rotate(query, places, equations.theta)
            keys, values = self._keys_values(layer, x, places)
            group = equations.heads // equations.kv_heads
            keys = torch.cat((context.keys[layer], keys)).repeat_interleave(group, dim=1)
            values = torch.cat((context.values[layer], values)).repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", query, keys) / equations.head_dim**0.5
            hidden = ~seen(equations, layer, before, len(ids))
            shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", shares, values).flatten(1)
            stream = stream + self._linear(f"{prefix}self_attn.o_proj", mixed)
            y = norm(stream, weights[f"{prefix}post_attention_layernorm.weight"], equations.eps)
            gate = self._linear(f"{prefix}mlp.gate_proj", y)
            up = self._linear(f"{prefix}mlp.up_proj", y)
            stream = stream + self._linear(f"{prefix}mlp.down_proj", gate * gate.sigmoid() * up)
        return norm(stream, weights["norm.weight"], equations.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head.T

    def choose(self, hidden: torch.Tensor, bonus: int) -> tuple[list[int], list[float]]:
        """Tokens and raw confidence logits of one block's hidden states."""
        tokens: list[int] = []
        sure: list[float] = []
        rank = 1
        if self.equations.markov:
            rank = self.weights["markov_head.markov_w1.weight"].shape[1]
        state = torch.zeros(rank).double()
        for h in hidden[self.equations.first_row :]:
            before = tokens[-1] if tokens else bonus
            logits, state = self.step(h, before, state)
            if "confidence_head.proj.weight" in self.weights:
                sure.append(self.confidence(h, before))
            tokens.append(logits.tolist().index(float(logits.max())))
        return tokens, sure

    def step(
        self, h: torch.Tensor, before: int, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [V] of one draft, and the rnn head's new state [r]."""
        logits = self.logits(h)
        if not self.equations.markov:
            return logits, state
        e = self.weights["markov_head.markov_w1.weight"][before]
        if self.equations.markov == "gated":
            latent = torch.sigmoid(self._linear("markov_head.gate_proj", torch.cat((h, e)))) * e
        elif self.equations.markov == "rnn":
            joint = self._linear("markov_head.joint_proj", torch.cat((state, e, h)))
            a, c, o = joint.chunk(3)
            state = torch.sigmoid(a) * state + (1 - torch.sigmoid(a)) * torch.tanh(c)
            latent = torch.tanh(o)
        else:
            latent = e
        return logits + self.weights["markov_head.markov_w2.weight"] @ latent, state

    def confidence(self, h: torch.Tensor, before: int) -> float:
        """The raw logit of one draft, which follows token ``before``."""
        if self.equations.confidence_with_markov:
            h = torch.cat((h, self.weights["markov_head.markov_w1.weight"][before]))
        return float(self._linear("confidence_head.proj", h))

    def _layers(self) -> range:
        return range(len(self.equations.windows))

    def _keys_values(
        self, layer: int, x: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = rotate(self._heads(layer, "k", x), places, self.equations.theta)
        return keys, self._heads(layer, "v", x)

    def _heads(self, layer: int, name: str, x: torch.Tensor) -> torch.Tensor:
        prefix = f"layers.{layer}.self_attn.{name}"
        part = self._linear(f"{prefix}_proj", x).view(len(x), -1, self.equations.head_dim)
        weight = self.weights.get(f"{prefix}_norm.weight")
        return part if weight is None else norm(part, weight, self.equations.eps)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return out if bias is None else out + bias
