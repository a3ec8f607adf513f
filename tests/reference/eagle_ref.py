"""EAGLE's and EAGLE3's forward pass from the equations: dense, in float64, with no cache pages."""

from dataclasses import dataclass, field

import torch

Tensors = dict[str, torch.Tensor]


@dataclass
class Equations:
    """Which of the variants a draft is, and its sizes."""

    eagle3: bool
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    chunks: int = 0  # norms of the target's layers in front of fc


def plain(tensors: Tensors) -> Tensors:
    """Tensors of any exporter by one set of names, in float64."""
    renames = {
        "model.": "",
        "midlayer.": "layers.0.",
        "transformer.": "layers.0.",
        "fusion_fc.": "fc.",
        "aux_norm_low.": "fc_norm.0.",
        "aux_norm_mid.": "fc_norm.1.",
        "aux_norm_high.": "fc_norm.2.",
    }
    named: Tensors = {}
    for name, tensor in tensors.items():
        for theirs, ours in renames.items():
            if name.startswith(theirs):
                name = ours + name[len(theirs) :]
        named[name] = tensor.double() if tensor.is_floating_point() else tensor
    return named


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of x [T, heads, D], whose halves are the pairs."""
    half = x.shape[-1] // 2
    angles = positions.double()[:, None] * theta ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


@dataclass
class Memory:
    """What one sequence has seen: keys and values of each layer, [positions, kv heads, D]."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def forget(self, length: int) -> None:
        self.keys = [keys[:length] for keys in self.keys]
        self.values = [values[:length] for values in self.values]

    @property
    def length(self) -> int:
        return len(self.keys[0]) if self.keys else 0


class EagleReference:
    """A draft; ``embed`` [V, H] and ``head`` [Vd, H] are its own or the target's."""

    def __init__(
        self, equations: Equations, tensors: Tensors, embed: torch.Tensor, head: torch.Tensor
    ) -> None:
        self.equations = equations
        self.weights = plain(tensors)
        self.embed, self.head = embed.double(), head.double()
        self.layers = len({name.split(".")[1] for name in self.weights if name[:7] == "layers."})

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The hidden state of the target's features."""
        equations, weights = self.equations, self.weights
        features = features.double()
        if not equations.eagle3 or "fc.weight" not in weights:
            return features
        if equations.norm_before_fc:
            features = norm(features, weights["input_norm.weight"], equations.eps)
        if equations.chunks:
            parts = features.chunk(equations.chunks, dim=-1)
            norms = [weights[f"fc_norm.{i}.weight"] for i in range(equations.chunks)]
            normed = [norm(p, w, equations.eps) for p, w in zip(parts, norms, strict=True)]
            features = torch.cat(normed, dim=-1)
        return self._linear("fc", features)

    def forward(
        self,
        memory: Memory,
        ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        own: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The recurrent state and the logits of T tokens behind what ``memory`` holds.

        ``own`` bool[T, T]: which of the T tokens each sees; all see what was there before.
        """
        equations = self.equations
        embedded, hidden = self.embed[ids], hidden.double()
        past = memory.length
        visible = torch.cat((torch.ones(len(ids), past, dtype=torch.bool), own), dim=1)
        if not memory.keys:
            empty = torch.empty(0, equations.kv_heads, equations.head_dim).double()
            memory.keys, memory.values = [empty] * self.layers, [empty] * self.layers
        stream = hidden
        if not equations.eagle3:
            stream = self._linear("fc", torch.cat((embedded, hidden), dim=-1))
        for index in range(self.layers):
            prefix = f"layers.{index}."
            stream, taken = self._entry(prefix, index, stream, embedded)
            stream = stream + self._attention(prefix, index, memory, taken, positions, visible)
            x = norm(
                stream, self.weights[f"{prefix}post_attention_layernorm.weight"], equations.eps
            )
            gate = self._linear(f"{prefix}mlp.gate_proj", x)
            up = self._linear(f"{prefix}mlp.up_proj", x)
            stream = stream + self._linear(f"{prefix}mlp.down_proj", gate.sigmoid() * gate * up)
        if not equations.eagle3:
            return stream, stream @ self.head.T
        normed = norm(stream, self.weights["norm.weight"], equations.eps)
        return normed if equations.norm_output else stream, normed @ self.head.T

    def _entry(
        self, prefix: str, index: int, stream: torch.Tensor, embedded: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream that a layer adds to, and what its attention takes in."""
        eps, weights = self.equations.eps, self.weights
        of_hidden = weights.get(f"{prefix}hidden_norm.weight")
        of_input = weights.get(f"{prefix}input_layernorm.weight")
        if self.equations.eagle3 and index == 0:
            assert of_hidden is not None
            assert of_input is not None
            normed = norm(stream, of_hidden, eps)
            taken = torch.cat((norm(embedded, of_input, eps), normed), dim=-1)
            return normed if self.equations.norm_before_residual else stream, taken
        chosen = of_input if of_hidden is None else of_hidden
        return stream, stream if chosen is None else norm(stream, chosen, eps)

    def _attention(
        self,
        prefix: str,
        index: int,
        memory: Memory,
        taken: torch.Tensor,
        positions: torch.Tensor,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        equations, dim = self.equations, self.equations.head_dim
        parts = {}
        for name in ("q", "k", "v"):
            part = self._linear(f"{prefix}self_attn.{name}_proj", taken).view(len(taken), -1, dim)
            weight = self.weights.get(f"{prefix}self_attn.{name}_norm.weight")
            parts[name] = part if weight is None else norm(part, weight, equations.eps)
        query = rotate(parts["q"], positions, equations.theta)
        key = rotate(parts["k"], positions, equations.theta)
        memory.keys[index] = torch.cat((memory.keys[index], key))
        memory.values[index] = torch.cat((memory.values[index], parts["v"]))
        group = equations.heads // equations.kv_heads
        keys = memory.keys[index].repeat_interleave(group, dim=1)
        values = memory.values[index].repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) / dim**0.5
        shares = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        context = torch.einsum("hqk,khd->qhd", shares, values).flatten(1)
        return self._linear(f"{prefix}self_attn.o_proj", context)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return out if bias is None else out + bias
