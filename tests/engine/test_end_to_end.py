"""Whole engines on a tiny float32 model: speculation changes nothing but the number of steps."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from outrider.engine_core.assembly import assemble_replay
from outrider.engine_core.ids import i32
from outrider.engine_core.messages import FlushCache, GenerateRequest, RequestOutput
from outrider.engine_core.replay import replay_core, replay_worker
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.trace import TraceReader

from ..reference import sampling_ref as ref
from .cores import drive, random_draft_core, request, running_engine, tiny_config, tokens_of
from .tiny import write_checkpoint

VOCAB = 40
MODES = [
    {},
    {"disable_overlap_schedule": True},
    {"page_size": 1, "chunked_prefill_size": 5},
    {"page_size": 64, "disable_radix_cache": True, "max_running_requests": 3},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", VOCAB)


def params_mix() -> Iterator[SamplingParams]:
    """Every feature alone and together, greedy and seeded."""
    features: list[dict[str, object]] = [
        {},
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"logit_bias": {3: 2.5, 9: -50.0}},
        {"min_new_tokens": 20, "ignore_eos": False},
        {"bad_words_ids": ((5,), (9, 2), (7, 7, 7), (1, 3, 1))},
        {"allowed_token_ids": tuple(range(3, 36))},
        {"logprobs": 2},
    ]
    features.append({key: value for feature in features for key, value in feature.items()})
    for number, feature in enumerate(features):
        greedy = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True, **feature}
        yield SamplingParams(**greedy)  # type: ignore[arg-type]
        seeded = {**greedy, "temperature": 0.8, "top_p": 0.9, "top_k": 12, "min_p": 0.01}
        yield SamplingParams(seed=number, **seeded)  # type: ignore[arg-type]


def requests() -> list[GenerateRequest]:
    out = []
    for number, params in enumerate(params_mix()):
        prompt = ([1, 5, 9, 2, 30] * 4)[: 6 + number]
        out.append(request(f"r{number}", prompt, params))
    return out


Results = dict[str, tuple[list[int], object]]


def summarize(outputs: dict[str, list[RequestOutput]]) -> Results:
    return {rid: (tokens_of(some), some[-1].finish) for rid, some in outputs.items()}


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[Results, dict[str, list[RequestOutput]]]:
    """Each request by itself, without speculation."""
    with running_engine(tiny_config(folder)) as engine:
        outputs: dict[str, list[RequestOutput]] = {}
        for message in requests():
            outputs |= drive(engine.core, [message])
    return summarize(outputs), outputs


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: ",".join(mode) or "default")
@pytest.mark.parametrize("algorithm", [None, "NGRAM"])
def test_every_mode_gives_the_tokens_of_a_request_alone(
    folder: Path,
    alone: tuple[Results, dict[str, list[RequestOutput]]],
    algorithm: str | None,
    mode: dict[str, object],
) -> None:
    with running_engine(tiny_config(folder, algorithm, **mode)) as engine:
        before = engine.core.stats(0)
        outputs = drive(engine.core, requests())
        after = engine.core.stats(0)
    assert summarize(outputs) == alone[0]
    assert after.free_pages + after.cached_pages == before.free_pages
    if algorithm is not None:
        assert after.spec_accepted_tokens > 50
    for rid, some in alone[1].items():
        mine = [entry for output in outputs[rid] for entry in output.logprobs]
        theirs = [entry for output in some for entry in output.logprobs]
        assert [entry.token for entry in mine] == [entry.token for entry in theirs]
        values = [entry.value for entry in theirs]
        assert [entry.value for entry in mine] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_random_drafts_change_nothing(
    folder: Path, alone: tuple[Results, dict[str, list[RequestOutput]]], tree: bool
) -> None:
    config = tiny_config(folder, "NGRAM", speculative_num_draft_tokens=16)
    with random_draft_core(config, tree) as core:
        assert summarize(drive(core, requests())) == alone[0]
        assert core.stats(0).spec_accepted_tokens > 10


def test_logprobs_are_those_of_the_raw_model(folder: Path) -> None:
    """The best token's value is the greedy one's; all of them sum to one."""
    params = SamplingParams(temperature=0.0, max_new_tokens=12, logprobs=VOCAB, ignore_eos=True)
    with running_engine(tiny_config(folder, "NGRAM")) as engine:
        (outputs,) = drive(engine.core, [request("a", [1, 5] * 8, params)]).values()
    entries = [entry for output in outputs for entry in output.logprobs]
    assert [entry.token for entry in entries] == tokens_of(outputs)
    assert len(entries) == 12
    for entry in entries:
        ids = i32(entry.top_ids).tolist()
        assert ids[0] == entry.token
        assert sorted(ids) == list(range(VOCAB))
        assert entry.value < 0.0


def test_a_trace_replays_in_the_core_and_on_a_worker(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace"
    monkeypatch.setenv("OUTRIDER_TRACE", str(path))
    config = tiny_config(folder, "NGRAM", speculative_length_policy="auto")
    with running_engine(config) as engine:
        drive(engine.core, requests()[:8])
        assert engine.assembly.control(FlushCache(call=0)) is None
        drive(engine.core, requests()[8:])
    monkeypatch.delenv("OUTRIDER_TRACE")
    report = replay_core(TraceReader(path), assemble_replay)
    assert report.differences == ()
    assert report.steps > 50
    with running_engine(config) as engine:
        report = replay_worker(TraceReader(path), engine.worker)
    assert report.differences == ()


def test_the_reference_scores_what_the_engine_emits(folder: Path) -> None:
    """The engine's seeded tokens are the scalar reference's, from the engine's own logprobs."""
    params = SamplingParams(temperature=0.8, top_k=9, max_new_tokens=30, logprobs=VOCAB, seed=-5,
                            ignore_eos=True)  # fmt: skip
    prompt = [4, 4, 2]
    with running_engine(tiny_config(folder, "NGRAM")) as engine:
        (outputs,) = drive(engine.core, [request("a", prompt, params)]).values()
    tokens = tokens_of(outputs)
    entries = [entry for output in outputs for entry in output.logprobs]
    scalar = ref.Params(temperature=0.8, top_k=9)
    for place, entry in enumerate(entries):
        row = np.zeros(VOCAB)
        row[i32(entry.top_ids)] = np.frombuffer(entry.top_values, np.float32)
        assert ref.choose(row.tolist(), scalar, prompt, tokens[:place], -5) == tokens[place]
