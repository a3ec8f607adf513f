"""Muon for matrices between hidden states, AdamW for the rest; the learning rate's schedule."""

import math
from typing import Literal

import torch

Named = dict[str, torch.Tensor]


class Optimizer:
    """Updates float32 leaves in place. ``matrices``: names that Muon takes; the rest is AdamW's."""

    def __init__(
        self,
        parameters: Named,
        matrices: frozenset[str],
        matrix_lr: float,
        adam_lr: float,
        weight_decay: float,
    ) -> None:
        self._matrices = {n: p for n, p in parameters.items() if n in matrices}
        self._others = {n: p for n, p in parameters.items() if n not in matrices}
        self._matrix_lr, self._adam_lr = matrix_lr, adam_lr
        self._weight_decay = weight_decay
        self._momentum = {n: torch.zeros_like(p) for n, p in self._matrices.items()}
        self._mean = {n: torch.zeros_like(p) for n, p in self._others.items()}
        self._square = {n: torch.zeros_like(p) for n, p in self._others.items()}
        self._count = 0

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update by the leaves' gradients; ``factor`` scales both learning rates."""
        self._count += 1
        rate = self._matrix_lr * factor
        for name, leaf in self._matrices.items():
            assert leaf.grad is not None
            momentum = self._momentum[name].lerp_(leaf.grad, 1.0 - 0.95)
            update = orthogonal(leaf.grad.lerp(momentum, 0.95))
            tall = max(1.0, leaf.shape[0] / leaf.shape[1]) ** 0.5
            leaf.mul_(1.0 - rate * self._weight_decay).add_(update, alpha=-rate * tall)
        if self._others:
            self._adam(self._adam_lr * factor)

    def _adam(self, rate: float) -> None:
        names = list(self._others)
        leaves = [self._others[n] for n in names]
        grads = [leaf.grad for leaf in leaves]
        assert all(grad is not None for grad in grads)
        means, squares = [self._mean[n] for n in names], [self._square[n] for n in names]
        torch._foreach_lerp_(means, grads, 1.0 - 0.9)
        torch._foreach_mul_(squares, 0.95)
        torch._foreach_addcmul_(squares, grads, grads, 1.0 - 0.95)
        widths = torch._foreach_sqrt(squares)
        torch._foreach_div_(widths, math.sqrt(1.0 - 0.95**self._count))
        torch._foreach_add_(widths, 1e-8)
        torch._foreach_addcdiv_(leaves, means, widths, -rate / (1.0 - 0.9**self._count))

    def state(self) -> dict[str, object]:
        """What ``load`` takes."""
        return {
            "count": self._count,
            "momentum": self._momentum,
            "mean": self._mean,
            "square": self._square,
        }

    def load(self, state: dict[str, object]) -> None:
        """Go on where ``state`` was taken."""
        count = state["count"]
        assert isinstance(count, int)
        self._count = count
        for name in ("momentum", "mean", "square"):
            saved, mine = state[name], getattr(self, f"_{name}")
            assert isinstance(saved, dict)
            for key, tensor in mine.items():
                tensor.copy_(saved[key])


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with its singular values moved near one, by five Newton-Schulz iterations."""
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    wide = x.shape[0] > x.shape[1]
    x = x.t() if wide else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return (x.t() if wide else x).float()


def rate_factor(
    progress: float, warmup: float, decay: float, kind: Literal["linear", "cosine"]
) -> float:
    """The learning rate's factor at ``progress`` of the schedule, 0 to 1."""
    if warmup and progress < warmup:
        return max(progress / warmup, 0.02)
    if not decay or progress <= 1.0 - decay:
        return 1.0
    left = max(0.0, (1.0 - progress) / decay)
    return left if kind == "linear" else 0.5 - 0.5 * math.cos(math.pi * left)
