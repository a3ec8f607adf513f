"""Block verification along chains, on a CPU: torch for the laws, native code for every draw."""

from typing import NamedTuple

import torch

from .noise_streams import ACCEPT, PLACES, RESIDUAL
from .philox import philox_words
from .rejection_sample import beyond, draft_law, left_over, target_law
from .rejection_sample_cpu import draw_filtered, draw_unfiltered


def block_verify(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    drafts: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_rows: torch.Tensor,
    draft_ids: torch.Tensor | None,
) -> torch.Tensor:
    """int64[M]: the token of each node; of unusable rows of logits it means nothing.

    The arguments are those of ``rejection_sample``. The nodes of a chain follow each other, and its
    last one has no draft. How many drafts a chain keeps is decided from the last one back (Sun et
    al., arXiv 2403.10444): w_0 = 1 and w_i = min(w_{i-1} p(x_i) / q(x_i), 1) of drafts x_1, x_2,
    ...; s_i is what w_i p has beyond q behind x_i; i drafts are kept where no more are and u_i <
    s_i / (s_i + 1 - w_i), all k of them where u_k < w_k. The tokens of nodes before are their
    drafts; the node where the chain ends draws from max(w_i p - q, 0), from p where rounding leaves
    nothing; later ones, and those without drafts, with ``coupled_sample``'s noise.

    Coins are keyed by the round, its first node's position, and the draft: those of drafts that
    were not kept had a say in what was, so no later round may meet them again.
    """
    chains = _chains(drafts)
    held = chains.held
    laws = _Laws(
        target_law(
            logits[held], temperatures[held], top_ks[held], top_ps[held], min_ps[held],
            torch.float32,
        ),
        draft_law(draft_logits[draft_rows[held]], temperatures[held], torch.float32),
        draft_ids,
    )  # fmt: skip
    coin_places = (positions - chains.depths) * PLACES + chains.depths
    coins = (philox_words(seeds ^ ACCEPT, coin_places, 1)[:, 0].double() + 0.5) * 2.0**-32
    shares, kept = _keep(chains, laws, drafts[held], coins)
    ahead = kept[chains.chain] - chains.depths  # drafts kept behind the node, below 0 beyond
    tokens = drafts.clone()
    ends = held[ahead[held] == 0]
    rest = (ahead <= 0).index_fill_(0, ends, False)
    if rest.any():
        tokens[rest] = draw_filtered(
            logits[rest], temperatures[rest], top_ks[rest], top_ps[rest], min_ps[rest],
            seeds[rest], positions[rest],
        )  # fmt: skip
    if len(ends):
        p, q = laws.rows(chains.numbers[ends])
        left = left_over(p.mul_(shares[ends, None].float()), q, draft_ids)
        tokens[ends] = draw_unfiltered(
            left.log_(), torch.ones(len(ends)), seeds[ends] ^ RESIDUAL, positions[ends]
        )
    return tokens


class _Chains(NamedTuple):
    """Of M nodes: ``depths`` int64[M] within their chains and ``chain`` int64[M], which one it is;
    ``held`` int64[H], the nodes with drafts, and ``numbers`` int64[M], which of those a node is."""

    depths: torch.Tensor
    chain: torch.Tensor
    held: torch.Tensor
    numbers: torch.Tensor


def _chains(drafts: torch.Tensor) -> _Chains:
    """Chains begin where no draft leads to."""
    has = drafts >= 0
    begins = torch.ones_like(has)
    begins[1:] = ~has[:-1]
    chain = begins.cumsum(0) - 1
    depths = torch.arange(len(drafts)) - begins.nonzero()[:, 0][chain]
    return _Chains(depths, chain, has.nonzero()[:, 0], has.cumsum(0) - 1)


class _Laws(NamedTuple):
    """``p`` float32[H, V] and ``q`` float32[H, Vd] of the nodes with drafts."""

    p: torch.Tensor
    q: torch.Tensor
    draft_ids: torch.Tensor | None

    def rows(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.p[numbers], self.q[numbers]

    def ratios(self, drafts: torch.Tensor) -> torch.Tensor:
        """float64[H]: p / q of each node's draft, 0 where q knows none."""
        columns = drafts if self.draft_ids is None else self.draft_ids[drafts].long()
        p_d = self.p.gather(1, drafts[:, None])[:, 0].double()
        q_d = self.q.gather(1, columns.clamp(min=0)[:, None])[:, 0].double()
        return torch.where((columns >= 0) & (q_d > 0), p_d / q_d, 0.0)


def _keep(
    chains: _Chains, laws: _Laws, drafts: torch.Tensor, coins: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """w float64[M] of each node, and how many drafts each chain keeps, int64."""
    ratios = laws.ratios(drafts)
    shares = torch.ones(len(coins), dtype=torch.float64)
    kept = torch.zeros(int(chains.chain[-1]) + 1, dtype=torch.int64)
    holds = torch.zeros(len(coins), dtype=torch.bool)
    holds[chains.held] = True
    for depth in range(1, int(chains.depths.max()) + 1):
        nodes = (chains.depths == depth).nonzero()[:, 0]
        shares[nodes] = (shares[nodes - 1] * ratios[chains.numbers[nodes - 1]]).clamp_(max=1)
        chances = shares[nodes]
        split = (chances > 0) & (chances < 1) & holds[nodes]
        if split.any():
            w = chances[split]
            p, q = laws.rows(chains.numbers[nodes[split]])
            mass = beyond(p.mul_(w[:, None].float()), q, laws.draft_ids).sum(dim=1).double()
            chances[split] = mass / (mass + 1 - w)
        won = nodes[coins[nodes] < chances]
        kept[chains.chain[won]] = depth
    return shares, kept
