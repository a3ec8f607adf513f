"""Ragged verify in the core: flags, tables and refusals; budgets among steps that come and go."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from outrider.engine_core.config import CoreConfig, EngineConfig, refuse_config, resolve_config
from outrider.engine_core.drafter_spec import BUILT_IN, DrafterSpec
from outrider.engine_core.plan import StepPlan, StepResult
from outrider.engine_core.ragged_verify import (
    VARIABLE,
    OwnSts,
    RaggedVerify,
    own_sts,
    ragged_notes,
    read_ragged,
    with_environment,
)
from outrider.engine_core.refusal import Refused
from outrider.engine_core.sps_table import StepTable
from outrider.engine_core.sts_table import STS_FILE
from outrider.engine_core.table_files import TableError
from outrider.engine_core.verify_steps import VERIFY_ALL, VerifySteps
from outrider.engine_core.worker import WorkerFailed

from .fake_worker import FakeWorker

MODE = "speculative_ragged_verify_mode"
SPS = "speculative_dspark_sps_table_path"
STS = "speculative_dspark_confidence_sts_path"
ALIGN = "speculative_dspark_align_verify_tokens_to_graph_tier"
SURE = DrafterSpec(name="SURE", implementation="a:b", gives_survival=True)
STEPS = StepTable((1, 4, 6, 8), (100.0, 95.0, 80.0, 60.0), 8)


def config(algorithm: str | None = "NGRAM", **fields: Any) -> EngineConfig:
    return EngineConfig(model="m", speculative_algorithm=algorithm, **fields)


def test_on_a_gpu_the_planner_knows_the_graphs() -> None:
    info = msgspec.structs.replace(FakeWorker().info(), draft_survival=True)
    for device, fields, sizes in (
        ("cuda", {}, (1, 2, 4, 8, 16, 24, 32, 48, 50)),
        ("cuda", {"cuda_graph_max_bs": 3}, (1, 2, 4, 8, 15)),
        ("cuda", {"disable_cuda_graph": True}, ()),
        ("cpu", {}, ()),
    ):
        shape = {"speculative_num_steps": 4, "speculative_eagle_topk": 1}
        asked = config("DSPARK", **{MODE: "compact", "max_running_requests": 10, **shape, **fields})
        found = resolve_config(asked, msgspec.structs.replace(info, device=device))
        assert not isinstance(found, Refused), found
        assert found.ragged.sizes == sizes


def write(path: Path, table: object) -> str:
    path.write_text(json.dumps(table))
    return str(path)


def read(
    mode: str | None, fields: dict[str, Any] | None = None, topk: int = 1
) -> RaggedVerify | Refused:
    return read_ragged(config(**{MODE: mode, **(fields or {})}), SURE, 4, topk)


# Which algorithms take the environment's word, and what they make of it.


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.parametrize("mode", ["static", "cap-accept", "compact"])
def test_the_environment_names_a_mode_and_a_flag_wins(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, mode)
    assert with_environment(config()).speculative_ragged_verify_mode == mode
    flagged = config(**{MODE: "compact"})
    assert with_environment(flagged) is flagged
    plain = config(None)
    assert with_environment(plain) is plain


@pytest.mark.parametrize("algorithm", [*BUILT_IN, "ngram"])
@pytest.mark.parametrize("text", ["", "Compact", "cap_accept", "COMPACT", "none", " static"])
def test_another_text_fails_every_algorithm(
    algorithm: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=f"^{MODE}: {VARIABLE} is '{text}'; must be one of"):
        with_environment(config(algorithm))
    flagged = config(algorithm, **{MODE: "static"})
    assert with_environment(flagged) is flagged


def test_without_an_algorithm_there_is_nothing_to_verify() -> None:
    for field, value in ((MODE, "compact"), (SPS, "x"), (STS, "x"), (ALIGN, True)):
        refused = refuse_config(config(None, **{field: value}))
        assert isinstance(refused, Refused)
        assert refused.field == field


@pytest.mark.parametrize(
    "algorithm", [name for name, spec in BUILT_IN.items() if not spec.gives_survival]
)
@pytest.mark.parametrize(("field", "value"), [(SPS, "x"), (STS, "x"), (ALIGN, True)])
def test_tables_are_of_drafters_that_give_confidence(
    algorithm: str, field: str, value: object
) -> None:
    refused = refuse_config(config(algorithm, **{field: value}))
    assert isinstance(refused, Refused)
    assert refused.field == field
    assert "give confidence" in refused.reason


@pytest.mark.parametrize("algorithm", list(BUILT_IN))
def test_modes_of_drafters_without_confidence(algorithm: str) -> None:
    for mode in ("static", "compact", "cap-accept"):
        refused = refuse_config(config(algorithm, **{MODE: mode}))
        if algorithm == "NGRAM" and mode == "cap-accept":
            assert isinstance(refused, Refused)
            assert (refused.field, refused.status) == (MODE, 501)
        else:
            assert refused is None
    gpu = config(**{MODE: "cap-accept"}, speculative_ngram_source="gpu", device="cuda")
    assert refuse_config(gpu) is None
    resolved = resolve_config(config(**{MODE: "compact"}), FakeWorker().info())
    assert isinstance(resolved, CoreConfig)
    assert resolved.ragged == RaggedVerify(mode="compact")
    assert not resolved.ragged.planned


@pytest.mark.parametrize("mode", ["static", "cap-accept", "compact"])
def test_a_draft_without_a_confidence_head_is_a_drafter_without_confidence(mode: str) -> None:
    shape = {"speculative_num_steps": 4, "speculative_eagle_topk": 1}
    asked = config("DSPARK", **{MODE: mode}, **shape)
    for survival in (True, False):
        info = msgspec.structs.replace(FakeWorker().info(), draft_survival=survival)
        resolved = resolve_config(asked, info)
        assert isinstance(resolved, CoreConfig)
        assert resolved.drafter is not None
        assert resolved.drafter.plans_verify == survival
        assert resolved.ragged.mode == mode
        assert resolved.ragged.planned == (survival and mode != "static")


@pytest.mark.parametrize("mode", [None, "static", "cap-accept", "compact"])
@pytest.mark.parametrize("field", [SPS, STS])
def test_a_table_that_is_not_there_is_refused_in_every_mode(
    tmp_path: Path, mode: str | None, field: str
) -> None:
    path = tmp_path / "table.json"
    asked = config("DSPARK", **{MODE: mode, field: str(path)})
    refused = refuse_config(asked)
    assert isinstance(refused, Refused)
    assert (refused.field, refused.reason) == (
        field,
        f"{path} does not exist; name a table, or leave it out",
    )
    path.write_text("{}")
    assert refuse_config(asked) is None


def test_tables_are_read_and_checked(tmp_path: Path) -> None:
    sts = write(tmp_path / "sts.json", {"temperatures": [1.0, 2.0, 0.5, 1.5]})
    steps = write(tmp_path / "steps.json", msgspec.to_builtins(STEPS))
    parts = {"bias_seconds": 0.01, "bs_probes": [1], "alpha_seconds": [0.0],
             "m_probes": [1, 8], "theta_seconds": [0.0, 0.1]}  # fmt: skip
    additive = write(tmp_path / "additive.json", parts)
    found = read("compact", {SPS: steps, STS: sts, ALIGN: True})
    assert found == RaggedVerify(
        mode="compact", temperatures=(1.0, 2.0, 0.5, 1.5), step_costs=STEPS, align=True
    )
    assert isinstance(found, RaggedVerify)
    assert found.planned
    assert found.rules.gamma == 4
    assert found.costs is found.step_costs
    found = read("cap-accept", {SPS: additive, ALIGN: True})
    assert isinstance(found, RaggedVerify)
    assert (found.temperatures, found.align) == ((1.0,) * 4, False)
    assert found.costs is found.additive_costs is not None
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=RaggedVerify)
    assert copy == found


@pytest.mark.parametrize(
    ("field", "table", "reason"),
    [
        (STS, {"temperatures": [1.0, 1.0]}, "2 of them for 4 draft positions"),
        (STS, {"temperatures": [1.0, 0.0, 1.0, 1.0]}, "not above 0"),
        (STS, None, "cannot be read"),
        (SPS, {"sample_batch_tokens": [4, 1], "sample_steps_per_sec": [1.0, 1.0],
               "max_batch_tokens": 4}, "values must rise"),
        (SPS, {"bias_seconds": 0}, "bs_probes"),
        (SPS, None, "cannot be read"),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_used(tmp_path: Path, field: str, table: object, reason: str) -> None:
    path = str(tmp_path / "none") if table is None else write(tmp_path / "t.json", table)
    found = read("compact", {field: path})
    assert isinstance(found, Refused)
    assert found.field == field
    assert reason in found.reason
    assert read("static", {field: path}) == RaggedVerify()


def test_trees_have_no_planned_lengths() -> None:
    found = read("compact", topk=4)
    assert isinstance(found, Refused)
    assert found.field == MODE
    assert read("static", topk=4) == RaggedVerify()


def test_what_changes_nothing_is_said() -> None:
    def notes(mode: str, fields: dict[str, Any] | None = None, device: str = "cuda") -> list[str]:
        asked = config(**{MODE: mode, **(fields or {})})
        found = read_ragged(asked, SURE, 4, 1)
        assert isinstance(found, RaggedVerify)
        return [note.split(":")[0] for note in ragged_notes(asked, found, device)]

    assert notes("static") == []
    assert notes("static", {SPS: "x", STS: "y", ALIGN: True}) == [SPS, STS, ALIGN]
    assert notes("compact") == [SPS]  # every draft is verified
    assert notes("compact", {ALIGN: True}) == [SPS]
    assert notes("compact", {ALIGN: True}, "cpu") == [ALIGN, SPS]
    assert notes("cap-accept", {ALIGN: True}) == [ALIGN, SPS]


# Budgets among steps.

RAGGED = RaggedVerify(mode="compact", temperatures=(1.0,) * 4, step_costs=STEPS)
# Survivals [.9, .72, .36, .09] and [.5, .1, .02, .002].
CONFIDENCE = np.array([[0.9, 0.8, 0.5, 0.25], [0.5, 0.2, 0.2, 0.1]], dtype=np.float32)


def int32(*values: int) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


SLOTS = int32(2, 0)
FULL = int32(5, 5)


def plan(*q_caps: int, kinds: bytes | None = None, budget: int = -1) -> StepPlan:
    rows = len(q_caps)
    slots = SLOTS[: 4 * rows]
    kinds = bytes([2] * rows) if kinds is None else kinds
    return StepPlan(1, False, slots, kinds, int32(*q_caps), b"", b"", (), b"", b"", b"", budget)


def result(confidence: np.ndarray | None) -> StepResult:
    given = b"" if confidence is None else confidence.tobytes()
    return StepResult(1, b"", b"", b"", b"", confidence=given)


def started() -> VerifySteps:
    steps = VerifySteps(RAGGED, 3)
    steps.start(2)
    steps.start(0)
    return steps


def test_the_third_step_with_drafts_has_the_first_budget() -> None:
    steps = started()
    for _ in range(2):
        assert steps.plan(SLOTS, FULL, 2) == VERIFY_ALL
        # A step without room for drafts is none of the planner's.
        assert steps.plan(SLOTS, int32(1, 1), 2) == VERIFY_ALL
        steps.committed(plan(5, 5), result(CONFIDENCE))
        steps.committed(plan(1, 1), result(None))
    assert steps.plan(SLOTS, FULL, 2) == 3
    steps.committed(plan(5, 5, budget=3), result(CONFIDENCE))
    steps.start(2)  # a new request is verified in full
    assert steps.plan(SLOTS, FULL, 2) == 5
    steps.reset()
    assert steps.plan(SLOTS, FULL, 2) == VERIFY_ALL


def test_a_row_without_room_gives_no_confidence() -> None:
    steps = started()
    for _ in range(2):
        steps.plan(SLOTS, int32(5, 1), 2)
        steps.committed(plan(5, 1), result(CONFIDENCE[:1]))
    assert steps.plan(SLOTS, FULL, 2) == 5  # slot 0 counts as sure


def test_what_is_no_number_promises_nothing() -> None:
    steps = started()
    for _ in range(2):
        steps.plan(SLOTS, FULL, 2)
        steps.committed(plan(5, 5), result(np.full_like(CONFIDENCE, np.nan)))
    assert steps.plan(SLOTS, FULL, 2) == 0


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_confidence_of_other_rows_is_a_fault(rows: int) -> None:
    steps = started()
    steps.plan(SLOTS, FULL, 2)
    with pytest.raises(WorkerFailed, match="bytes of confidence came for 2 rows of 4 drafts"):
        steps.committed(plan(5, 5), result(np.ones((rows, 4), np.float32)))


def test_a_drafts_own_temperatures_are_taken_where_they_fit(tmp_path: Path) -> None:
    asked = config("DSPARK", **{MODE: "compact"})
    assert own_sts(asked, tmp_path, 3) == OwnSts(asked)
    path = tmp_path / STS_FILE
    path.write_text('{"temperatures": [1.0, 2.0, 0.5]}')
    taken = own_sts(asked, tmp_path, 3)
    assert getattr(taken.config, STS) == str(path)
    assert not taken.notes
    other = own_sts(asked, tmp_path, 2)
    assert other.config is asked
    assert "of 3 draft positions, not of 2" in other.notes[0]
    named = config("DSPARK", **{MODE: "compact", STS: "x"})
    assert own_sts(named, tmp_path, 3) == OwnSts(named)
    path.write_text("{")
    with pytest.raises(TableError, match=r"sts\.json: is no JSON"):
        own_sts(asked, tmp_path, 3)
    path.unlink()
    path.mkdir()
    with pytest.raises(TableError, match="cannot be read"):
        own_sts(asked, tmp_path, 3)
