"""Ragged verify on the GPU's kernels, in graphs' sizes and in exact ones: only lengths change."""

import json
from typing import Any, NamedTuple

import pytest

from outrider.engine.gpu import worker as worker_module
from outrider.engine.gpu.graphs import StepGraphs
from outrider.engine_core.counters import Counters
from outrider.engine_core.ids import i32
from outrider.engine_core.messages import GenerateRequest, RequestOutput
from outrider.engine_core.plan import StepPlan, StepResult
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.trace import Frame, TraceWriter

from ...plugins.test_device_plugins import PACKAGE
from ..cores import drive, request, tokens_of
from ..tiny import bigram_config
from .device_cores import KvModel, device_core
from .eager_graphs import EagerGraphs

VOCAB = 7  # the model's texts repeat after about 20 tokens
GRAPHLESS: dict[str, Any] = {"disable_cuda_graph": True}


class Ran(NamedTuple):
    tokens: dict[str, list[int]]
    last: dict[str, RequestOutput]
    logprobs: dict[str, int]
    counters: Counters
    steps: list[tuple[StepPlan, StepResult]]
    replays: int


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU too no graph is captured: ``KvModel`` looks at its batch on the host."""
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.setattr(worker_module, "StepGraphs", EagerGraphs)


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> str:
    table = {
        "bias_seconds": 1e-3, "bs_probes": [1], "alpha_seconds": [0.0],
        "m_probes": [1, 101], "theta_seconds": [0.0, 20e-3],
    }  # fmt: skip
    path = tmp_path_factory.mktemp("sps") / "sps.json"
    path.write_text(json.dumps(table))
    return str(path)


def requests() -> list[GenerateRequest]:
    """Greedy and sampled ones; one with logprobs, whose steps no graph takes, one with edits."""
    out = []
    for i in range(4):
        params = SamplingParams(
            temperature=0.6 if i == 3 else 0.0,
            seed=i,
            max_new_tokens=4 if i == 1 else 11 + i,
            ignore_eos=True,
            logprobs=1 if i == 1 else None,
            repetition_penalty=1.1 if i == 2 else 1.0,
        )
        out.append(request(f"r{i}", [(3 * j + i) % VOCAB for j in range(3 + 5 * i)], params))
    return out


def run(algorithm: str | None, mode: str | None = None, **flags: object) -> Ran:
    fields: dict[str, Any] = dict(flags)
    if algorithm is not None:
        fields |= {"speculative_algorithm": algorithm, "speculative_ragged_verify_mode": mode}
    frames: list[Frame] = []
    made = device_core(
        KvModel(VOCAB), bigram_config(VOCAB), trace=TraceWriter(frames.append), **fields
    )
    with made as (assembly, worker):
        outputs = drive(assembly.core, requests())
        counters, replays = assembly.core.scheduler.counters, worker.counts.replays
        cache = assembly.core.scheduler.cache
        assert cache.available == cache.total
    plans = [frame for frame in frames if isinstance(frame, StepPlan)]
    results = [frame for frame in frames if isinstance(frame, StepResult)]
    return Ran(
        {rid: tokens_of(some) for rid, some in outputs.items()},
        {rid: some[-1] for rid, some in outputs.items()},
        {rid: sum(len(part.logprobs) for part in some) for rid, some in outputs.items()},
        counters,
        list(zip(plans, results, strict=True)),
        replays,
    )


@pytest.fixture(scope="module")
def plain() -> Ran:
    return run(None, **GRAPHLESS)


def check_sizes(ran: Ran) -> int:
    """No step verifies more than its budget; steps that are cut."""
    cut = 0
    for plan, result in ran.steps:
        if plan.budget < 0:
            continue
        proposed, caps = i32(result.proposed), i32(plan.q_caps) - 1
        verifies = len(result.confidence) // 16  # of 4 drafts each
        assert verifies == int((caps[[kind == 2 for kind in plan.kinds]] > 0).sum())
        assert int(proposed.sum()) <= plan.budget
        cut += plan.budget < int(caps[[kind == 2 for kind in plan.kinds]].sum())
    return cut


@pytest.mark.parametrize("graphs", [False, True], ids=["exact", "tiers"])
@pytest.mark.parametrize("mode", ["compact", "cap-accept"])
def test_the_output_is_that_of_plain_decoding(
    plain: Ran, costs: str, mode: str, graphs: bool
) -> None:
    ran = run("GUESS", mode, speculative_dspark_sps_table_path=costs, disable_cuda_graph=not graphs)
    assert ran.tokens == plain.tokens
    assert ran.logprobs == plain.logprobs
    assert (ran.replays > 3) == graphs
    assert check_sizes(ran) > 3
    assert mode == "cap-accept" or ran.counters.trimmed_drafts == 0


@pytest.mark.parametrize(
    "others",
    [{"disable_overlap_schedule": True, "max_running_requests": 1},
     {"page_size": 1, "chunked_prefill_size": 7}],
    ids=lambda fields: ",".join(fields),
)  # fmt: skip
def test_other_schedules(plain: Ran, costs: str, others: dict[str, object]) -> None:
    ran = run("GUESS", "compact", speculative_dspark_sps_table_path=costs, **others)
    assert ran.tokens == plain.tokens


def test_both_modes_verify_and_accept_the_same(costs: str) -> None:
    """A cap trims what compact never verified, in steps of exact size, which leave no padding."""
    flags: dict[str, Any] = {"speculative_dspark_sps_table_path": costs, **GRAPHLESS}
    compact, capped = (run("GUESS", mode, **flags) for mode in ("compact", "cap-accept"))
    assert [out.stats for out in compact.last.values()] == [
        out.stats for out in capped.last.values()
    ]
    sizes = [sum(result.batch_tokens for _, result in ran.steps) for ran in (compact, capped)]
    assert sizes[0] < sizes[1]
    assert capped.counters.trimmed_drafts > 0


def test_spare_tokens_of_a_graph_verify_drafts(plain: Ran, costs: str) -> None:
    flags: dict[str, Any] = {"speculative_dspark_sps_table_path": costs}
    ran = run(
        "GUESS", "compact", speculative_dspark_align_verify_tokens_to_graph_tier=True, **flags
    )
    assert ran.tokens == plain.tokens
    over = sum(int(i32(r.proposed).sum()) > p.budget >= 0 for p, r in ran.steps)
    assert over > 1


def test_without_confidence_the_length_policy_caps(plain: Ran) -> None:
    ran = run("FOLLOW", "cap-accept", speculative_length_policy="auto")
    assert ran.tokens == plain.tokens
    assert ran.counters.budget_steps == 0


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["compact", "cap-accept"])
def test_the_embedded_model_in_graphs(
    costs: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every decode step with drafts replays a captured graph, whatever its budget."""
    from outrider.engine.build import build_engine
    from outrider.engine_core.config import EngineConfig

    from .gpu_driver import DEVICE

    assert DEVICE.type == "cuda"
    monkeypatch.setattr(worker_module, "StepGraphs", StepGraphs)
    texts = []
    for name in (None, "GUESS"):
        fields: dict[str, Any] = {}
        if name is not None:
            fields = {
                "speculative_ragged_verify_mode": mode,
                "speculative_dspark_sps_table_path": costs,
                "speculative_length_policy": "fixed",
            }
        config = EngineConfig(
            model="pycoder", device="cuda", dtype="float32", max_running_requests=4,
            max_total_tokens=4096, speculative_algorithm=name, **fields,
        )  # fmt: skip
        engine = build_engine(config)
        try:
            params = SamplingParams(temperature=0.0, max_new_tokens=60)
            messages = [request(f"r{i}", range(50 + i, 80), params) for i in range(4)]
            outputs = drive(engine.core, messages)
            texts.append([tokens_of(outputs[message.rid]) for message in messages])
            if name is not None:
                counts = engine.worker.counts  # type: ignore[attr-defined]
                assert counts.replays == counts.decode_steps > 0
                assert engine.core.scheduler.counters.budget_steps > 5
        finally:
            engine.shutdown()
    assert texts[0] == texts[1]
