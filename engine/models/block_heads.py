"""DSPARK's Markov heads over a block's hidden states (block_drafts.md 2.5), in plain torch."""

import torch
import torch.nn.functional as F

from ...kernels.greedy_argmax import draft_argmax
from ...kernels.markov_latent import gated_latent, rnn_latent
from .block_net import Draw
from .block_weights import MarkovWeights


def draft_by_markov(
    markov: MarkovWeights,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    bonus: torch.Tensor,
    tokens: torch.Tensor,
    draw: Draw | None,
) -> None:
    """Fill ``tokens`` int64[D, R] one after the other: drawn, or the likeliest.

    ``hidden`` [D, R, H], ``logits`` [D, R, V] and ``markov`` of one dtype; ``bonus`` int64[R] is
    what draft 0 follows.
    """
    state = hidden.new_zeros(hidden.shape[1], markov.w1.shape[1])
    before = bonus
    for level, (h, base, chosen) in enumerate(zip(hidden, logits, tokens, strict=True)):
        latent = F.embedding(before, markov.w1)
        if markov.gate is not None:
            gate = F.linear(torch.cat((h, latent), dim=1), markov.gate, markov.gate_bias)
            latent = gated_latent(gate, latent)
        elif markov.joint is not None:
            taken = torch.cat((state, latent, h), dim=1)
            latent = rnn_latent(F.linear(taken, markov.joint, markov.joint_bias), state)
        addend = F.linear(latent, markov.w2)
        if draw is None:
            draft_argmax(base, addend, tokens=chosen)
        else:
            draw(level, base + addend, chosen)
        before = chosen
