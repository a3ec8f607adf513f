"""DSPARK's Markov heads on Triton kernels."""

import torch

from ...kernels.embedding_gpu import embed
from ...kernels.greedy_argmax_gpu import draft_argmax
from ...kernels.markov_latent_gpu import gated_latent, rnn_latent
from ..gemm_timer import Layer
from .block_net import Draw
from .block_weights import MarkovWeights
from .gpu_layers import GpuLayers


class GpuMarkov:
    """As `block_heads.draft_by_markov`; ``weights`` are changed.

    What a head takes of the hidden states is the same whichever tokens are chosen: one matmul over
    all drafts ahead of the loop, to whose answer each step adds its own part.
    """

    def __init__(self, weights: MarkovWeights, hidden_size: int, parts: GpuLayers) -> None:
        self._weights = weights
        self._parts = parts
        self._of_hidden: torch.Tensor | None = None
        self._of_token: torch.Tensor | None = None
        rank = weights.w1.shape[1]
        if weights.gate is not None:
            self._of_hidden = weights.gate[:, :hidden_size].contiguous()
            self._of_token = weights.gate[:, hidden_size:].contiguous()
            weights.gate = None
        elif weights.joint is not None:
            self._of_hidden = weights.joint[:, 2 * rank :].contiguous()
            self._of_token = weights.joint[:, : 2 * rank].contiguous()
            weights.joint = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of what was taken out of the weights."""
        parts = (self._of_hidden, self._of_token)
        return sum(part.nbytes for part in parts if part is not None)

    def matmuls(self) -> Layer:
        """Those of a pass in the order of their launches."""
        last: Layer = [("none", self._weights.w2)]
        if self._of_hidden is None or self._of_token is None:
            return last
        return [("none", self._of_hidden), ("residual", self._of_token), *last]

    def draft(
        self,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        bonus: torch.Tensor,
        tokens: torch.Tensor,
        draw: Draw | None,
    ) -> None:
        """Fill ``tokens`` int64[D, R] from ``hidden`` [D, R, H] and ``logits`` [D, R, V].

        ``bonus`` int64[R] is what draft 0 follows.
        """
        weights, linear, pdl = self._weights, self._parts.linear, self._parts.pdl
        rnn = weights.joint_bias is not None
        rank = weights.w1.shape[1]
        shares: torch.Tensor | None = None
        if self._of_hidden is not None:
            bias = weights.joint_bias if rnn else weights.gate_bias
            shares = linear.linear(hidden.flatten(0, 1), self._of_hidden, bias=bias)
            shares = shares.view(*hidden.shape[:2], -1)
        # The rnn head's state beside the embedding of the token before.
        taken = hidden.new_zeros(hidden.shape[1], 2 * rank) if rnn else None
        before = bonus
        for step, chosen in enumerate(tokens):
            out = None if taken is None else taken[:, rank:]
            latent = embed(before, weights.w1, out=out, pdl=pdl)
            if shares is not None and self._of_token is not None:
                given = latent if taken is None else taken
                joint = linear.linear(given, self._of_token, residual=shares[step])
                if taken is None:
                    latent = gated_latent(joint, latent, pdl=pdl)
                else:
                    latent = rnn_latent(joint, taken[:, :rank], pdl=pdl)
            addend = linear.linear(latent, weights.w2)
            if draw is None:
                draft_argmax(logits[step], addend, tokens=chosen, pdl=pdl)
            else:
                draw(step, addend.add_(logits[step]), chosen)
            before = chosen
