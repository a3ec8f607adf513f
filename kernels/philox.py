"""Philox4x32-10, the counter-based generator of Salmon et al. (SC 2011), in torch integer ops.

A word depends on (seed, position, token id) alone, so a token's noise is the same in any batch,
at any draft length and on any device.
"""

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_ROUNDS = 10


def philox_words(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int64[M, vocab_size] words in 0..2^32-1, one per token id.

    ``seeds`` and ``positions`` are int64[M]. The key is the seed; the counter is (id // 4, 0,
    position's low half, its high half); word id % 4 of the block is the id's.
    """
    blocks = torch.arange((vocab_size + 3) // 4, device=seeds.device)
    c0 = blocks[None].expand(seeds.shape[0], -1)
    c1 = torch.zeros_like(c0)
    c2 = (positions & _LOW)[:, None].expand_as(c0)
    c3 = (positions >> 32 & _LOW)[:, None].expand_as(c0)
    k0, k1 = (seeds & _LOW)[:, None], (seeds >> 32 & _LOW)[:, None]
    for step in range(_ROUNDS):
        if step:
            k0, k1 = k0 + _WEYL[0] & _LOW, k1 + _WEYL[1] & _LOW
        # The products wrap in int64, which leaves all 64 of their bits right.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> 32 & _LOW) ^ c1 ^ k0,
            p1 & _LOW,
            (p0 >> 32 & _LOW) ^ c3 ^ k1,
            p0 & _LOW,
        )
    words = torch.stack((c0, c1, c2, c3), dim=2)
    return words.flatten(1)[:, :vocab_size]
