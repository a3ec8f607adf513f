"""Attention of a draft's unroll: the context's keys, and the row's own drafted ones.

Row p of step i stands at position p + i. It sees the keys of the context's positions 0..p, made by
step 0 from the target's features, and the keys that steps 1..i made in the same row. The context
is a plain causal attention; the few others are merged into its softmax by the log-sum-exp, and
backward passes the merged sums on to the context's own kernel.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from .compiled import compiled

_aten = torch.ops.aten


class Keys(NamedTuple):
    """Keys and values [B, KV heads, R, D] of one step."""

    key: torch.Tensor
    value: torch.Tensor


def chain_attention(query: torch.Tensor, context: Keys, drafted: list[Keys]) -> torch.Tensor:
    """[B, heads, R, D] of queries of that shape; ``drafted``: steps 1 to this one's."""
    group = query.shape[1] // context.key.shape[1]
    wide = [_repeat(tensor, group) for keys in (context, *drafted) for tensor in keys]
    answer: torch.Tensor = _ChainAttention.apply(query.contiguous(), *wide)  # type: ignore[no-untyped-call]
    return answer


def dense_chain_attention(query: torch.Tensor, context: Keys, drafted: list[Keys]) -> torch.Tensor:
    """The same through the whole matrix of scores, for tests and devices without the kernel."""
    group = query.shape[1] // context.key.shape[1]
    key, value = (_repeat(tensor, group) for tensor in context)
    rows, scale = query.shape[2], query.shape[3] ** -0.5
    scores = (query @ key.transpose(2, 3)).float() * scale
    later = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
    scores = scores.masked_fill(later, float("-inf"))
    own = [
        ((query * _repeat(keys.key, group)).float().sum(-1, keepdim=True) * scale)
        for keys in drafted
    ]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1).to(query.dtype)
    answer = weights[..., :rows] @ value
    for index, keys in enumerate(drafted):
        answer = answer + weights[..., rows + index, None] * _repeat(keys.value, group)
    return answer


def attention_for(
    device: torch.device, head_dim: int
) -> Callable[[torch.Tensor, Keys, list[Keys]], torch.Tensor]:
    """``chain_attention`` where its kernel agrees with the whole matrix of scores, tried once."""
    if device.type != "cuda":
        return chain_attention
    try:
        generator = torch.Generator().manual_seed(0)
        leaves = [
            torch.randn(2, 2, 130, head_dim, generator=generator)
            .to(device, torch.bfloat16)
            .requires_grad_()
            for _ in range(7)
        ]
        keys = [Keys(leaves[i], leaves[i + 1]) for i in (1, 3, 5)]
        answers = [
            function(leaves[0], keys[0], keys[1:])
            for function in (chain_attention, dense_chain_attention)
        ]
        found = [[a, *torch.autograd.grad(a.float().square().sum(), leaves)] for a in answers]
        worst = max(float((x - y).detach().abs().max()) for x, y in zip(*found, strict=True))
        if worst < 0.1:
            return chain_attention
        reason = f"it is off by {worst:g}"
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
    warnings.warn(
        f"the flash attention of this torch cannot be used ({reason}); training is slower",
        stacklevel=2,
    )
    return dense_chain_attention


def _repeat(tensor: torch.Tensor, group: int) -> torch.Tensor:
    """Each KV head ``group`` times, contiguous."""
    return tensor.repeat_interleave(group, dim=1).contiguous()


class _ChainAttention(torch.autograd.Function):
    """Arguments: query, then key and value of the context and of each drafted step."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, *keys: torch.Tensor) -> torch.Tensor:
        key, value, *own = (tensor.detach() for tensor in keys)
        answer, sums, ctx.extra = _flash(query, key, value)
        answer = answer.float().contiguous()
        scale = query.shape[-1] ** -0.5
        merge = _compiled_for(query, _merge)
        for index in range(0, len(own), 2):
            answer, sums = merge(query.detach(), own[index], own[index + 1], answer, sums, scale)
        answer = answer.to(query.dtype).contiguous()
        ctx.save_for_backward(query, answer, sums, *keys)
        return answer

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, answer, sums, key, value, *own = ctx.saved_tensors
        grad = grad.contiguous()
        scale = query.shape[-1] ** -0.5
        context = _flash_backward(grad, query, key, value, answer, sums, ctx.extra)
        grad_query = context[0].float()
        delta = (grad.float() * answer.float()).sum(-1)
        grads: list[torch.Tensor] = []
        unmerge = _compiled_for(query, _unmerge)
        for index in range(0, len(own), 2):
            grad_query, grad_key, grad_value = unmerge(
                query, own[index], own[index + 1], grad, sums, delta, grad_query, scale
            )
            grads += [grad_key, grad_value]
        return (grad_query.to(query.dtype), context[1], context[2], *grads)


def _merge(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    answer: torch.Tensor,
    sums: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One more key a row in an attention's answer and its log-sum-exp [B, heads, R]."""
    score = (query.float() * key.float()).sum(-1) * scale
    merged = torch.logaddexp(sums, score)
    kept = (sums - merged).exp()[..., None] * answer.float()
    return kept + (score - merged).exp()[..., None] * value.float(), merged


def _unmerge(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad: torch.Tensor,
    sums: torch.Tensor,
    delta: torch.Tensor,
    grad_query: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of a row's own key; the query's is added to ``grad_query``."""
    wide, wide_key, wide_grad = query.float(), key.float(), grad.float()
    share = ((wide * wide_key).sum(-1) * scale - sums).exp()
    of_score = (share * ((wide_grad * value.float()).sum(-1) - delta) * scale)[..., None]
    return (
        grad_query + of_score * wide_key,
        (of_score * wide).to(key.dtype),
        (share[..., None] * wide_grad).to(value.dtype),
    )


def _compiled_for(query: torch.Tensor, plain: Callable[..., Any]) -> Callable[..., Any]:
    return compiled(plain) if query.device.type == "cuda" else plain


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Causal attention: the answer, float32 log-sum-exp [B, heads, R], what backward needs."""
    if query.device.type == "cuda":
        answer, sums, *rest = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, True, False
        )
        # cum_seq_q, cum_seq_k, max_q, max_k, seed, offset
        return answer, sums, tuple(rest[:6])
    answer, sums = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
    return answer, sums, ()


def _flash_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    answer: torch.Tensor,
    sums: torch.Tensor,
    extra: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    arguments = (grad, query, key, value, answer, sums)
    if query.device.type == "cuda":
        cum_q, cum_k, max_q, max_k, seed, offset = extra
        found = _aten._scaled_dot_product_flash_attention_backward(
            *arguments, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset
        )
    else:
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*arguments, 0.0, True)
    return cast(tuple[torch.Tensor, torch.Tensor, torch.Tensor], tuple(found))
