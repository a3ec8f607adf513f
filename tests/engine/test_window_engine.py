"""Whole engines with a draft window, from a folder to tokens, traces and their replays."""

from pathlib import Path

import pytest

from outrider.engine.build import build_worker
from outrider.engine.rank_worker import find_site
from outrider.engine.worker import EngineWorker
from outrider.engine_core.assembly import assemble_replay
from outrider.engine_core.config import EngineConfig, resolve_config
from outrider.engine_core.plan import StepPlan
from outrider.engine_core.refusal import Refused, RefusedError
from outrider.engine_core.replay import replay_core, replay_worker
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.trace import TraceReader

from .block_checkpoints import BLOCKS
from .cores import drive, request, running_engine, tiny_config, tokens_of
from .tiny import write_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [20, 21, 22, 20, 21, 22, 20], [5] * 40]
NAMES = ("dflash", "dspark")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), 48, layers=4)


def decode(config: EngineConfig) -> list[list[int]]:
    with running_engine(config) as engine:
        tokens = []
        for wave in "ab":
            messages = [request(f"{wave}{i}", p, GREEDY) for i, p in enumerate(PROMPTS)]
            tokens += [tokens_of(outputs) for outputs in drive(engine.core, messages).values()]
    return tokens


def windowed(tmp_path: Path, target: Path, name: str, window: int, **flags: object) -> EngineConfig:
    kind = BLOCKS[name]
    return tiny_config(
        target,
        kind.algorithm,
        device="cpu",
        speculative_draft_model_path=str(kind.write(tmp_path, target)),
        speculative_draft_window_size=window,
        **flags,
    )


@pytest.mark.parametrize("name", NAMES)
def test_traces_replay_exactly(
    tmp_path: Path, target: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = windowed(tmp_path / "draft", target, name, 20, max_running_requests=2)
    plain = decode(tiny_config(target, device="cpu"))
    path = tmp_path / "trace"
    monkeypatch.setenv("OUTRIDER_TRACE", str(path))
    assert decode(config) == plain
    monkeypatch.delenv("OUTRIDER_TRACE")
    plans = [frame for frame in TraceReader(path) if isinstance(frame, StepPlan)]
    assert sum(bool(plan.window_pages) for plan in plans) > 5
    assert all(plan.window_lows for plan in plans)
    report = replay_core(TraceReader(path), assemble_replay)
    assert report.ok, report.differences
    report = replay_worker(TraceReader(path), prepared(config))
    assert report.ok, report.differences


def prepared(config: EngineConfig) -> EngineWorker:
    worker = build_worker(config)
    resolved = resolve_config(find_site(config).config, worker.info())
    assert not isinstance(resolved, Refused)
    worker.prepare(resolved)
    return worker


@pytest.mark.parametrize("name", NAMES)
def test_a_window_below_the_blocks_of_the_draft_is_refused(
    tmp_path: Path, target: Path, name: str
) -> None:
    kind = BLOCKS[name]
    config = windowed(tmp_path, target, name, kind.drafts)
    with pytest.raises(RefusedError, match=f"{kind.drafts} is less than the {kind.drafts + 1}"):
        find_site(config)
    site = find_site(windowed(tmp_path, target, name, kind.drafts + 1))
    assert 0 < site.plan.draft_kv_bytes < site.plan.full_draft_kv_bytes
