"""Log-probabilities of prompts on the device: their steps replay no graph, all others do."""

import pytest
import torch

from outrider.engine.gpu import worker as gpu_worker
from outrider.engine_core.sampling_params import SamplingParams

from ..cores import drive, request
from .device_cores import KvModel
from .eager_graphs import EagerGraphs
from .test_mixed_cores import VOCAB, ngram_core


def expected(prompt: list[int]) -> torch.Tensor:
    """float32[n, V]: the model's log-probabilities after each token."""
    before = [0, 0, *prompt]
    rows = [
        (before[i] * 31 + before[i + 1] * 7 + before[i + 2] * 3) % 97 for i in range(len(prompt))
    ]
    return torch.log_softmax(KvModel(VOCAB).table[rows], dim=1)


@pytest.mark.parametrize("source", [None, "cpu"])
def test_chunks_are_scored_beside_rows_that_verify(
    monkeypatch: pytest.MonkeyPatch, source: str | None
) -> None:
    monkeypatch.setattr(gpu_worker, "StepGraphs", EagerGraphs)
    prompts = [[(3 * j + 5 * i) % VOCAB for j in range(1 + 8 * i)] for i in range(4)]
    starts = (0, 4, 0, 20)
    with ngram_core(source, True, 1) as (made, worker):
        messages = []
        for i, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
            asked = SamplingParams(
                temperature=0.0,
                max_new_tokens=4 * (i > 0),
                ignore_eos=True,
                prompt_logprobs=2,
                logprob_start_len=min(start, len(prompt)),
            )
            messages.append(request(f"r{i}", prompt, asked))
        plain = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
        messages.insert(0, request("plain", [1, 2, 3], plain))
        outputs = drive(made.core, messages)
        counts = worker.counts
    assert 0 < counts.prefill_replays < counts.prefill_steps
    assert counts.replays == counts.decode_steps
    for i, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        first, values = max(1, start), expected(prompt)
        entries = [entry for output in outputs[f"r{i}"] for entry in output.prompt_logprobs]
        assert [entry.token for entry in entries] == prompt[first:]
        given = [float(values[first - 1 + k, entry.token]) for k, entry in enumerate(entries)]
        assert [entry.value for entry in entries] == pytest.approx(given, abs=1e-4)
