"""What a request asks for beyond the argmax of the raw logits."""

from enum import IntFlag

from ...engine_core.sampling_params import SamplingParams


class Feature(IntFlag):
    """One byte a slot."""

    NONE = 0
    SAMPLED = 1
    PENALTIES = 2
    LOGIT_BIAS = 4
    MIN_TOKENS = 8
    LOGPROBS = 16
    BANS = 32
    GRAMMAR = 64
    PROCESSORS = 128


# Plain ints: an IntFlag operand costs numpy microseconds.
EDITS = int(Feature.PENALTIES | Feature.LOGIT_BIAS | Feature.MIN_TOKENS | Feature.BANS)
PROCESSED = EDITS | int(Feature.SAMPLED | Feature.GRAMMAR | Feature.PROCESSORS)
AFTERWARDS = int(Feature.PENALTIES | Feature.LOGPROBS | Feature.BANS)


def features_of(params: SamplingParams, eos_ids: tuple[int, ...]) -> Feature:
    """The features that a request's parameters switch on."""
    found = Feature.NONE
    if not params.greedy:
        found |= Feature.SAMPLED
    if params.penalized:
        found |= Feature.PENALTIES
    if params.logit_bias:
        found |= Feature.LOGIT_BIAS
    if params.min_new_tokens > 0 and eos_ids:
        found |= Feature.MIN_TOKENS
    if params.bans:
        found |= Feature.BANS
    if params.logprobs is not None:
        found |= Feature.LOGPROBS
    if params.grammar is not None:
        found |= Feature.GRAMMAR
    if params.logits_processors:
        found |= Feature.PROCESSORS
    return found
