"""From what a caller asks to single-sequence requests: n samples, ids, derived seeds."""

import uuid

import msgspec

from ..engine_core.sampling_params import SamplingParams

_MASK = 2**64 - 1


class GenerateItem(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to complete ``params.n`` times. ``prompt``: text, or at least one token id."""

    prompt: str | list[int]
    params: SamplingParams
    rid: str | None = None
    priority: int = 0
    cache_salt: str = ""
    speculative: bool = True


def new_rid() -> str:
    """A fresh request id."""
    return uuid.uuid4().hex


def child_rid(rid: str, sample: int, n: int) -> str:
    """Id of one sample: the request's own when n is 1, else with ``_<sample>`` behind it."""
    return rid if n == 1 else f"{rid}_{sample}"


def child_seed(seed: int | None, sample: int) -> int | None:
    """Seed of one sample: sample 0 has the request's, sample i splitmix64(seed + i * golden).

    Deterministic, so a seeded request with n = 4 repeats, and its first sample equals n = 1.
    Without a seed every sample draws its own in the core.
    """
    if seed is None or sample == 0:
        return seed
    z = (seed + sample * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z


def child_params(params: SamplingParams, sample: int) -> SamplingParams:
    """Parameters of one sample: n is 1 and the seed is its own."""
    if params.n == 1:
        return params
    return msgspec.structs.replace(params, n=1, seed=child_seed(params.seed, sample))
