"""DSPARK in training: rows say the token behind their own, one after the other by a Markov head."""

import torch
import torch.nn.functional as F

from ...engine_core.train_spec import weighting_of
from .batches import Batch
from .block_loss import Drafted, Objective
from .block_recipe import BlockRecipe, Named
from .draft_layer import learnt_matrix
from .markov_head import W1, W2, MarkovHead
from .recipe import Confidences, Setting

_PROJ, _BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"


class DSpark(BlockRecipe):
    """All rows of a block, through the target's head and the Markov head's bias; and a confidence
    head, which learns how likely a draft is accepted if all before it were.
    """

    architecture = "DSparkDraftModel"
    first_row = 0

    def __init__(self, setting: Setting) -> None:
        spec, hidden = setting.spec, setting.target.config.hidden_size
        rank = spec.markov_rank or max(8, hidden // 8)
        self._markov = MarkovHead(spec.markov_head, rank)
        super().__init__(setting)

    def heads(self, generator: torch.Generator) -> Named:
        """The Markov head's and the confidence head's."""
        vocab, hidden = self._model.vocab_size, self._model.hidden_size
        device = self._target.device
        made = self._markov.initial(vocab, hidden, generator, device)
        made[_PROJ] = learnt_matrix((1, hidden + self._markov.rank), generator, device)
        made[_BIAS] = torch.zeros(1, device=device, requires_grad=True)
        return made

    def objective(self) -> Objective:
        """Cross-entropy and L1 distance, which is twice the total variation."""
        spec = self._spec
        alpha = spec.dpace_alpha if weighting_of(spec) == "dpace" else None
        parts = spec.ce_weight, 2.0 * spec.l1_weight
        hard, greedy = spec.hard_weight, spec.confidence_greedy
        return Objective(*parts, False, hard, greedy, spec.survival_floor, alpha)

    def drafted(
        self, hidden: torch.Tensor, before: torch.Tensor, weights: Named
    ) -> tuple[Drafted, torch.Tensor | None]:
        """The text's own tokens stand before each draft, as those do that were accepted."""
        embedded = F.embedding(before, weights[W1])
        latent = self._markov.latents(hidden, embedded, weights)
        made = Drafted(hidden, self._target.lm_head, latent.contiguous(), weights[W2])
        return made, _confidence(hidden, embedded, weights)

    def choose(
        self, hidden: torch.Tensor, bonus: torch.Tensor, weights: Named
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One token after the other, each behind the one chosen before."""
        logits = F.linear(hidden, self._target.lm_head)
        state: torch.Tensor | None = None
        before = bonus
        tokens: list[torch.Tensor] = []
        confidences: list[torch.Tensor] = []
        for place in range(hidden.shape[1]):
            row, embedded = hidden[:, place], F.embedding(before, weights[W1])
            confidences.append(_confidence(row, embedded, weights))
            latent, state = self._markov.advance(row, embedded, state, weights)
            before = (logits[:, place] + F.linear(latent, weights[W2])).argmax(-1)
            tokens.append(before)
        return torch.stack(tokens, dim=1), torch.stack(confidences, dim=1)

    def confidences(self, batch: Batch) -> Confidences:
        """See Confident."""
        found = self.propose(batch)
        assert found.confidence is not None
        return Confidences(found.confidence, found.agree, 0)

    def fields(self) -> dict[str, object]:
        """Also under ``dflash_config``, where some loaders look for them."""
        return {
            "markov_rank": self._markov.rank,
            "markov_head_type": self._markov.kind,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "sample_from_anchor": True,
        }


def _confidence(hidden: torch.Tensor, embedded: torch.Tensor, weights: Named) -> torch.Tensor:
    """float32[…] of rows' hidden states [… , H] and the embeddings [… , r] of the tokens before."""
    read = torch.cat((hidden.float(), embedded.float()), dim=-1)
    return F.linear(read, weights[_PROJ], weights[_BIAS])[..., 0]
