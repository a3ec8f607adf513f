"""How much a draft model drafts: flags over the draft's own shape over the table, and refusals."""

import random
from typing import Any

import pytest

from outrider.engine_core.config import EngineConfig, refuse_config
from outrider.engine_core.draft_config import SpecShape
from outrider.engine_core.drafter_spec import BUILT_IN, MAX_DRAFT_TOKENS, find_drafter
from outrider.engine_core.refusal import Refused
from outrider.engine_core.spec_shape import (
    corrected,
    draft_reach,
    given_shape,
    refuse_shape,
    resolve_shape,
)

STEPS, TOPK = "speculative_num_steps", "speculative_eagle_topk"
NODES = "speculative_num_draft_tokens"
OWN = SpecShape(6, 2, 20)


def config(algorithm: str | None = "EAGLE3", /, **fields: Any) -> EngineConfig:
    return EngineConfig(model="m", speculative_algorithm=algorithm, **fields)


def resolved(own: SpecShape | None = None, /, **fields: Any) -> SpecShape:
    shape = resolve_shape(config(**fields), "EAGLE3", "qwen3", own)
    assert isinstance(shape, SpecShape), shape
    return shape


@pytest.mark.parametrize(
    ("algorithm", "architecture", "expected"),
    [
        ("EAGLE", "llama", SpecShape(5, 4, 8)),
        ("EAGLE3", "llama", SpecShape(5, 4, 8)),
        ("EAGLE3", "qwen3", SpecShape(3, 1, 4)),
        ("EAGLE", "mistral", SpecShape(3, 1, 4)),
        ("STANDALONE", "llama", SpecShape(3, 1, 4)),
    ],
)
def test_the_table_is_for_who_says_nothing(
    algorithm: str, architecture: str, expected: SpecShape
) -> None:
    assert resolve_shape(config(algorithm), algorithm, architecture, None) == expected
    assert resolve_shape(config(algorithm), algorithm, architecture, OWN) == OWN
    flags = config(algorithm, speculative_num_steps=2)
    assert resolve_shape(flags, algorithm, architecture, OWN) == SpecShape(2, 1, 3)


def test_a_chain_has_a_node_a_step_and_the_bonus_token() -> None:
    for nodes in (None, 3, 6, 64):
        asked = config(speculative_num_steps=5, speculative_num_draft_tokens=nodes)
        assert refuse_config(asked) is None
        shape = resolved(speculative_num_steps=5, speculative_num_draft_tokens=nodes)
        assert shape == SpecShape(5, 1, 6)
        note = corrected(asked, shape)
        assert (note is None) == (nodes in (None, 6))
        if note is not None:
            assert note.startswith(f"speculative_num_draft_tokens: {nodes} becomes 6")
    assert resolved(speculative_num_steps=63) == SpecShape(63, 1, 64)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({TOPK: 4}, TOPK, "needs --speculative-num-steps beside it"),
        ({NODES: 8}, NODES, "needs --speculative-num-steps beside it"),
        ({STEPS: 0}, STEPS, "between 1 and 63, got 0"),
        ({STEPS: 64}, STEPS, "between 1 and 63, got 64"),
        ({STEPS: 3, TOPK: 0}, TOPK, "between 1 and 63, got 0"),
        ({STEPS: 3, TOPK: 64}, TOPK, "between 1 and 63, got 64"),
        ({STEPS: 5, TOPK: 4}, NODES, "verifies 6 to 64 nodes"),
        ({STEPS: 2, TOPK: 3}, NODES, "verifies 3 to 13 nodes"),
        ({STEPS: 5, TOPK: 4, NODES: 5}, NODES, "cannot be 5 steps deep; ask for 6 or more"),
        ({STEPS: 2, TOPK: 3, NODES: 14}, NODES, "exceeds the 13 nodes"),
        ({STEPS: 5, TOPK: 4, NODES: 65}, NODES, "between 2 and 64, got 65"),
        ({STEPS: 9, TOPK: 9, NODES: 20}, TOPK, "feed the draft 72 nodes"),
        ({STEPS: 3, "simulate_accept_length": 4.5}, "simulate_accept_length", "the 4 tokens"),
        (
            {STEPS: 3, TOPK: 4, NODES: 16, "simulate_accept_length": 5.0},
            "simulate_accept_length",
            "the 4 tokens",  # a tree is no deeper than its steps, whatever its nodes
        ),
        ({"simulate_accept_length": 65.0}, "simulate_accept_length", "the 64 tokens"),
        ({"tp_size": 2}, "tp_size", "one rank so far"),
        ({"speculative_draft_model_revision": "main"}, "speculative_draft_model_revision", "needs"),
        ({"speculative_token_map": "x.json"}, "speculative_token_map", "in its checkpoint (d2t)"),
        ({"speculative_ngram_capacity": 99}, "speculative_ngram_capacity", "NGRAM"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], field: str, words: str) -> None:
    refused = refuse_config(config(**fields))
    assert refused is not None
    assert (refused.field, words in refused.reason) == (field, True), refused
    assert "\n" not in refused.reason


def test_several_ranks_are_not_supported_yet() -> None:
    refused = refuse_config(config(tp_size=2))
    assert refused is not None
    assert refused.status == 501


MODEL_FIELDS = {
    "speculative_draft_model_path": "d",
    "speculative_draft_model_revision": "main",
    "speculative_draft_load_format": "dummy",
    "speculative_draft_model_quantization": "int8",
    STEPS: 3,
    TOPK: 1,
    "speculative_token_map": "x.json",
}


@pytest.mark.parametrize("algorithm", [None, "NGRAM"])
@pytest.mark.parametrize("field", MODEL_FIELDS)
def test_a_flag_of_a_draft_model_is_not_ignored_elsewhere(
    algorithm: str | None, field: str
) -> None:
    refused = refuse_config(config(algorithm, **{field: MODEL_FIELDS[field]}))
    assert refused is not None
    assert refused.field == field
    assert ("needs --speculative-algorithm" if algorithm is None else "NGRAM") in refused.reason


def test_a_token_map_is_eagles() -> None:
    for algorithm in ("EAGLE", "EAGLE3", "STANDALONE"):
        refused = refuse_config(config(algorithm, speculative_token_map="x.json"))
        assert (refused is None) == (algorithm == "EAGLE")


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        (SpecShape(0, 1, 1), "steps"),
        (SpecShape(3, 1, 5), "num_draft_tokens"),
        (SpecShape(5, 4, 65), "num_draft_tokens"),
        (SpecShape(2, 2, 8), "num_draft_tokens"),
        (SpecShape(5, 4, 5), "num_draft_tokens"),
        (SpecShape(9, 9, 20), "topk"),
    ],
)
def test_a_shape_that_cannot_be_names_its_field(shape: SpecShape, field: str) -> None:
    refused = refuse_shape(shape)
    assert refused is not None
    assert refused.field == field


def test_what_is_simulated_is_checked_against_the_shape_that_the_draft_has() -> None:
    asked = config(simulate_accept_length=5.0)
    assert refuse_config(asked) is None
    assert resolve_shape(asked, "EAGLE3", "qwen3", OWN) == OWN
    refused = resolve_shape(asked, "EAGLE3", "qwen3", None)
    assert isinstance(refused, Refused)
    assert "the 4 tokens that a step can emit" in refused.reason


def test_flags_and_shapes_agree() -> None:
    """Any flags: refused, or a shape that is allowed by itself and that says the same as flags."""
    rng = random.Random(4)
    chains = trees = refusals = 0
    for _ in range(3000):
        fields: dict[str, Any] = {
            STEPS: rng.choice((None, 1, 2, 3, 5, 16, 63, 64)),
            TOPK: rng.choice((None, 1, 2, 4, 8, 63)),
            NODES: rng.choice((None, 2, 4, 6, 16, 64)),
        }
        asked = config(**fields)
        shape = given_shape(asked)
        assert (refuse_config(asked) is None) == (not isinstance(shape, Refused))
        if isinstance(shape, Refused):
            refusals += 1
            continue
        if shape is None:
            assert set(fields.values()) == {None}
            continue
        assert refuse_shape(shape) is None
        assert shape.steps < shape.num_draft_tokens <= MAX_DRAFT_TOKENS
        assert draft_reach(shape) <= MAX_DRAFT_TOKENS + 1
        again = asked.with_shape(shape)
        assert given_shape(again) == shape
        assert corrected(again, shape) is None
        chains += shape.topk == 1
        trees += shape.topk > 1
    assert min(chains, trees, refusals) > 300


def test_a_tree_reaches_as_far_as_its_levels() -> None:
    assert draft_reach(SpecShape(3, 1, 4)) == 4
    assert draft_reach(SpecShape(5, 4, 8)) == 17
    assert draft_reach(SpecShape(1, 8, 9)) == 9
    assert draft_reach(SpecShape(9, 8, 64)) == 65


def test_a_shape_that_is_not_resolved_is_not_guessed() -> None:
    spec = find_drafter("EAGLE3")
    assert not isinstance(spec, Refused)
    with pytest.raises(ValueError, match="not resolved"):
        config().shape(spec)
    assert config(speculative_num_steps=4).shape(spec) == SpecShape(4, 1, 5)
    assert config("NGRAM").shape(BUILT_IN["NGRAM"]).num_draft_tokens == 12


def test_the_baseline_keeps_nothing_of_a_draft_model() -> None:
    fields = {**MODEL_FIELDS, "simulate_accept_length": 2.0}
    asked = config("EAGLE", **fields)
    assert refuse_config(asked) is None
    assert asked.without_speculation() == EngineConfig(model="m")
