"""What the Markov heads of block drafts multiply by their vocabulary matrix; torch references."""

import torch


def gated_latent(gate: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """[N, r]: the embeddings [N, r] of tokens, let through by their gates' logits [N, r].

    float32 inside, one rounding at the end.
    """
    return (torch.sigmoid(gate.float()) * embedded.float()).to(embedded.dtype)


def rnn_latent(joint: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """[N, r]: the tanh of the last third of ``joint`` [N, 3r].

    ``state`` [N, r] becomes sigmoid(a) * state + (1 - sigmoid(a)) * tanh(c), of the other thirds
    [a ; c]. float32 inside, one rounding at the end.
    """
    keep, candidate, out = joint.float().chunk(3, dim=1)
    share = torch.sigmoid(keep)
    state.copy_(share * state.float() + (1 - share) * torch.tanh(candidate))
    return torch.tanh(out).to(joint.dtype)
