"""Rules of acceptance: what each flag goes with, and what is refused by name."""

import math
from typing import Any

import pytest

from outrider.engine_core.accept_rules import rule_notes
from outrider.engine_core.config import EngineConfig, refuse_config
from outrider.engine_core.device_config import Device, refuse_on
from outrider.engine_core.draft_config import SpecShape
from outrider.engine_core.ragged_verify import VARIABLE, with_environment
from outrider.engine_core.refusal import Refused
from outrider.engine_core.spec_shape import resolve_shape

REJECTION = "speculative_use_rejection_sampling"
BLOCK = "speculative_use_block_verification"
TREE = {
    "speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 5,
}  # fmt: skip
THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
MODELS = ("EAGLE", "EAGLE3", "STANDALONE")


def config(algorithm: str | None, /, **fields: Any) -> EngineConfig:
    return EngineConfig(model="m", speculative_algorithm=algorithm, **fields)


@pytest.mark.parametrize("field", [REJECTION, BLOCK])
@pytest.mark.parametrize(
    ("algorithm", "fields", "reason"),
    [
        (None, {}, "needs --speculative-algorithm"),
        ("NGRAM", {}, "known probability; NGRAM has none"),
        ("NGRAM", {"speculative_ngram_source": "gpu"}, "NGRAM has none"),
        ("EAGLE", TREE, "topk is 2"),
    ],
)
def test_rejection_sampling_needs_drawn_chains(
    field: str, algorithm: str | None, fields: dict[str, object], reason: str
) -> None:
    refused = refuse_config(config(algorithm, **{field: True}, **fields))
    assert refused is not None
    assert refused.field == field
    assert reason in refused.reason


@pytest.mark.parametrize("field", [REJECTION, BLOCK])
def test_rejection_sampling_takes_chains_of_every_draft_model(field: str) -> None:
    for algorithm in MODELS:
        wanted = config(algorithm, **{field: True})
        assert refuse_config(wanted) is None
        chain, tree = SpecShape(2, 1, 3), SpecShape(3, 4, 8)
        assert resolve_shape(wanted, algorithm, "llama", chain) == chain
        refused = resolve_shape(wanted, algorithm, "llama", tree)
        assert isinstance(refused, Refused)
        assert refused.field == field


def test_the_rule_of_the_flags() -> None:
    assert config("EAGLE").accept_rule == "coupled"
    assert config("EAGLE", **{REJECTION: True}).accept_rule == "rejection"
    for fields in ({BLOCK: True}, {BLOCK: True, REJECTION: True}):
        assert config("EAGLE", **fields).accept_rule == "block"
        assert config("EAGLE", **fields).draws_drafts
        assert config("EAGLE", **fields).without_speculation().accept_rule == "coupled"


@pytest.mark.parametrize("algorithm", ["EAGLE", "DFLASH", "DSPARK"])
@pytest.mark.parametrize("mode", ["cap-accept", "compact"])
def test_block_verification_takes_no_caps(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, mode: str
) -> None:
    field = "speculative_ragged_verify_mode"
    assert refuse_config(config(algorithm, **{BLOCK: True, field: "static"})) is None
    assert refuse_config(config(algorithm, **{REJECTION: True, field: mode})) is None
    monkeypatch.setenv(VARIABLE, mode)
    for capped in (
        config(algorithm, **{BLOCK: True, field: mode}),
        with_environment(config(algorithm, **{BLOCK: True})),
    ):
        refused = refuse_config(capped)
        assert refused is not None
        assert refused.field == BLOCK
        assert f"mode {mode}" in refused.reason


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_rule_runs_on_every_device(device: Device) -> None:
    for fields in ({BLOCK: True}, {REJECTION: True}, dict.fromkeys(THRESHOLDS, 0.5)):
        assert refuse_on(config("EAGLE", **fields), device) is None


@pytest.mark.parametrize("field", THRESHOLDS)
def test_thresholds_are_probabilities_of_drafters(field: str) -> None:
    for algorithm in (*MODELS, "NGRAM", "DFLASH", "DSPARK"):
        for value in (0.0, 0.5, 1.0):
            wanted = config(algorithm, **{field: value})
            assert refuse_config(wanted) is None
            assert wanted.lossy == (value < 1)
            assert wanted.accept_rule == ("threshold" if value < 1 else "coupled")
    cases: list[tuple[str | None, dict[str, object], str]] = [
        ("EAGLE", {field: 1.1}, "between 0 and 1"),
        ("EAGLE", {field: -0.1}, "between 0 and 1"),
        ("EAGLE", {field: math.nan}, "between 0 and 1"),
        ("EAGLE", {field: 0.5, REJECTION: True}, "or --speculative-use-rejection-sampling"),
        ("EAGLE", {field: 0.5, BLOCK: True}, "or --speculative-use-block-verification"),
        (None, {field: 0.5}, "needs --speculative-algorithm"),
    ]
    for name, fields, reason in cases:
        refused = refuse_config(config(name, **fields))
        assert refused is not None
        assert refused.field == field
        assert reason in refused.reason


def test_lossy_rules_say_so() -> None:
    assert rule_notes(config("EAGLE")) == []
    notes = rule_notes(config("EAGLE", **dict.fromkeys(THRESHOLDS, 0.25)))
    assert len(notes) == 2
    for field, note in zip(THRESHOLDS, notes, strict=True):
        assert note.startswith(f"{field}: 0.25 is lossy")
