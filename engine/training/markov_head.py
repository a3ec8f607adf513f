"""DSPARK's Markov head in training: a bias on a row's logits from the token before it."""

import torch
import torch.nn.functional as F

from ...engine_core.draft_config import MarkovKind
from .draft_layer import learnt_matrix

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_GATE, _JOINT = "markov_head.gate_proj", "markov_head.joint_proj"
Named = dict[str, torch.Tensor]


class MarkovHead:
    """Logits get ``markov_w2`` times a latent [r], which the embedding ``markov_w1`` of the token
    before makes: as it is ("vanilla"), gated by the row's hidden state, or as a recurrent cell.
    """

    def __init__(self, kind: MarkovKind, rank: int) -> None:
        self.kind = kind
        self.rank = rank

    def initial(
        self, vocab: int, hidden: int, generator: torch.Generator, device: torch.device
    ) -> Named:
        """Parameters by which the head says nothing at first."""
        rank = self.rank
        made = {
            W1: learnt_matrix((vocab, rank), generator, device),
            W2: torch.zeros(vocab, rank, device=device, requires_grad=True),
        }
        name, size = (_GATE, (rank, hidden + rank))
        if self.kind == "rnn":
            name, size = (_JOINT, (3 * rank, 2 * rank + hidden))
        if self.kind != "vanilla":
            made[f"{name}.weight"] = learnt_matrix(size, generator, device)
            made[f"{name}.bias"] = torch.zeros(size[0], device=device, requires_grad=True)
        return made

    def latents(self, hidden: torch.Tensor, embedded: torch.Tensor, weights: Named) -> torch.Tensor:
        """[N, K, r] of whole blocks: hidden states [N, K, H], embeddings [N, K, r]."""
        if self.kind != "rnn":
            return self.advance(hidden, embedded, None, weights)[0]
        state: torch.Tensor | None = None
        made: list[torch.Tensor] = []
        for place in range(hidden.shape[1]):
            latent, state = self.advance(hidden[:, place], embedded[:, place], state, weights)
            made.append(latent)
        return torch.stack(made, dim=1)

    def advance(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        state: torch.Tensor | None,
        weights: Named,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The latent of a row, and the recurrent cell's next state; None is the first one."""
        if self.kind == "vanilla":
            return embedded, None
        if self.kind == "gated":
            joined = torch.cat((hidden, embedded), dim=-1)
            gate = F.linear(joined, weights[f"{_GATE}.weight"], weights[f"{_GATE}.bias"])
            return gate.sigmoid() * embedded, None
        state = torch.zeros_like(embedded) if state is None else state
        joined = torch.cat((state, embedded, hidden), dim=-1)
        cell = F.linear(joined, weights[f"{_JOINT}.weight"], weights[f"{_JOINT}.bias"])
        gate, candidate, output = cell.chunk(3, dim=-1)
        kept = gate.sigmoid()
        return output.tanh(), kept * state + (1.0 - kept) * candidate.tanh()
