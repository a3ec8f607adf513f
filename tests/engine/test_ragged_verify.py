"""Ragged verify through whole engines on a CPU: lengths change, tokens do not."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from outrider.engine.build import build_engine, build_worker
from outrider.engine_core.assembly import assemble, assemble_replay
from outrider.engine_core.config import EngineConfig, resolve_config
from outrider.engine_core.counters import Counters
from outrider.engine_core.messages import GenerateRequest, RequestOutput
from outrider.engine_core.ragged_verify import VARIABLE
from outrider.engine_core.refusal import Refused, RefusedError
from outrider.engine_core.replay import replay_core
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.step_times import StepTimes
from outrider.engine_core.trace import TraceReader

from ..plugins.test_device_plugins import PACKAGE
from .cores import drive, request, running_engine, tokens_of
from .tiny import write_checkpoint

MODES = ("static", "compact", "cap-accept")
RAGGED = MODES[1:]
VOCAB = 19  # the model's texts repeat


class Ran(NamedTuple):
    tokens: dict[str, list[int]]
    last: list[RequestOutput]
    counters: Counters


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), VOCAB)


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Each further token of a step costs a fifth of what its first does."""
    table = {
        "bias_seconds": 1e-3, "bs_probes": [1], "alpha_seconds": [0.0],
        "m_probes": [1, 101], "theta_seconds": [0.0, 20e-3],
    }  # fmt: skip
    path = tmp_path_factory.mktemp("sps") / "sps.json"
    path.write_text(json.dumps(table))
    return str(path)


def config_of(model: Path, algorithm: str | None, **fields: object) -> EngineConfig:
    values: dict[str, object] = {
        "model": str(model),
        "device": "cpu",
        "num_threads": 1,
        "max_total_tokens": 2048,
        "max_running_requests": 4,
        "skip_tokenizer_init": True,
        "speculative_algorithm": algorithm,
        "speculative_length_policy": "auto" if algorithm is None else "fixed",
        **fields,
    }
    return EngineConfig(**values)  # type: ignore[arg-type]


def requests(sampled: bool = True) -> list[GenerateRequest]:
    """Of several lengths; every third one samples."""
    out = []
    for i in range(8):
        params = SamplingParams(
            temperature=0.7 if sampled and i % 3 == 2 else 0.0,
            seed=i,
            max_new_tokens=20 + i,
            ignore_eos=i % 2 == 0,
            logprobs=1 if i == 4 else None,
        )
        out.append(request(f"r{i}", [(7 * i + j * j) % VOCAB for j in range(3 + 4 * i)], params))
    return out


def run(
    config: EngineConfig,
    messages: Sequence[GenerateRequest],
    force: float | None = None,
    aborted: str | None = None,
) -> Ran:
    with running_engine(config) as engine:
        core = engine.core
        if force is not None:
            assert core.scheduler.verify is not None
            core.scheduler.verify.planner.force(force)
        if aborted is None:
            outputs = drive(core, messages)
        else:
            outputs = drive_with_abort(engine.core, messages, aborted)
        cache = core.scheduler.cache
        assert cache.tree.locked_pages == 0
        assert cache.available == cache.total
        counters = core.scheduler.counters
    tokens = {rid: tokens_of(some) for rid, some in outputs.items()}
    return Ran(tokens, [some[-1] for some in outputs.values()], counters)


def drive_with_abort(
    core: object, messages: Sequence[GenerateRequest], aborted: str
) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {message.rid: [] for message in messages}
    for message in messages:
        assert core.submit(message) is None  # type: ignore[attr-defined]
    step = 0
    while core.has_work:  # type: ignore[attr-defined]
        step += 1
        if step == 6:
            assert core.abort(aborted)  # type: ignore[attr-defined]
        for output in core.step():  # type: ignore[attr-defined]
            outputs[output.rid].append(output)
    return outputs


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, list[int]]:
    return run(config_of(model, None), requests()).tokens


OTHER = [
    {},
    {"disable_overlap_schedule": True},
    {"max_running_requests": 1},
    {"max_running_requests": 8, "page_size": 1, "chunked_prefill_size": 7},
    {"max_running_requests": 8, "max_total_tokens": 192},
    {"speculative_length_policy": "auto"},
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("others", OTHER, ids=lambda fields: ",".join(fields) or "default")
def test_the_output_is_that_of_plain_decoding(
    model: Path, costs: str, plain: dict[str, list[int]], mode: str, others: dict[str, object]
) -> None:
    config = config_of(
        model, "GUESS", speculative_ragged_verify_mode=mode,
        speculative_dspark_sps_table_path=costs, **others,
    )  # fmt: skip
    ran = run(config, requests())
    assert ran.tokens == plain
    counters = ran.counters
    assert counters.spec_accepted_tokens > 0
    if mode == "static":
        assert counters.budget_steps == 0
    elif "speculative_length_policy" not in others:
        assert counters.budget_steps > 5
    if "max_total_tokens" in others:
        assert counters.retractions > 0
    for output in ran.last:
        assert output.finish is not None


@pytest.mark.parametrize("overlap", [True, False])
def test_both_modes_verify_and_accept_the_same(model: Path, costs: str, overlap: bool) -> None:
    """A cap trims what compact never verified; the lag is the same with and without overlap."""
    found = []
    for mode in RAGGED:
        config = config_of(
            model, "GUESS", speculative_ragged_verify_mode=mode,
            speculative_dspark_sps_table_path=costs, disable_overlap_schedule=not overlap,
        )  # fmt: skip
        found.append(run(config, requests()))
    compact, capped = found
    assert [output.stats for output in compact.last] == [output.stats for output in capped.last]
    static = run(config_of(model, "GUESS"), requests()).counters
    assert compact.counters.spec_draft_tokens < static.spec_draft_tokens
    assert compact.counters.trimmed_drafts == 0
    assert capped.counters.trimmed_drafts > 5
    assert any(out.stats is not None and out.stats.plain_ct > 1 for out in compact.last)


@pytest.mark.parametrize("mode", RAGGED)
@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_a_forced_budget_bites_and_changes_no_token(
    model: Path, plain: dict[str, list[int]], mode: str, fraction: float
) -> None:
    config = config_of(model, "GUESS", speculative_ragged_verify_mode=mode)
    ran = run(config, requests(), force=fraction)
    assert ran.tokens == plain
    assert ran.counters.budget_steps > 5
    if fraction == 0.0:
        assert ran.counters.budget_drafts == 0
        # The first two steps and those of new requests alone know no confidence.
        assert ran.counters.plain_rows > ran.counters.spec_drafts
    reasons = {out.stats.spec_off_reason for out in ran.last if out.stats is not None}
    assert ("no draft was worth its verification" in reasons) == (fraction < 1.0)


@pytest.mark.parametrize("mode", RAGGED)
def test_without_a_table_everything_is_verified(
    model: Path, plain: dict[str, list[int]], mode: str
) -> None:
    static = run(config_of(model, "GUESS"), requests())
    ran = run(config_of(model, "GUESS", speculative_ragged_verify_mode=mode), requests())
    assert ran.tokens == plain
    assert ran.counters.budget_steps == 0
    assert [out.stats for out in ran.last] == [out.stats for out in static.last]


@pytest.mark.parametrize("mode", RAGGED)
def test_an_abort_in_the_middle(
    model: Path, costs: str, plain: dict[str, list[int]], mode: str
) -> None:
    config = config_of(
        model, "GUESS", speculative_ragged_verify_mode=mode,
        speculative_dspark_sps_table_path=costs,
    )  # fmt: skip
    ran = run(config, requests(), aborted="r1")
    for rid, tokens in ran.tokens.items():
        assert tokens == (plain[rid][: len(tokens)] if rid == "r1" else plain[rid])
    assert ran.counters.aborts == 1


@pytest.mark.parametrize("policy", ["fixed", "auto"])
def test_without_confidence_the_length_policy_caps(
    model: Path, plain: dict[str, list[int]], policy: str
) -> None:
    """compact: its rows as they are; cap-accept: full rows, of which no more is accepted."""
    found = {
        mode: run(
            config_of(
                model, "FOLLOW", speculative_ragged_verify_mode=mode,
                speculative_length_policy=policy, disable_overlap_schedule=True,
            ),
            requests(),
        )
        for mode in MODES
    }  # fmt: skip
    assert all(ran.tokens == plain for ran in found.values())
    assert found["compact"].counters.trimmed_drafts == 0
    assert found["cap-accept"].counters.budget_steps == 0
    if policy == "fixed":
        stats = [[out.stats for out in ran.last] for ran in found.values()]
        assert stats[0] == stats[1] == stats[2]


def test_a_trace_replays_with_its_tables(
    model: Path, costs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Budgets follow from recorded confidence and the header's table, whose file is gone."""
    table = tmp_path / "sps.json"
    table.write_text(Path(costs).read_text())
    trace = tmp_path / "trace"
    monkeypatch.setenv("OUTRIDER_TRACE", str(trace))
    config = config_of(
        model, "GUESS", speculative_ragged_verify_mode="compact",
        speculative_dspark_sps_table_path=str(table),
    )  # fmt: skip
    assert run(config, requests()).counters.budget_steps > 5
    table.unlink()
    report = replay_core(TraceReader(trace), assemble_replay)
    assert report.ok, [str(difference) for difference in report.differences]
    assert report.steps > 20


def test_the_length_policys_caps_bite(model: Path, plain: dict[str, list[int]]) -> None:
    """Where tokens are dear, cap-accept verifies full rows and accepts what the policy chose."""
    trimmed = []
    for mode in ("compact", "cap-accept"):
        config = config_of(
            model, "FOLLOW", speculative_ragged_verify_mode=mode, speculative_length_policy="auto"
        )
        worker = build_worker(config)
        try:
            resolved = resolve_config(config, worker.info())
            assert not isinstance(resolved, Refused), str(resolved)
            worker.prepare(resolved)
            dear = StepTimes([1, 64], [1e-3, 30e-3])
            core = assemble(resolved, worker, dear, None, None).core
            outputs = drive(core, requests())
        finally:
            worker.shutdown()
        assert {rid: tokens_of(some) for rid, some in outputs.items()} == plain
        trimmed.append(core.scheduler.counters.trimmed_drafts)
    assert trimmed[0] == 0
    assert trimmed[1] > 3


def test_confidence_has_to_be_there(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import device_drafters  # type: ignore[import-not-found]

    monkeypatch.delattr(device_drafters.GuessDrafter, "confidence")
    with pytest.raises(RefusedError, match="which has no confidence"):
        build_engine(config_of(model, "GUESS", speculative_ragged_verify_mode="compact"))
    build_engine(config_of(model, "GUESS")).shutdown()


def test_the_environment_reaches_the_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "compact")
    with running_engine(config_of(model, "GUESS")) as engine:
        assert engine.core.config.ragged.planned
    assert "speculative_dspark_sps_table_path: is unset" in capfd.readouterr().err
    monkeypatch.setenv(VARIABLE, "Compact")
    with pytest.raises(RefusedError, match="Compact") as caught:
        build_engine(config_of(model, "FOLLOW"))
    assert caught.value.refused.field == "speculative_ragged_verify_mode"
