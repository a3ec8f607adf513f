"""Draft models through whole cores on the GPU's kernels: only the number of steps changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from outrider.engine.gpu.tiers import Tiers, pass_sizes
from outrider.engine.gpu.worker import GpuWorker
from outrider.engine.models.draft_loader import read_weights
from outrider.engine.models.draft_net import DraftNet
from outrider.engine.models.gpu_decoder import GpuDecoder
from outrider.engine.models.gpu_draft import GpuDraft
from outrider.engine.models.standalone_draft import GpuStandaloneDraft
from outrider.engine.weights import Checkpoint
from outrider.engine_core.assembly import Assembly
from outrider.engine_core.draft_config import DraftAlgorithm, SpecShape
from outrider.engine_core.draft_config_json import load_draft_config
from outrider.engine_core.graph_sizes import graph_chunk
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.sampling_params import SamplingParams

from ..cores import drive, request, tokens_of
from ..draft_cores import CHAIN, TREE, VOCAB, Models, draft_core, write_models
from .device_cores import device_core, drafting_on_the_gpu
from .gpu_driver import DEVICE

DTYPE = torch.float32
Tokens = dict[str, list[int]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return write_models(tmp_path_factory.mktemp("drafts"))


def requests() -> list[GenerateRequest]:
    """Greedy and seeded ones of two chunks and of one."""
    out = []
    for i in range(2):
        prompt = [(3 * j * j + i * 5 + j) % VOCAB for j in range(2 + 11 * i)]
        params = SamplingParams(
            temperature=0.8 * (i % 2), seed=5 * i, max_new_tokens=8 - i, ignore_eos=True
        )
        out.append(request(f"r{i}", prompt, params))
    return out


def load(models: Models, algorithm: DraftAlgorithm, target: GpuDecoder) -> DraftNet:
    folder = models.drafts[algorithm]
    config = load_draft_config(folder, load_model_config(models.target), algorithm)
    if algorithm == "STANDALONE":
        small = GpuDecoder(Checkpoint(folder), config.model, DTYPE, DEVICE)
        return GpuStandaloneDraft(config, small)
    return GpuDraft(read_weights(folder, config), config, target, DTYPE, DEVICE)


@contextmanager
def started(
    models: Models,
    algorithm: DraftAlgorithm | None,
    shape: SpecShape,
    page_size: int = 16,
    disable_cuda_graph: bool = DEVICE.type == "cpu",
    **rule: Any,
) -> Iterator[tuple[Assembly, GpuWorker]]:
    known = load_model_config(models.target)
    target = GpuDecoder(Checkpoint(models.target), known, DTYPE, DEVICE)
    flags: dict[str, Any] = {"page_size": page_size, "chunked_prefill_size": 9}
    flags |= {"disable_cuda_graph": disable_cuda_graph, **rule}
    if algorithm is not None:
        flags |= {
            "speculative_algorithm": algorithm,
            "speculative_draft_model_path": str(models.drafts[algorithm]),
            "speculative_num_steps": shape.steps,
            "speculative_eagle_topk": shape.topk,
            "speculative_num_draft_tokens": shape.num_draft_tokens,
            "draft": (load(models, algorithm, target), shape),
        }
    with drafting_on_the_gpu(), device_core(target, known, **flags) as made:
        yield made


def run(
    models: Models, algorithm: DraftAlgorithm | None, shape: SpecShape, **rule: Any
) -> tuple[Tokens, int]:
    """Tokens, and how many drafts were accepted; ``rule``: flags that ask for one."""
    with started(models, algorithm, shape, **rule) as (assembly, _):
        outputs = drive(assembly.core, requests())
        accepted = assembly.core.scheduler.counters.spec_accepted_tokens
    return {rid: tokens_of(some) for rid, some in outputs.items()}, accepted


@pytest.fixture(scope="module")
def plain(models: Models) -> Tokens:
    return run(models, None, CHAIN)[0]


def on_a_gpu(algorithm: DraftAlgorithm, shape: SpecShape) -> object:
    """A case that takes the interpreter long and adds little to the others."""
    return pytest.param(algorithm, shape, marks=pytest.mark.gpu)


@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [
        ("STANDALONE", CHAIN),
        on_a_gpu("STANDALONE", TREE),
        on_a_gpu("EAGLE", CHAIN),
        ("EAGLE", TREE),
        ("EAGLE3", CHAIN),
        on_a_gpu("EAGLE3", TREE),
    ],
    ids=lambda value: value if isinstance(value, str) else f"topk{value.topk}",
)
def test_every_drafter_gives_the_tokens_of_plain_decoding(
    models: Models, plain: Tokens, algorithm: DraftAlgorithm, shape: SpecShape
) -> None:
    tokens, accepted = run(models, algorithm, shape)
    assert tokens == plain
    assert accepted > 0


@pytest.mark.parametrize(
    "algorithm",
    ["EAGLE3", *(pytest.param(a, marks=pytest.mark.gpu) for a in ("STANDALONE", "EAGLE"))],
)
@pytest.mark.parametrize(
    "field", ["speculative_use_rejection_sampling", "speculative_use_block_verification"]
)
def test_rules_that_know_both_laws_give_the_tokens_of_the_cpu(
    models: Models, plain: Tokens, algorithm: DraftAlgorithm, field: str
) -> None:
    """Those of sampled requests are not plain decoding's, those of greedy ones are.

    Float32's rounding decides nothing: with all weights off by 1e-4 the tokens are the same.
    """
    rule = {field: True}
    with draft_core(models, algorithm, CHAIN, **rule) as made:
        outputs = drive(made.core, requests())
        rejected = made.core.stats(0).spec_draft_tokens - made.core.stats(0).spec_accepted_tokens
    tokens, accepted = run(models, algorithm, CHAIN, **rule)
    wanted = {rid: tokens_of(some) for rid, some in outputs.items()}
    assert tokens == wanted, f"{tokens}, but the CPU's are {wanted}"
    assert tokens["r0"] == plain["r0"]
    assert tokens["r1"] != plain["r1"]
    assert min(accepted, rejected) > 0


@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [("EAGLE3", CHAIN), ("EAGLE", TREE), on_a_gpu("STANDALONE", TREE)],
    ids=lambda value: value if isinstance(value, str) else f"topk{value.topk}",
)
def test_thresholds_give_the_tokens_of_the_cpu(
    models: Models, plain: Tokens, algorithm: DraftAlgorithm, shape: SpecShape
) -> None:
    rule = {"speculative_accept_threshold_acc": 0.01}
    with draft_core(models, algorithm, shape, **rule) as made:
        outputs = drive(made.core, requests())
    tokens, accepted = run(models, algorithm, shape, **rule)
    wanted = {rid: tokens_of(some) for rid, some in outputs.items()}
    assert tokens == wanted, f"{tokens}, but the CPU's are {wanted}"
    assert tokens["r0"] == plain["r0"]
    assert tokens["r1"] != plain["r1"]
    assert accepted > 0


@pytest.mark.gpu
def test_the_first_steps_of_a_wide_tree_replay_their_graph(models: Models) -> None:
    """Pages of one token: a first verify step is given one for each of the 41 that drafts reach."""
    with started(models, "EAGLE3", SpecShape(6, 8, 8), 1) as (assembly, worker):
        drive(assembly.core, requests())
        counts = worker.counts
    assert counts.replays == counts.decode_steps > 0


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_drafts_matmuls_are_chosen_for_its_passes(
    models: Models, shape: SpecShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(GpuDraft, "tune", lambda _, rows: sizes.extend(rows))
    with started(models, "EAGLE3", shape) as (assembly, _):
        config = assembly.core.scheduler.config.engine
    tiers = Tiers(config.max_running_requests, shape.num_draft_tokens, graph_chunk(config))
    assert sorted(sizes) == sorted(pass_sizes(tiers.all() + tiers.mixed(), shape))
