"""A dense decoder over whole rows of text: what the paged one computes, for training's batches."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...engine_core.model_config import ModelConfig
from ...kernels.rms_norm import rms_norm
from ...kernels.silu_mul import silu_mul
from ..models.decoder_weights import LayerWeights, read_head, read_layer
from ..models.torch_decoder import head_to
from ..models.torch_layers import layer_to
from ..rotary import RotaryTable
from ..weights import TensorSource
from .compiled import compiled


class TargetOutput(NamedTuple):
    """``hidden`` [B, T, H] after the final norm; ``streams`` [B, T, H] entering each captured
    layer.
    """

    hidden: torch.Tensor
    streams: list[torch.Tensor]


class DenseTarget:
    """A target model over rows ids [B, T] that all begin at position 0. It is never trained."""

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        compile_: bool = False,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self._head = head_to(read_head(source, config), dtype, device)
        self._layers = [
            layer_to(read_layer(source, config, index), dtype, device)
            for index in range(config.num_hidden_layers)
        ]
        self._rotary = RotaryTable(config.rope, config.head_dim, config.context_length, device)
        self._layer = compiled(decoder_layer) if compile_ else decoder_layer

    @property
    def embedding(self) -> torch.Tensor:
        """The embedding table [V, H]."""
        return self._head.embed

    @property
    def lm_head(self) -> torch.Tensor:
        """The output head [V, H]."""
        return self._head.lm_head

    @property
    def final_norm(self) -> torch.Tensor:
        """The weight [H] of the norm before the head."""
        return self._head.final_norm

    def cos_sin(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary rows [end - begin, head_dim / 2] of these positions."""
        self._rotary.reserve(end)
        return self._rotary.cos[begin:end], self._rotary.sin[begin:end]

    @torch.no_grad()
    def forward(self, ids: torch.Tensor, capture: tuple[int, ...] = ()) -> TargetOutput:
        """Run rows [B, T]; layer indices as in ``Model.forward_capture``."""
        cos, sin = self.cos_sin(0, ids.shape[1])
        stream = F.embedding(ids, self._head.embed)
        streams: list[torch.Tensor] = []
        for index, layer in enumerate(self._layers):
            if index in capture:
                streams.append(stream)
            stream = self._run_layer(index, layer, stream, cos, sin)
        if len(self._layers) in capture:
            streams.append(stream)
        return TargetOutput(
            rms_norm(stream, self._head.final_norm, self.config.rms_norm_eps), streams
        )

    def _run_layer(
        self,
        index: int,
        layer: LayerWeights,
        stream: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        config = self.config
        return self._layer(
            stream,
            cos,
            sin,
            tensors_of(layer),
            config.num_attention_heads,
            config.num_key_value_heads,
            config.rms_norm_eps,
            config.sliding_windows[index],
        )

    @torch.no_grad()
    def generate(self, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """Greedy text after prompts [B, P] of one length: int64[B, new_tokens]. Ends at no EOS.

        Every row is one token further on at every step, so that nothing is padded. On a GPU all
        steps but the first two replay one graph, as each is hundreds of small kernels.
        """
        length = prompts.shape[1]
        total = length + new_tokens
        made = prompts.new_empty(len(prompts), new_tokens)
        caches = [self._empty_cache(len(prompts), total) for _ in self._layers]
        at = torch.arange(length, device=self.device)
        ids = self._cached_step(prompts, at, caches)
        made[:, :1] = ids
        at = at[-1:].clone()

        def step() -> None:
            at.add_(1)
            ids.copy_(self._cached_step(ids, at, caches))
            made.index_copy_(1, at - (length - 1), ids)

        advance, steps = step, new_tokens - 1
        if self.device.type == "cuda" and steps > 1:
            step()  # what is set up lazily cannot be in a graph
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
            advance, steps = graph.replay, steps - 1
        for _ in range(steps):
            advance()
        return made

    def _empty_cache(self, batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, KV heads, T, D]; zeros, since those to come are masked, not left
        out.
        """
        shape = (batch, self.config.num_key_value_heads, tokens, self.config.head_dim)
        key = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return key, torch.zeros_like(key)

    def _cached_step(
        self,
        ids: torch.Tensor,
        at: torch.Tensor,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """The next token int64[B, 1] of rows whose tokens ids [B, T] stand at positions ``at`` [T]:
        all from 0 on, or one.
        """
        config = self.config
        cos, sin = (part[at] for part in self.cos_sin(0, caches[0][0].shape[2]))
        stream = F.embedding(ids, self._head.embed)
        for index, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            stream = self._cached_layer(index, layer, cache, stream, cos, sin, at)
        last = rms_norm(stream[:, -1], self._head.final_norm, config.rms_norm_eps)
        return F.linear(last, self._head.lm_head).argmax(-1, keepdim=True)

    def _cached_layer(
        self,
        index: int,
        layer: LayerWeights,
        cache: tuple[torch.Tensor, torch.Tensor],
        stream: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        at: torch.Tensor,
    ) -> torch.Tensor:
        config = self.config
        weights = tensors_of(layer)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        query, key, value = project(stream, cos, sin, weights, heads, kv_heads, config.rms_norm_eps)
        cache[0].index_copy_(2, at, key)
        cache[1].index_copy_(2, at, value)
        window = config.sliding_windows[index]
        if stream.shape[1] == 1:
            distance = at - torch.arange(cache[0].shape[2], device=at.device)
            seen = distance >= 0
            if window:
                seen &= distance < window
            # The query heads of a KV head stand as its query tokens: each key is read once.
            grouped = query.reshape(len(query), kv_heads, heads // kv_heads, config.head_dim)
            context = F.scaled_dot_product_attention(
                grouped, *cache, attn_mask=seen.expand(1, 1, grouped.shape[2], -1)
            ).reshape(query.shape)
        else:
            context = causal_attention(query, key, value, window)
        return finish(stream, context, weights, config.rms_norm_eps)


Weights = tuple[torch.Tensor | None, ...]


def tensors_of(layer: LayerWeights) -> Weights:
    """A layer as compiled functions take it."""
    return (
        layer.input_norm,
        layer.qkv,
        layer.qkv_bias,
        layer.q_norm,
        layer.k_norm,
        layer.o,
        layer.o_bias,
        layer.post_norm,
        layer.gate_up,
        layer.gate_up_bias,
        layer.down,
        layer.down_bias,
    )


def decoder_layer(
    stream: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weights: Weights,
    heads: int,
    kv_heads: int,
    eps: float,
    window: int,
) -> torch.Tensor:
    """One layer over rows [B, T, H]."""
    query, key, value = project(stream, cos, sin, weights, heads, kv_heads, eps)
    return finish(stream, causal_attention(query, key, value, window), weights, eps)


def project(
    stream: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weights: Weights,
    heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries, keys and values [B, heads, T, D] of the layer's input."""
    input_norm, qkv, qkv_bias, q_norm, k_norm = weights[:5]
    assert input_norm is not None
    assert qkv is not None
    packed = F.linear(rms_norm(stream, input_norm, eps), qkv, qkv_bias)
    query, key, value = split_heads(packed, heads, kv_heads)
    if q_norm is not None and k_norm is not None:
        query, key = rms_norm(query, q_norm, eps), rms_norm(key, k_norm, eps)
    return rotate(query, cos, sin), rotate(key, cos, sin), value


def finish(
    stream: torch.Tensor, context: torch.Tensor, weights: Weights, eps: float
) -> torch.Tensor:
    """What follows attention, whose answer is [B, heads, T, D]."""
    o, o_bias, post_norm, gate_up, gate_up_bias, down, down_bias = weights[5:]
    assert o is not None
    assert post_norm is not None
    assert gate_up is not None
    assert down is not None
    stream = stream + F.linear(context.transpose(1, 2).flatten(2), o, o_bias)
    gated = silu_mul(F.linear(rms_norm(stream, post_norm, eps), gate_up, gate_up_bias))
    return stream + F.linear(gated, down, down_bias)


def split_heads(
    packed: torch.Tensor, heads: int, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B, T, (heads + 2 kv_heads) * D] as queries, keys and values [B, heads, T, D]."""
    batch, tokens, width = packed.shape
    size = width // (heads + 2 * kv_heads)
    parts = packed.view(batch, tokens, -1, size).transpose(1, 2)
    query, key, value = torch.split(parts, [heads, kv_heads, kv_heads], dim=1)
    return query, key, value


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [B, heads, T, D] by rows [T, D / 2], as the engine's kernels do it."""
    low, high = x.chunk(2, dim=-1)
    c, s = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((low * c - high * s, high * c + low * s), dim=-1)


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int
) -> torch.Tensor:
    """[B, heads, T, D]; ``window`` positions are seen, or all before (0)."""
    mask = None
    if window:
        at = torch.arange(query.shape[2], device=query.device)
        distance = at[:, None] - at[None, :]
        mask = (distance >= 0) & (distance < window)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
