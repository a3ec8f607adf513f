"""A core process that draws with drafts by a broken rule, from a row's second draft on.

Run as a script in place of ``outrider.engine.core_process``. Both rules keep every draft behind
one that was kept, so that a check of first drafts alone would find nothing.
"""

import os
import sys

import torch

from outrider.engine import core_process
from outrider.kernels import block_verify_cpu, rejection_sample_cpu

honest_accept = vars(rejection_sample_cpu)["accept"]
honest_keep = vars(block_verify_cpu)["_keep"]


def accept(
    p: torch.Tensor,
    q: torch.Tensor,
    drafts: torch.Tensor,
    draft_ids: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Drafts of one seed at places in a row are a chain."""
    accepted: torch.Tensor = honest_accept(p, q, drafts, draft_ids, seeds, positions)
    behind = (seeds[1:] == seeds[:-1]) & (positions[1:] == positions[:-1] + 1)
    accepted[1:] |= behind
    return accepted


def keep(
    chains: block_verify_cpu._Chains,
    laws: block_verify_cpu._Laws,
    drafts: torch.Tensor,
    coins: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chain of which something is kept is kept as a whole."""
    shares, kept = honest_keep(chains, laws, drafts, coins)
    longest = torch.zeros_like(kept).scatter_reduce(0, chains.chain, chains.depths, "amax")
    return shares, torch.where(kept > 0, longest, kept)


vars(rejection_sample_cpu)["accept"] = accept
vars(block_verify_cpu)["_keep"] = keep

if __name__ == "__main__":
    status = core_process.main()
    sys.stderr.flush()
    os._exit(status)
