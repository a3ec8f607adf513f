"""Whole cores whose steps with prompts replay graphs: the tokens are those without graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from outrider.engine.gpu import worker as gpu_worker
from outrider.engine.gpu.worker import GpuWorker
from outrider.engine_core.assembly import Assembly
from outrider.engine_core.draft_config import DraftAlgorithm, SpecShape
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.sampling_params import SamplingParams

from ..cores import drive, request, tokens_of
from ..draft_cores import CHAIN, TREE, Models
from ..draft_cores import VOCAB as MODEL_VOCAB
from ..tiny import bigram_config
from .device_cores import KvModel, device_core
from .eager_graphs import GRAPHS, EagerGraphs
from .test_gpu_draft_steps import models, started  # noqa: F401

VOCAB = 7
Tokens = dict[str, list[int]]


def requests(vocab: int, count: int, new_tokens: int) -> list[GenerateRequest]:
    """Greedy and seeded ones of several lengths, which enter while others decode."""
    out = []
    for i in range(count):
        prompt = [(3 * j + 5 * i) % vocab for j in range(2 + 9 * (i % 3))]
        params = SamplingParams(
            temperature=0.8 * (i % 2), seed=i, max_new_tokens=new_tokens - i, ignore_eos=True
        )
        out.append(request(f"r{i}", prompt, params))
    return out


@contextmanager
def ngram_core(
    source: str | None, graphs: bool, page_size: int
) -> Iterator[tuple[Assembly, GpuWorker]]:
    fields: dict[str, Any] = {"chunked_prefill_size": 9, "max_running_requests": 3}
    fields |= {"page_size": page_size, "disable_cuda_graph": not graphs}
    if source is not None:
        fields |= {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": 4,
            "speculative_ngram_source": source,
        }
    with device_core(KvModel(VOCAB), bigram_config(VOCAB), **fields) as made:
        yield made


def all_replayed(worker: GpuWorker) -> None:
    counts = worker.counts
    assert counts.prefill_replays == counts.prefill_steps > 0
    assert counts.replays == counts.decode_steps > 0


@pytest.mark.parametrize(
    ("source", "page_size"), [(None, 16), ("cpu", 1), ("gpu", 16), ("both", 1)]
)
def test_a_core_gives_the_tokens_of_single_launches(
    source: str | None, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_worker, "StepGraphs", EagerGraphs)
    found: list[Tokens] = []
    for graphs in (False, True):
        with ngram_core(source, graphs, page_size) as (assembly, worker):
            outputs = drive(assembly.core, requests(VOCAB, 4, 14))
            found.append({rid: tokens_of(some) for rid, some in outputs.items()})
            if graphs:
                all_replayed(worker)
    assert found[0] == found[1]


def on_a_gpu(algorithm: DraftAlgorithm, shape: SpecShape) -> object:
    return pytest.param(algorithm, shape, marks=pytest.mark.gpu)


@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [
        on_a_gpu("STANDALONE", CHAIN),
        on_a_gpu("STANDALONE", TREE),
        on_a_gpu("EAGLE", CHAIN),
        on_a_gpu("EAGLE", TREE),
        ("EAGLE3", CHAIN),
        on_a_gpu("EAGLE3", TREE),
    ],
    ids=lambda value: value if isinstance(value, str) else f"topk{value.topk}",
)
def test_draft_models_draft_beside_prompts(
    models: Models,  # noqa: F811
    algorithm: DraftAlgorithm,
    shape: SpecShape,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_worker, "StepGraphs", GRAPHS)
    found = []
    for graphs in (False, True):
        with started(models, algorithm, shape, disable_cuda_graph=not graphs) as made:
            assembly, worker = made
            outputs = drive(assembly.core, requests(MODEL_VOCAB, 2, 6))
            counters = assembly.core.scheduler.counters
            tokens = {rid: tokens_of(some) for rid, some in outputs.items()}
            found.append((tokens, counters.spec_accepted_tokens, counters.steps))
            assert counters.spec_draft_tokens > 0
            if graphs:
                all_replayed(worker)
    assert found[0] == found[1]
