"""Rules that know q beside what they leave alone: greedy rows, rows without drafts, seeds."""

import msgspec
import pytest

from outrider.engine_core.draft_config import DraftAlgorithm
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.sampling_params import SamplingParams

from .cores import drive, request, tokens_of
from .draft_cores import ALGORITHMS, VOCAB, Models, draft_core, write_models

Tokens = dict[str, list[int]]
RULES = ("speculative_use_rejection_sampling", "speculative_use_block_verification")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return write_models(tmp_path_factory.mktemp("drafts"))


def requests(drafted: bool = True) -> list[GenerateRequest]:
    """Greedy ones (even), and sampled ones with filters and penalties."""
    out = []
    for i in range(8):
        prompt = [(3 * j * j + i * 5 + j) % VOCAB for j in range(2 + 7 * i)]
        params = SamplingParams(
            temperature=0.9 * (i % 2),
            top_k=9 if i % 4 == 1 else -1,
            frequency_penalty=0.3 if i % 4 == 3 else 0.0,
            logprobs=2,
            seed=i,
            max_new_tokens=20,
            ignore_eos=True,
        )
        made = request(f"r{i}", prompt, params)
        out.append(msgspec.structs.replace(made, speculative=drafted))
    return out


def run(
    models: Models,
    algorithm: DraftAlgorithm | None,
    rule: str | None,
    drafted: bool = True,
    **flags: object,
) -> Tokens:
    if rule is not None:
        flags[rule] = True
    with draft_core(models, algorithm, chunked_prefill_size=16, **flags) as made:
        outputs = drive(made.core, requests(drafted))
        stats = made.core.stats(0)
    if algorithm is not None and drafted:
        assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens
    for some in outputs.values():
        chosen = [entry for output in some for entry in output.logprobs]
        assert sum(len(output.tokens) // 4 for output in some) == 20
        assert chosen
    return {rid: tokens_of(some) for rid, some in outputs.items()}


@pytest.fixture(scope="module")
def plain(models: Models) -> Tokens:
    return run(models, None, None)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_greedy_rows_are_plain_decodings_and_seeds_repeat(
    models: Models, plain: Tokens, algorithm: DraftAlgorithm, rule: str
) -> None:
    first = run(models, algorithm, rule)
    assert {r: first[r] for r in first if int(r[1:]) % 2 == 0} == {
        r: plain[r] for r in plain if int(r[1:]) % 2 == 0
    }
    assert any(first[r] != plain[r] for r in plain)
    assert run(models, algorithm, rule) == first
    assert run(models, algorithm, rule, max_running_requests=2) == first


@pytest.mark.parametrize("rule", RULES)
def test_requests_without_drafts_keep_the_coupled_rules_tokens(
    models: Models, plain: Tokens, rule: str
) -> None:
    assert run(models, "EAGLE", rule, drafted=False) == plain
