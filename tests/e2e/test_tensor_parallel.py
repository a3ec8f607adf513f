"""The embedded model over two ranks, as a user starts it: one rank's greedy tokens."""

import exactness
import pytest

from outrider import LLM, SamplingParams

pytestmark = pytest.mark.serial


def test_pycoder_on_two_ranks_gives_the_tokens_of_one() -> None:
    prompts = exactness.load_prompts(limit=3, max_tokens=24)
    row = {"batch": 4, "overlap": 1, "page_size": 16, "chunk": 64}
    reference, _ = exactness.run_config(exactness.config_of(row, None), prompts)
    params = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    with LLM(
        model="pycoder", device="cpu", tp_size=2, num_threads=1, max_running_requests=4,
        chunked_prefill_size=64, max_total_tokens=8192, speculative_algorithm="NGRAM",
        speculative_length_policy="fixed",
    ) as llm:  # fmt: skip
        results = llm.generate([prompt.tokens for prompt in prompts], params)
    outputs = {
        prompt.id: list(result.token_ids) for prompt, result in zip(prompts, results, strict=True)
    }
    if outputs != reference:
        found = exactness.divergences(prompts, reference, outputs, exactness.float64_gap())
        assert not [d for d in found if not d.tie], found
        assert len(found) <= 1
    assert sum(int(str(result.meta_info["spec_verify_ct"])) for result in results) > 5
