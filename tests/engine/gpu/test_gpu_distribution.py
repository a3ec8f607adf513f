"""Engines whose logits are bfloat16 keep the target's joint distribution, by every rule with every
kind of drafts; planted faults do not.

On a GPU they compute in bfloat16. A CPU's compute in float32 and have their logits rounded, which
makes ties and leaves few distinct probabilities.
"""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from outrider.engine import gemm_timer
from outrider.engine.gemm_table import CACHE_VARIABLE, Choices, GemmKey
from outrider.engine.gpu import sampled_targets
from outrider.engine.models import gpu_linear, torch_layers
from outrider.engine.sampling import acceptance
from outrider.engine.speculative.draft_law import DraftDraw
from outrider.engine_core.draft_config import DraftAlgorithm, SpecShape
from outrider.kernels.linear_gpu import LinearConfig

from ..batched_attention import batched_attention
from ..draft_cores import CHAIN
from ..drafted_law import shifted
from ..engine_law import MODELS, Drafts, Machine, drawn
from ..joint_law import LEAST_P

GPU, CPU = Machine("cuda", "bfloat16"), Machine("cpu", "float32", rounded=True)
TREE = SpecShape(3, 2, 6)
FLAGS = {
    "coupled": {},
    "rejection": {"speculative_use_rejection_sampling": True},
    "block": {"speculative_use_block_verification": True},
}
KERNELS = {
    "coupled": "coupled_sample",
    "rejection": "rejection_sample",
    "block": "block_verify",
}
Rule = Callable[..., torch.Tensor]
Seen = set[tuple[str, torch.dtype]]


class FirstThatRuns(gemm_timer.GemmTimer):
    """Prefers what is measured first to cuBLAS: tiny matmuls differ by luck alone."""

    def __call__(self, key: GemmKey, config: LinearConfig | None, others: Choices) -> float:
        super().__call__(key, config, others)
        return 1.0 if config is None else 0.5


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("laws")


@pytest.fixture(autouse=True)
def _fast(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of requests, of which other tests check every step; matmuls chosen in no time."""
    monkeypatch.setenv("OUTRIDER_CHECK", "0")
    monkeypatch.setenv(CACHE_VARIABLE, str(place / "cache"))
    monkeypatch.setattr(gpu_linear, "GemmTimer", FirstThatRuns)
    monkeypatch.setattr(gemm_timer, "_GRAPH_BYTES", 0)
    monkeypatch.setattr(torch_layers, "paged_attention", batched_attention)


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """By which kernels a GPU's steps chose sampled tokens, from logits of which type."""
    found: Seen = set()

    def note(name: str, rule: Rule, *columns: torch.Tensor, **how: object) -> torch.Tensor:
        found.add((name, columns[0].dtype))
        if name != "coupled_sample":
            found.add((name, columns[8].dtype))  # the draft's
        return rule(*columns, **how)

    for name in KERNELS.values():
        rule = getattr(sampled_targets, name)
        monkeypatch.setattr(sampled_targets, name, partial(note, name, rule))
    return found


def check_seen(machine: Machine, rule: str, seen: Seen) -> None:
    if machine.device == "cuda":
        assert KERNELS[rule] in {name for name, _ in seen}
        assert {dtype for _, dtype in seen} == {torch.bfloat16}


def on_gpu(*values: object) -> object:
    name = "-".join(map(str, ("gpu", *values)))
    return pytest.param(GPU, *values, marks=pytest.mark.gpu, id=name)


def on_cpu(*values: object) -> object:
    return pytest.param(CPU, *values, id="-".join(map(str, ("cpu", *values))))


@pytest.mark.parametrize(
    ("machine", "vocab", "drafts"),
    [on_gpu(*case) for case in itertools.product((6, 16), ("random-chain", "random-tree", "NGRAM"))]
    + [on_cpu(6, "random-tree"), on_cpu(6, "NGRAM")],
)
def test_drafts_without_a_model_keep_the_law(
    place: Path, seen: Seen, machine: Machine, vocab: int, drafts: Drafts
) -> None:
    source = "both" if machine.device == "cuda" and drafts == "NGRAM" else "cpu"
    assert drawn(machine, place, drafts, vocab, speculative_ngram_source=source).p > LEAST_P
    check_seen(machine, "coupled", seen)


@pytest.mark.parametrize(
    ("machine", "vocab", "algorithm", "rule"),
    [
        *(on_gpu(*case) for case in itertools.product((6, 16), MODELS, FLAGS)),
        *(on_cpu(6, *case) for case in itertools.product(MODELS, FLAGS)),
    ],
)
def test_chains_of_draft_models_keep_the_law(
    place: Path, seen: Seen, machine: Machine, vocab: int, algorithm: DraftAlgorithm, rule: str
) -> None:
    found = drawn(machine, place, algorithm, vocab, **FLAGS[rule])
    assert found.p > LEAST_P
    check_seen(machine, rule, seen)


@pytest.mark.parametrize(
    ("machine", "algorithm"), [on_gpu("STANDALONE"), on_gpu("EAGLE"), on_gpu("EAGLE3")]
)
def test_trees_of_draft_models_keep_the_law(
    place: Path, seen: Seen, machine: Machine, algorithm: DraftAlgorithm
) -> None:
    assert drawn(machine, place, algorithm, 6, TREE).p > LEAST_P
    check_seen(machine, "coupled", seen)


@pytest.mark.parametrize(
    ("machine", "mode", "rule"),
    [
        on_gpu("cap-accept", "rejection"),
        on_gpu("compact", "rejection"),
        on_gpu("compact", "coupled"),
    ],
)
def test_caps_by_confidence_keep_the_law(
    place: Path, seen: Seen, machine: Machine, mode: str, rule: str
) -> None:
    """DSPARK's drafts, of which two of five are verified."""
    flags = {"speculative_ragged_verify_mode": mode, **FLAGS[rule]}
    found = drawn(machine, place, "DSPARK", 6, CHAIN, 0.4, **flags)
    assert found.p > LEAST_P
    assert found.counters.spec_draft_tokens < 2.5 * found.counters.spec_drafts
    assert (found.counters.trimmed_drafts > 300) == (mode == "cap-accept")
    check_seen(machine, rule, seen)


def rules_of(machine: Machine) -> ModuleType:
    """The module whose steps look the rules up."""
    return sampled_targets if machine.device == "cuda" else acceptance


def unreduced(rule: Rule, *given: torch.Tensor, **how: object) -> torch.Tensor:
    """A fault: a rejected draft's place is filled from p as it is, as where nothing was drafted."""
    drafts = given[7]
    tokens = rule(*given, **how)
    whole = rule(*given[:7], torch.full_like(drafts, -1), *given[8:], **how)
    return torch.where((drafts >= 0) & (tokens != drafts), whole, tokens)


@pytest.mark.parametrize(("machine", "rule"), [on_gpu("rejection"), on_gpu("block")])
def test_q_of_the_next_token_is_caught(
    place: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine, rule: str
) -> None:
    monkeypatch.setattr(DraftDraw, "law", shifted)
    assert drawn(machine, place, "EAGLE3", 6, **FLAGS[rule]).p < 1e-8


@pytest.mark.parametrize(
    ("machine", "rule"), [on_gpu("rejection"), on_gpu("block"), on_cpu("block")]
)
def test_a_residual_that_is_not_subtracted_is_caught(
    place: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine, rule: str
) -> None:
    module, name = rules_of(machine), KERNELS[rule]
    monkeypatch.setattr(module, name, partial(unreduced, getattr(module, name)))
    assert drawn(machine, place, "EAGLE3", 6, **FLAGS[rule]).p < 1e-8


@pytest.mark.gpu
def test_noise_that_forgets_the_position_is_caught(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coupled: Rule = getattr(sampled_targets, KERNELS["coupled"])

    def stuck(*columns: torch.Tensor, **how: object) -> torch.Tensor:
        return coupled(*columns[:6], torch.zeros_like(columns[6]), **how)

    monkeypatch.setattr(sampled_targets, "coupled_sample", stuck)
    assert drawn(GPU, place, "random-tree", 6).p < 1e-8
