"""Two ranks on two GPUs over NCCL: one rank's tokens from graphs, and the end of a killed rank."""

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
import torch

from outrider.engine.worker import GraphWorker, counts_between
from outrider.engine_core.config import EngineConfig
from outrider.engine_core.messages import RequestOutput
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.worker import WorkerFailed

from ..cores import drive, request, running_engine, tiny_config, tokens_of
from ..tiny import write_checkpoint
from .rank_cores import PROMPTS, VOCAB, assert_same, doomed_engine, requests, run, step_for_ever

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", VOCAB)


def two_gpus(folder: Path, algorithm: str | None, **fields: object) -> EngineConfig:
    return tiny_config(folder, algorithm, tp_size=2, device="cuda", dtype="float32", **fields)


def _tokens(outputs: dict[str, list[RequestOutput]]) -> dict[str, list[int]]:
    return {rid: tokens_of(some) for rid, some in outputs.items()}


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "single-launches"])
@pytest.mark.parametrize(
    ("algorithm", "source"), [(None, "cpu"), ("NGRAM", "cpu"), ("NGRAM", "gpu"), ("NGRAM", "both")]
)
def test_two_gpus_give_the_tokens_of_a_cpu(
    folder: Path, algorithm: str | None, source: str, graphs: bool
) -> None:
    with running_engine(tiny_config(folder, device="cpu")) as engine:
        expected = run(engine.core)
        plain = drive(engine.core, requests(logprobs=None))
    fields = {"speculative_ngram_source": source, "disable_cuda_graph": not graphs}
    with running_engine(two_gpus(folder, algorithm, **fields)) as engine:
        assert_same(folder, expected, run(engine.core))
        assert isinstance(engine.worker, GraphWorker)
        # Log-probabilities are not in graphs.
        before = engine.worker.counts
        again = drive(engine.core, requests(logprobs=None))
        assert_same(folder, *(_tokens(outputs) for outputs in (plain, again)))
        # N-grams know the text by now: few steps are left of it.
        since = counts_between(before, engine.worker)
        assert since.decode_steps > 2
        assert since.replays == (since.decode_steps if graphs else 0)


def test_edits_are_captured_together_and_again(folder: Path) -> None:
    """The first penalty moves what the graphs with a bias alone read: all ranks capture anew."""
    biased = SamplingParams(
        temperature=0.0, max_new_tokens=20, ignore_eos=True, logit_bias={3: 0.5}
    )
    penalized = msgspec.structs.replace(biased, frequency_penalty=0.4)
    rounds = [
        [request(f"{name}{n}", prompt, params) for n, prompt in enumerate(PROMPTS)]
        for name, params in (("biased", biased), ("penalized", penalized))
    ]
    found = []
    for config in (tiny_config(folder, device="cpu"), two_gpus(folder, "NGRAM")):
        with running_engine(config) as engine:
            for messages in rounds:
                outputs = drive(engine.core, messages)
                found.append({rid: tokens_of(some) for rid, some in outputs.items()})
            if config.tp_size > 1:
                assert isinstance(engine.worker, GraphWorker)
                assert engine.worker.counts.replays > 10
    assert found[:2] == found[2:]


def test_a_killed_rank_ends_the_steps_with_its_name(folder: Path) -> None:
    with doomed_engine(two_gpus(folder, "NGRAM")) as (core, _, pid):
        for message in requests(400):
            assert core.submit(message) is None
        for _ in range(20):
            core.step()
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(WorkerFailed, match=rf"rank 1 \(process {pid}\).*killed by signal 9"):
            step_for_ever(core)
        assert time.monotonic() - killed < 1.5
