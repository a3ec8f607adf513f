"""Grammars on the GPU's steps: masks come between segments F and A, once results are in."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from outrider.engine.gpu import worker as gpu_worker
from outrider.engine.gpu.worker import GpuWorker
from outrider.engine_core import admission
from outrider.engine_core.assembly import Assembly
from outrider.engine_core.grammar_spec import GrammarSpec
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.model_path import resolve_model
from outrider.engine_core.sampling_params import SamplingParams

from ..cores import drive, request, running_engine, tiny_config, tokens_of
from ..tiny import bigram_config
from .device_cores import KvModel, device_core
from .eager_graphs import EagerGraphs

FOLDER = resolve_model("pycoder")
VOCAB, EOS = 8192, 0
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
SPECS = (
    GrammarSpec("regex", r"[a-f]{2}-[0-9]{1,2}"),
    GrammarSpec("choice", '["yes", "no", "it depends"]'),
    GrammarSpec("json_schema", json.dumps({"enum": [{"name": "a", "age": 3}, {"name": "b"}]})),
)
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 5}
Tokens = dict[str, list[int]]


def requests() -> list[GenerateRequest]:
    """Grammars, one with penalties and one with logprobs; sampled and greedy; one with none."""
    made = []
    for i in range(6):
        prompt = [(3 * j + i) % VOCAB for j in range(3 + 3 * i)]
        params = SamplingParams(
            temperature=(0.0, 0.9)[i % 2],
            seed=i,
            max_new_tokens=14 if i % 4 < 3 else 4,
            grammar=SPECS[i % 4] if i % 4 < 3 else None,
            repetition_penalty=1.2 if i == 4 else 1.0,
            logprobs=2 if i == 5 else None,
        )
        made.append(request(f"r{i}", prompt, params))
    return made


@contextmanager
def core(**flags: Any) -> Iterator[tuple[Assembly, GpuWorker]]:
    flags = {"tokenizer_path": str(FOLDER), "disable_cuda_graph": True, **flags}
    with device_core(KvModel(VOCAB), bigram_config(VOCAB), **flags) as made:
        yield made


def check_texts(tokens: Tokens) -> None:
    for i, message in enumerate(requests()):
        if message.params.grammar is None or message.rid not in tokens:
            continue
        *ids, last = tokens[message.rid]
        assert last == EOS
        text = TOKENIZER.decode(ids)
        match i % 4:
            case 0:
                assert re.fullmatch(SPECS[0].text, text)
            case 1:
                assert text in json.loads(SPECS[1].text)
            case _:
                assert json.loads(text) in json.loads(SPECS[2].text)["enum"]


def run(**flags: Any) -> Tokens:
    with core(**flags) as (assembly, _):
        outputs = drive(assembly.core, requests())
        stats = assembly.core.stats(0)
        if "speculative_algorithm" in flags:
            assert stats.forced_drafts > 0
            assert stats.spec_accepted_tokens > 0
    tokens = {rid: tokens_of(some) for rid, some in outputs.items()}
    check_texts(tokens)
    return tokens


@pytest.fixture(scope="module")
def plain() -> Tokens:
    """Without overlap, one request at a time."""
    return run(max_running_requests=1, disable_overlap_schedule=True)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"disable_overlap_schedule": True, "page_size": 1},
        {**NGRAM},
        {**NGRAM, "disable_overlap_schedule": True, "chunked_prefill_size": 9},
        {**NGRAM, "speculative_ngram_source": "both"},
    ],
    ids=lambda flags: ",".join(flags) or "default",
)
def test_every_mode_gives_the_same_tokens(plain: Tokens, flags: dict[str, Any]) -> None:
    assert run(**flags) == plain


def test_steps_in_graphs_do_too(plain: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments D, F and A as graphs of their own, eager ones for a model that reads its batch."""
    monkeypatch.setattr(gpu_worker, "StepGraphs", EagerGraphs)
    with core(disable_cuda_graph=False, chunked_prefill_size=16, **NGRAM) as (assembly, worker):
        outputs = drive(assembly.core, requests()[:3])
        counts, stats = worker.counts, assembly.core.stats(0)
    assert {rid: tokens_of(some) for rid, some in outputs.items()} == {
        rid: plain[rid] for rid in outputs
    }
    assert counts.replays > 3
    assert counts.prefill_replays > 0
    assert counts.mask_nodes >= sum(map(len, outputs.values()))
    assert counts.mask_ns > 0
    # What the device waited within steps is no work of its.
    assert stats.wait_for_masks == pytest.approx(counts.mask_wait_ns * 1e-9)
    assert stats.wait_for_masks >= counts.mask_ns * 1e-9
    assert stats.worker_busy > 0


def test_retracted_requests_go_on_in_their_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 1)
    params = SamplingParams(
        temperature=0.0, max_new_tokens=14, grammar=GrammarSpec("regex", "[a-f]{40}")
    )
    messages = [request(f"r{i}", [i, 7, 9], params) for i in range(4)]
    found: list[Tokens] = []
    for pool in (640, 30):
        with core(page_size=1, pool_tokens=pool) as (assembly, _):
            outputs = drive(assembly.core, messages)
            assert (assembly.core.scheduler.counters.retractions > 0) == (pool == 30)
        found.append({rid: tokens_of(some) for rid, some in outputs.items()})
    assert found[0] == found[1]
    for ids in found[0].values():
        assert re.match(r"[a-f]+$", TOKENIZER.decode([token for token in ids if token != EOS]))


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", [None, "NGRAM", "EAGLE3", "DSPARK"])
def test_the_embedded_model_in_graphs(algorithm: str | None) -> None:
    def tokens(device: str, algorithm: str | None) -> Tokens:
        config = tiny_config(Path("pycoder"), algorithm, device=device, dtype="float32")
        with running_engine(config) as engine:
            return {r: tokens_of(some) for r, some in drive(engine.core, requests()).items()}

    assert tokens("cuda", algorithm) == tokens("cpu", None)
