"""The joint law of the tokens that an engine emits: what it should be, and how far draws are off.

The expected counts come from the model's own laws, a prefix at a time, through the scalar
reference's filters.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from outrider.engine_core.core import EngineCore
from outrider.engine_core.ids import f32, i32
from outrider.engine_core.sampling_params import SamplingParams

from ..reference import sampling_ref as ref
from .cores import drive, request, running_engine, tiny_config, tokens_of
from .tiny import write_checkpoint

PROMPT = [1, 3, 2]
LEAST_EXPECTED = 20
LEAST_P = 1e-4 / 96  # Bonferroni over the tests that use these
TEMPERATURE = 1.5
DRAWS = 9_000

Prefix = tuple[int, ...]
WARM = ref.Params(temperature=TEMPERATURE)


def folder_of(tmp_path: Path, vocab: int, **sizes: int) -> Path:
    return write_checkpoint(tmp_path / f"v{vocab}", vocab, scale=0.12, seed=8, **sizes)


def laws_after(
    folder: Path,
    vocab: int,
    prefixes: Sequence[Prefix],
    wanted: ref.Params = WARM,
    **flags: object,
) -> dict[Prefix, list[float]]:
    """The next token's distribution after the prompt and each prefix, by an engine without drafts
    of these ``flags``."""
    params = SamplingParams(temperature=0.0, max_new_tokens=1, logprobs=vocab, ignore_eos=True)
    names = {str(prefix): prefix for prefix in prefixes}
    laws = {}
    with running_engine(tiny_config(folder, None, **flags)) as engine:
        outputs = drive(
            engine.core, [request(rid, [*PROMPT, *prefix], params) for rid, prefix in names.items()]
        )
    for rid, prefix in names.items():
        (entry,) = outputs[rid][-1].logprobs
        values = dict(zip(i32(entry.top_ids).tolist(), f32(entry.top_values).tolist(), strict=True))
        row = [values[token] for token in range(vocab)]
        laws[prefix] = ref.probabilities(row, wanted, PROMPT, prefix)
    return laws


def draw(core: EngineCore, length: int, wanted: ref.Params = WARM, more: int = 0) -> list[Prefix]:
    """The first tokens of many seeded requests, which go on for some ``more``."""
    requests = [
        request(
            str(seed),
            PROMPT,
            SamplingParams(
                temperature=wanted.temperature,
                top_k=wanted.top_k,
                top_p=wanted.top_p,
                min_p=wanted.min_p,
                repetition_penalty=wanted.repetition,
                presence_penalty=wanted.presence,
                frequency_penalty=wanted.frequency,
                logit_bias=wanted.bias,
                bad_words_ids=wanted.bans,
                allowed_token_ids=wanted.allowed,
                logits_processors={}
                if wanted.two_back is None
                else {"two_back": {"strength": wanted.two_back}},
                max_new_tokens=length + more,
                seed=seed,
                ignore_eos=True,
            ),
        )
        for seed in range(DRAWS)
    ]
    return [tuple(tokens_of(outputs)[:length]) for outputs in drive(core, requests).values()]


def p_value(joint: dict[Prefix, float], found: Counter[Prefix]) -> float:
    """Chi-square of the cells, the rare ones pooled into one of enough draws."""
    observed: list[int] = []
    expected: list[float] = []
    pooled_observed, pooled_expected = 0, 0.0
    for cell, probability in joint.items():
        if probability * DRAWS >= LEAST_EXPECTED:
            observed.append(found[cell])
            expected.append(probability * DRAWS)
        else:
            pooled_observed += found[cell]
            pooled_expected += probability * DRAWS
    if pooled_expected >= LEAST_EXPECTED:
        observed.append(pooled_observed)
        expected.append(pooled_expected)
    assert len(expected) >= 0.5 * len(joint), "too few draws for this model"
    assert math.isclose(sum(expected), DRAWS, rel_tol=0.01)
    return ref.chi_square_p(observed, expected)


def joint_of(
    folder: Path, vocab: int, length: int = 3, wanted: ref.Params = WARM, **flags: object
) -> dict[Prefix, float]:
    """The joint law of the first ``length`` tokens; ``flags``: of the engine that says it."""
    shorter = [p for n in range(length) for p in itertools.product(range(vocab), repeat=n)]
    laws = laws_after(folder, vocab, shorter, wanted, **flags)
    return {
        path: math.prod(laws[path[:i]][token] for i, token in enumerate(path))
        for path in itertools.product(range(vocab), repeat=length)
    }


def behind_the_first(joint: dict[Prefix, float]) -> dict[Prefix, float]:
    """The joint law of all tokens but the first, which no draft stands for."""
    rest: dict[Prefix, float] = {}
    for path, probability in joint.items():
        rest[path[1:]] = rest.get(path[1:], 0.0) + probability
    return rest
