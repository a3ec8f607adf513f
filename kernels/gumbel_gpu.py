# mypy: disable-error-code="no-untyped-call"
"""Gumbel noise on the GPU: every token's score in float32, the decisive ones in float64.

Two float64 logarithms a token would cost more than reading the logits. In float32 a score is off
by less than 3e-5, so only tokens within 1e-3 of the best need float64: one in nearly every tile.
"""

import triton
import triton.language as tl

from .logit_cut_gpu import BLOCK

_MARGIN = tl.constexpr(1e-3)
# Noise lies in (-3.2, 22.9): a token further than their difference below another cannot win.
_REACH = tl.constexpr(-30.0)
_LN2 = tl.constexpr(0.6931471805599453)
_WORD_SCALE = tl.constexpr(2.0**-32)


@triton.jit
def philox_words(
    seed: tl.tensor, position: tl.tensor, first: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """Uint32[SIZE] Philox words of the tokens from ``first``, a multiple of four."""
    block = (first // 4 + tl.arange(0, SIZE // 4)).to(tl.uint32)
    zero = block * 0
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, block, zero, low, high)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (SIZE,))


@triton.jit
def screening_noise(word: tl.tensor) -> tl.tensor:
    """-log(-log((word + 0.5) / 2^32)) in float32, its error below 1e-5."""
    below_one = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * _WORD_SCALE
    # Near one the uniform number itself has no digits left: -log(1 - t) = t + t^2/2 + ...
    series = 1.0 / 5 + below_one * (1.0 / 6)
    series = 1.0 / 3 + below_one * (1.0 / 4 + below_one * series)
    series = below_one * (1.0 + below_one * (1.0 / 2 + below_one * series))
    uniform = (word.to(tl.float32) + 0.5) * _WORD_SCALE
    exponential = tl.where(below_one < 0.125, series, tl.log2(uniform) * -_LN2)
    return tl.log2(exponential) * -_LN2


@triton.jit
def load_tile(
    row_logits: tl.tensor, tile: tl.tensor, vocab: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """A tile's ids and its logits in float32, -inf beyond the vocabulary."""
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(row_logits + ids, mask=ids < vocab, other=float("-inf"))
    return ids, x.to(tl.float32)


@triton.jit
def within(x: tl.tensor, top: tl.tensor, temperature: tl.tensor, least: tl.tensor) -> tl.tensor:
    """Whether (x - top) / temperature >= least and x is a number above -inf."""
    return (x > float("-inf")) & (tl.maximum(x - top, -1e30) / temperature >= least)


@triton.jit
def offer(
    row_logits: tl.tensor,
    tile: tl.tensor,
    x: tl.tensor,
    kept: tl.tensor,
    best: tl.tensor,
    best_id: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """The best (float64 score, id) so far, now with the kept tokens of a tile.

    ``top`` float32 is the row's largest logit; it is used only where min_p is above 0.
    """
    if tl.max(kept.to(tl.int32), 0) > 0:
        lanes = tl.arange(0, BLOCK)
        heat = temperature.to(tl.float64)
        local = tl.max(tl.where(kept, x, float("-inf")), 0)
        base = local.to(tl.float64) / heat
        words = philox_words(seed, position, tile * BLOCK, BLOCK)
        screen = tl.maximum(x - local, -1e30) / temperature + screening_noise(words)
        screen = tl.where(kept, screen, float("-inf"))
        lead = tl.max(screen, 0)
        while (lead > float("-inf")) & (base + (lead + _MARGIN).to(tl.float64) > best):
            lane = tl.argmax(screen, 0)
            token = tile * BLOCK + lane
            logit = tl.load(row_logits + token).to(tl.float32).to(tl.float64)
            word = tl.max(tl.where(lanes == lane, words, 0), 0)
            uniform = (word.to(tl.float64) + 0.5) * _WORD_SCALE
            score = logit / heat - tl.log(-tl.log(uniform))
            likely = (min_p <= 0) | (
                tl.exp(logit / heat - top.to(tl.float64) / heat) >= min_p.to(tl.float64)
            )
            better = likely & ((score > best) | ((score == best) & (token < best_id)))
            best = tl.where(better, score, best)
            best_id = tl.where(better, token, best_id)
            screen = tl.where(lanes == lane, float("-inf"), screen)
            lead = tl.max(screen, 0)
    return best, best_id


@triton.jit
def least_fall(min_p: tl.tensor) -> tl.tensor:
    """How far below the top, in units of temperature, a winner may be; a hair further."""
    least = tl.full((), _REACH, tl.float32)
    if min_p > 0:
        log_p = tl.log(min_p)
        least = tl.maximum(least, log_p + log_p * 1e-5 - _MARGIN)
    return least
