"""How far apart two tokens are at a place of an output, as an engine itself decodes there."""

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from ..engine_core.divergence import TIE_GAP
from ..engine_core.sampling_params import SamplingParams
from .llm import LLM

_FINEST = TIE_GAP / 2
_FARTHEST = 32.0
_PRECISION = 1.05  # of the gap found, as a factor
_LIFT, _MOST = 50.0, 100.0  # of two tokens above all others; of any bias


def logit_gap(
    llm: LLM,
    prompt: list[int],
    before: Sequence[int],
    params: SamplingParams,
    expected: int,
    got: int,
) -> float:
    """By how much one token's logit must rise so that the other one is not emitted any more.

    The engine decodes one token behind the prompt and the output ``before`` the place, without
    drafts and alone, as ``params`` (n = 1) say: temperature, seed, filters, penalties and biases
    all take part, so that what is found is a distance of logits whatever decides between the two.
    Infinite where no rise will do.
    """
    probe = _behind(before, params, (expected, got))
    first = _emitted(llm, prompt, before, probe, 0.0, got)
    lifted = expected if first == got else got
    low, high = 0.0, _FINEST
    while _emitted(llm, prompt, before, probe, high, lifted) != lifted:
        low, high = high, high * 4
        if high > _FARTHEST:
            return float("inf")
    while low and high > low * _PRECISION:
        middle = (low * high) ** 0.5
        if _emitted(llm, prompt, before, probe, middle, lifted) == lifted:
            high = middle
        else:
            low = middle
    return high


def _emitted(
    llm: LLM,
    prompt: list[int],
    before: Sequence[int],
    probe: SamplingParams,
    rise: float,
    lifted: int,
) -> int:
    bias = dict(probe.logit_bias)
    bias[lifted] = min(bias.get(lifted, 0.0) + rise, _MOST)
    [result] = llm.generate(
        [[*prompt, *before]], replace(probe, logit_bias=bias), speculative=False
    )
    return result.token_ids[0]


def _behind(before: Sequence[int], params: SamplingParams, pair: tuple[int, int]) -> SamplingParams:
    """Parameters that decide the token behind ``before`` as ``params`` do in its midst.

    What counts output tokens is said as a bias, for they are part of the prompt now. A grammar is
    replaced by a lift of the two tokens, both of which it allows. A banned sequence counts where
    its beginning ends the output, and bans its last token.
    """
    bias = dict(params.logit_bias)
    for token, count in Counter(before).items():
        subtracted = params.frequency_penalty * count + params.presence_penalty
        if subtracted:
            bias[token] = bias.get(token, 0.0) - subtracted
    if params.grammar is not None:
        for token in pair:
            bias[token] = bias.get(token, 0.0) + _LIFT
    return replace(
        params,
        max_new_tokens=1,
        min_new_tokens=int(len(before) < params.min_new_tokens),
        frequency_penalty=0.0,
        presence_penalty=0.0,
        logit_bias={token: max(-_MOST, min(value, _MOST)) for token, value in bias.items()},
        bad_words_ids=tuple(
            ban[-1:]
            for ban in params.bad_words_ids
            if tuple(before[len(before) - len(ban) + 1 :]) == ban[:-1]
        ),
        stop=(),
        logprobs=None,
        prompt_logprobs=None,
        logprob_start_len=0,
        grammar=None,
    )
