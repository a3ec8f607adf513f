"""Sampling as plain Python, one position at a time: an oracle that shares nothing with the engine.

Every function takes what one position needs: a list of raw logits, the prompt, and the output
tokens before the position, drafts on its path included.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

MASK32 = 0xFFFFFFFF


@dataclass
class Params:
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    min_new_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
    bans: tuple[tuple[int, ...], ...] = ()
    allowed: tuple[int, ...] | None = None
    two_back: float | None = None  # a custom processor: what the token two back loses

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-6 or self.top_k == 1


def philox4x32_10(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """The published round function, ten times."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (second >> 32) ^ c[1] ^ k[0],
            second & MASK32,
            (first >> 32) ^ c[3] ^ k[1],
            first & MASK32,
        ]
        k = [(k[0] + 0x9E3779B9) & MASK32, (k[1] + 0xBB67AE85) & MASK32]
    return c


def gumbel(seed: int, position: int, token: int) -> float:
    counter = [token // 4, 0, position & MASK32, position >> 32 & MASK32]
    words = philox4x32_10(counter, [seed & MASK32, seed >> 32 & MASK32])
    return -math.log(-math.log((words[token % 4] + 0.5) / 2**32))


def process(
    logits: Sequence[float], params: Params, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Penalties, bias, minimum length, bans and a custom processor."""
    counts = Counter(output)
    before = [*prompt, *output]
    seen = set(prompt) | set(output)
    out = []
    for token, value in enumerate(logits):
        if token in seen:
            value = value / params.repetition if value > 0 else value * params.repetition
        value -= counts[token] * params.frequency
        value -= params.presence if counts[token] else 0.0
        value += params.bias.get(token, 0.0)
        if len(output) < params.min_new_tokens and token in params.eos_ids:
            value = -math.inf
        if params.allowed is not None and token not in params.allowed:
            value = -math.inf
        if any(ends_with([*output, token], ban) for ban in params.bans):
            value = -math.inf
        if params.two_back is not None and len(before) > 1 and token == before[-2]:
            value -= params.two_back
        out.append(value)
    return out


def ends_with(tokens: Sequence[int], ban: Sequence[int]) -> bool:
    return list(tokens[len(tokens) - len(ban) :]) == list(ban) if len(ban) <= len(tokens) else False


def kept(scaled: Sequence[float], params: Params) -> list[int]:
    """Ids that top_k, top_p and min_p leave, best first."""
    order = sorted(range(len(scaled)), key=lambda t: (-scaled[t], t))
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = {t: math.exp(scaled[t] - scaled[order[0]]) for t in order}
    total = math.fsum(weights.values())
    out, mass = [], 0.0
    for token in order:
        if params.top_p < 1.0 and mass >= params.top_p * total:
            break
        mass += weights[token]
        if weights[token] >= params.min_p:
            out.append(token)
    return out


def choose(
    logits: Sequence[float],
    params: Params,
    prompt: Sequence[int],
    output: Sequence[int],
    seed: int,
) -> int:
    """The token at position len(prompt) + len(output)."""
    values = process(logits, params, prompt, output)
    if params.greedy:
        return max(range(len(values)), key=lambda t: (values[t], -t))
    scaled = [value / params.temperature for value in values]
    position = len(prompt) + len(output)
    scores = {t: scaled[t] + gumbel(seed, position, t) for t in kept(scaled, params)}
    return max(scores, key=lambda t: (scores[t], -t))


def probabilities(
    logits: Sequence[float], params: Params, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """The distribution that ``choose`` draws from."""
    values = process(logits, params, prompt, output)
    scaled = [value / params.temperature for value in values]
    allowed = set(kept(scaled, params))
    top = max(scaled)
    weights = [math.exp(v - top) if t in allowed else 0.0 for t, v in enumerate(scaled)]
    return [weight / math.fsum(weights) for weight in weights]


def log_softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    total = math.fsum(math.exp(value - top) for value in logits)
    return [value - top - math.log(total) for value in logits]


def chi_square_p(observed: Sequence[int], expected: Sequence[float]) -> float:
    """Upper tail of the chi-square statistic (Wilson-Hilferty's normal approximation)."""
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    freedom = len(observed) - 1
    spread = 2.0 / (9.0 * freedom)
    z = ((statistic / freedom) ** (1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2.0))
