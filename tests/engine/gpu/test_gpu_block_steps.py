"""Block drafts through whole cores on the GPU's kernels: only the number of steps changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.gpu import worker as worker_module
from outrider.engine.gpu.tiers import Tiers, block_sizes
from outrider.engine.gpu.worker import GpuWorker
from outrider.engine.models import load_model
from outrider.engine.models.gpu_block import GpuBlock
from outrider.engine.models.gpu_decoder import GpuDecoder
from outrider.engine.weights import Checkpoint
from outrider.engine_core.assembly import Assembly
from outrider.engine_core.core import EngineCore
from outrider.engine_core.draft_config import SpecShape
from outrider.engine_core.graph_sizes import graph_chunk
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.sampling_params import SamplingParams

from ..block_cores import VOCAB, block_core, draft_config, draft_weights, write_target
from ..block_nets import CPU
from ..cores import drive, request, tokens_of
from .device_cores import device_core, drafting_on_the_gpu
from .eager_graphs import GRAPHS
from .gpu_driver import DEVICE

DTYPE = torch.float32
DRAFTS = 3
Tokens = dict[str, list[int]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def requests() -> list[GenerateRequest]:
    """Greedy and seeded ones of two chunks and of one."""
    out = []
    for i in range(2):
        prompt = [(3 * j * j + i * 5 + j) % VOCAB for j in range(2 + 11 * i)]
        params = SamplingParams(
            temperature=0.8 * (i % 2), seed=i, max_new_tokens=8 - i, ignore_eos=True
        )
        out.append(request(f"r{i}", prompt, params))
    return out


@contextmanager
def started(
    folder: Path,
    name: str | None,
    page_size: int = 16,
    disable_cuda_graph: bool = DEVICE.type == "cpu",
    window: int | None = None,
    **more: Any,
) -> Iterator[tuple[Assembly, GpuWorker]]:
    known = load_model_config(folder)
    model = GpuDecoder(Checkpoint(folder), known, DTYPE, DEVICE)
    flags: dict[str, Any] = {"page_size": page_size, "chunked_prefill_size": 9}
    flags |= {"disable_cuda_graph": disable_cuda_graph, **more}
    if name is not None:
        config = draft_config(name, known)
        weights = draft_weights(name, config, load_model(folder, known, DTYPE, CPU))
        net = GpuBlock(weights, config, model, DTYPE, DEVICE)
        flags |= {
            "speculative_algorithm": config.algorithm,
            "speculative_draft_model_path": str(folder),
            "speculative_num_steps": DRAFTS,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": DRAFTS + 1,
            "draft": (net, SpecShape(DRAFTS, 1, DRAFTS + 1)),
            "speculative_draft_window_size": window,
        }
    with drafting_on_the_gpu(), device_core(model, known, **flags) as made:
        yield made


def run(
    folder: Path, name: str | None, page_size: int = 16, window: int | None = None
) -> tuple[Tokens, int]:
    """Tokens, and how many drafts were accepted."""
    with started(folder, name, page_size, window=window) as (assembly, _):
        outputs = drive(assembly.core, requests())
        accepted = assembly.core.scheduler.counters.spec_accepted_tokens
        windows = assembly.core.scheduler.windows
        assert (windows is None) == (window is None)
        if windows is not None:
            assert windows.drafts > 0
            assert windows.stats.live_pages == windows.stats.deferred_pages == 0
    return {rid: tokens_of(some) for rid, some in outputs.items()}, accepted


@pytest.fixture(scope="module")
def plain(target: Path) -> Tokens:
    return run(target, None)[0]


@pytest.mark.parametrize(
    ("name", "page_size"),
    [
        ("dflash", 16),
        ("dspark", 1),
        pytest.param("dflash", 1, marks=pytest.mark.gpu),
        pytest.param("dspark", 16, marks=pytest.mark.gpu),
        pytest.param("random-dspark", 16, marks=pytest.mark.gpu),
    ],
)
def test_every_draft_gives_the_tokens_of_plain_decoding(
    target: Path, plain: Tokens, name: str, page_size: int
) -> None:
    tokens, accepted = run(target, name, page_size)
    assert tokens == plain
    assert accepted > 0 or name != "dspark"


@pytest.mark.parametrize(
    ("name", "page_size", "window"),
    [
        ("dflash", 16, 4),
        pytest.param("dspark", 1, 5, marks=pytest.mark.gpu),
        pytest.param("dflash", 1, 4, marks=pytest.mark.gpu),
        pytest.param("dspark", 16, 20, marks=pytest.mark.gpu),
        pytest.param("random-dspark", 1, 7, marks=pytest.mark.gpu),
    ],
)
def test_a_window_gives_the_tokens_of_plain_decoding(
    target: Path, plain: Tokens, name: str, page_size: int, window: int
) -> None:
    tokens, accepted = run(target, name, page_size, window)
    assert tokens == plain
    assert accepted > 0 or name != "dspark"


def test_windows_move_in_a_graphs_block(
    target: Path, plain: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose rows stand apart, with padding between and behind them."""
    monkeypatch.setattr(worker_module, "StepGraphs", GRAPHS)
    with started(target, "dspark", 1, disable_cuda_graph=False, window=5) as (assembly, worker):
        outputs = drive(assembly.core, requests())
        counts = worker.counts
    assert {rid: tokens_of(some) for rid, some in outputs.items()} == plain
    assert counts.replays > 0
    assert counts.prefill_replays > 0


@pytest.mark.parametrize("name", ["dflash", pytest.param("dspark", marks=pytest.mark.gpu)])
def test_a_window_over_everything_accepts_the_same_drafts(
    target: Path, plain: Tokens, name: str
) -> None:
    assert run(target, name, 16, 1000) == run(target, name, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_windowed_steps_replay_their_graph(target: Path, name: str) -> None:
    with started(target, name, 1, window=5) as (assembly, worker):
        outputs = drive(assembly.core, requests())
        counts = worker.counts
    assert counts.replays == counts.decode_steps > 0
    assert {rid: tokens_of(some) for rid, some in outputs.items()} == run(target, None)[0]


@pytest.mark.parametrize("mode", ["static", "compact"])
def test_simulated_survival_is_the_cpus(target: Path, mode: str) -> None:
    flags: dict[str, Any] = {
        "simulate_survival": 0.7,
        "speculative_ragged_verify_mode": mode,
    }
    found = []
    with started(target, "dspark", **flags) as (assembly, _):
        found.append(survived(assembly.core, mode))
    with block_core(target, "dspark", chunked_prefill_size=9, **flags) as made:
        found.append(survived(made.core, mode))
    assert found[0] == found[1], f"{found[0]}, but the CPU's are {found[1]}"


def survived(core: EngineCore, mode: str) -> list[object]:
    if mode == "compact":
        assert core.scheduler.verify is not None
        core.scheduler.verify.planner.force(0.4)
    outputs = drive(core, requests())
    return [outputs[message.rid][-1].stats for message in requests()]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_steps_replay_their_graph(target: Path, name: str) -> None:
    with started(target, name, 1) as (assembly, worker):
        drive(assembly.core, requests())
        counts = worker.counts
    assert counts.replays == counts.decode_steps > 0


def test_a_drafts_matmuls_are_chosen_for_its_passes(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(GpuBlock, "tune", lambda _, rows: sizes.extend(rows))
    with started(target, "dflash") as (assembly, _):
        config = assembly.core.scheduler.config.engine
    tiers = Tiers(config.max_running_requests, DRAFTS + 1, graph_chunk(config))
    block = draft_config("dflash", load_model_config(target)).block
    assert block is not None
    assert sorted(sizes) == sorted(block_sizes(tiers.all() + tiers.mixed(), block))
    assert {DRAFTS * config.max_running_requests, config.max_running_requests} < set(sizes)
