"""Block drafts that keep a window alone, through whole cores on a CPU."""

from pathlib import Path

import msgspec
import pytest

from outrider.engine.speculative.device_drafter import DraftRows
from outrider.engine_core import admission, draft_window
from outrider.engine_core.ids import i32
from outrider.engine_core.messages import CoreStats, GenerateRequest
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.sampling_params import SamplingParams

from . import block_cores
from .block_cores import DRAFTS, VOCAB, BlockCore, block_core, draft_config, write_target
from .cores import drive, request, tokens_of

Tokens = dict[str, list[int]]
over_drafts = pytest.mark.parametrize("name", DRAFTS)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def requests(name: str = "r", first: int = 0, length: int = 6) -> list[GenerateRequest]:
    """Greedy and seeded ones of several lengths, some with the beginning of another."""
    out = []
    for i in range(first, first + 8):
        prompt = [(3 * j * j + i % 7 * 5 + j) % VOCAB for j in range(1 + length * i)]
        params = SamplingParams(
            temperature=(0.0, 0.8)[i % 2], seed=i, max_new_tokens=14 + i, ignore_eos=i % 3 > 0
        )
        out.append(request(f"{name}{i}", prompt, params))
    return out


def waves() -> list[list[GenerateRequest]]:
    return [requests(), requests("s", 6)[:3]]


class Proposals:
    """What a core's drafter proposes, by slot and length: drafts of rows with room for all."""

    def __init__(self, made: BlockCore) -> None:
        self.seen: dict[tuple[int, int], list[int]] = {}
        self._propose = made.drafter.propose
        made.drafter.propose = self.propose  # type: ignore[method-assign]

    def propose(self, rows: DraftRows) -> None:
        lengths = rows.seq_lens.clone()
        self._propose(rows)
        for row, slot in enumerate(rows.slots.tolist()):
            begin = int(rows.cu_q[row]) + 1
            drafts = rows.tokens[begin : begin + int(rows.proposed[row])].tolist()
            self.seen[slot, int(lengths[slot])] = drafts


class Run:
    def __init__(
        self, target: Path, name: str | None, messages: list[list[GenerateRequest]], **flags: object
    ) -> None:
        self.tokens: Tokens = {}
        self.seen: dict[tuple[int, int], list[int]] = {}
        with block_core(target, name, **flags) as made:
            proposals = Proposals(made) if name is not None else None
            for wave in messages:
                for rid, outputs in drive(made.core, wave).items():
                    self.tokens[rid] = tokens_of(outputs)
            self.stats: CoreStats = made.core.stats(0)
            if proposals is not None:
                self.seen = proposals.seen
            check_pages(made)


def check_pages(made: BlockCore) -> None:
    """Every page is back, the draft's too."""
    scheduler = made.core.scheduler
    assert scheduler.cache.tree.locked_pages == 0
    assert scheduler.cache.available == scheduler.cache.total
    if scheduler.windows is not None:
        stats = scheduler.windows.stats
        assert (stats.live_pages, stats.deferred_pages) == (0, 0)
        assert not scheduler.windows.map.table.any()


@pytest.fixture(scope="module")
def plain(target: Path) -> Tokens:
    return Run(target, None, waves()).tokens


MODES: list[dict[str, object]] = [
    {},
    {"disable_overlap_schedule": True, "max_running_requests": 1},
    {"page_size": 1, "chunked_prefill_size": 5},
    {"page_size": 1, "max_running_requests": 1, "disable_overlap_schedule": True},
    {"page_size": 64, "disable_radix_cache": True, "max_running_requests": 3},
    {"speculative_ragged_verify_mode": "compact", "page_size": 1},
    {"speculative_ragged_verify_mode": "cap-accept"},
]


@over_drafts
@pytest.mark.parametrize("window", [4, 11])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: ",".join(mode) or "default")
def test_every_mode_gives_the_tokens_of_plain_decoding(
    target: Path, plain: Tokens, name: str, mode: dict[str, object], window: int
) -> None:
    ran = Run(target, name, waves(), speculative_draft_window_size=window, **mode)
    assert ran.tokens == plain
    assert 0 < ran.stats.spec_accepted_tokens < ran.stats.spec_draft_tokens
    assert ran.stats.window_drafts >= ran.stats.spec_draft_tokens > 0


@over_drafts
@pytest.mark.parametrize("mode", MODES[:3], ids=lambda mode: ",".join(mode) or "default")
def test_a_window_over_everything_changes_no_draft(
    target: Path, name: str, mode: dict[str, object]
) -> None:
    flags = {"disable_radix_cache": True, **mode}
    whole = Run(target, name, waves(), **flags)
    ran = Run(target, name, waves(), speculative_draft_window_size=10_000, **flags)
    assert ran.tokens == whole.tokens
    assert ran.seen == whole.seen
    assert ran.stats.window_short_drafts == 0


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_window_over_a_sliding_layers_changes_no_draft(
    target: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool, page_size: int
) -> None:
    """Whatever it keeps beyond is masked anyway; without prefixes of others every row is there."""
    config = draft_config("dflash", load_model_config(target))
    assert config.block is not None
    model = msgspec.structs.replace(config.model, sliding_windows=(9, 9))
    sliding = msgspec.structs.replace(config, model=model)
    monkeypatch.setattr(block_cores, "draft_config", lambda *_: sliding)
    flags: dict[str, object] = {
        "disable_radix_cache": True,
        "disable_overlap_schedule": not overlap,
        "page_size": page_size,
    }
    whole = Run(target, "dflash", waves(), **flags)
    ran = Run(target, "dflash", waves(), speculative_draft_window_size=9, **flags)
    assert ran.tokens == whole.tokens
    assert ran.seen == whole.seen
    assert len(ran.seen) > 50
    assert ran.stats.window_short_drafts == 0
    assert ran.stats.window_page_failures == 0


@over_drafts
@pytest.mark.parametrize("overlap", [True, False])
def test_retracted_requests_draft_on(
    target: Path, name: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 1)
    params = SamplingParams(temperature=0.0, max_new_tokens=18, ignore_eos=True)
    messages = [request(f"r{i}", [i, 1, 2, 3, i], params) for i in range(5)]
    wanted = Run(target, None, [messages]).tokens
    got: Tokens = {message.rid: [] for message in messages}
    flags: dict[str, object] = {"page_size": 1, "max_total_tokens": 60}
    flags |= {"speculative_draft_window_size": 6, "disable_overlap_schedule": not overlap}
    with block_core(target, name, **flags) as made:
        core = made.core
        for message in messages:
            assert core.submit(message) is None
        while core.has_work:
            for output in core.step():
                got[output.rid] += i32(output.tokens).tolist()
        assert core.scheduler.counters.retractions > 0
        check_pages(made)
    assert got == wanted


ABORTED = {1: "r4", 2: "r1", 3: "r5", 4: "r7"}


@pytest.mark.parametrize("overlap", [True, False])
def test_aborted_requests_leave_no_draft_page(target: Path, plain: Tokens, overlap: bool) -> None:
    messages, got = waves()[0], dict[str, list[int]]()
    flags: dict[str, object] = {"speculative_draft_window_size": 5, "page_size": 1}
    with block_core(target, "dspark", disable_overlap_schedule=not overlap, **flags) as made:
        core = made.core
        for message in messages:
            assert core.submit(message) is None
        steps = 0
        while core.has_work:
            for output in core.step():
                got.setdefault(output.rid, []).extend(i32(output.tokens).tolist())
            steps += 1
            if steps in ABORTED:
                core.abort(ABORTED[steps])
        check_pages(made)
    assert core.scheduler.counters.aborts == 4
    for rid in ("r0", "r2", "r3", "r6"):
        assert got[rid] == plain[rid]


def test_prefixes_of_others_bring_rows_or_are_counted(target: Path) -> None:
    """A prefix has the draft KV of whoever runs with it; once nobody does, drafts warm up."""
    params = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    prompt = [j * j % VOCAB for j in range(32)]
    messages = [request(f"r{i}", [*prompt, i], params) for i in range(3)]
    flags: dict[str, object] = {"speculative_draft_window_size": 16, "page_size": 16}
    with block_core(target, "dspark", **flags) as made:
        core = made.core
        assert core.submit(messages[0]) is None
        while not core.scheduler.counters.generated_tokens:
            core.step()
        assert core.submit(messages[1]) is None
        while core.has_work:
            core.step()
        assert core.scheduler.counters.cached_tokens == 32
        assert core.scheduler.windows is not None
        assert core.scheduler.windows.stats.rows_found == 16
        assert core.stats(0).window_short_drafts == 0
        drive(core, messages[2:])
        stats = core.scheduler.windows.stats
        assert (stats.rows_found, stats.rows_missing) == (16, 16)
        short = core.stats(0).window_short_drafts
        assert 0 < short < core.stats(0).window_drafts
        check_pages(made)


def test_a_context_is_filled_to_its_end(target: Path) -> None:
    prompt = [i * i % VOCAB for i in range(480)]
    full = SamplingParams(temperature=0.0, max_new_tokens=99, ignore_eos=True)
    wanted = Run(target, None, [[request("full", prompt, full)]])
    for window in (4, 33):
        ran = Run(
            target, "dflash", [[request("full", prompt, full)]],
            speculative_draft_window_size=window,
        )  # fmt: skip
        assert ran.tokens == wanted.tokens
        assert len(ran.tokens["full"]) == 512 - 480
        assert ran.stats.window_peak_pages <= -(-(window + 15 + 3 * 4) // 16)


def test_drafting_is_timed(target: Path) -> None:
    with block_core(target, "dspark", speculative_draft_window_size=8) as made:
        assert min(made.worker.measure([1, 8])) > 0
        assert min(made.worker.measure_drafting([1, 4])) > 0


def test_a_draft_pool_that_is_short_costs_drafts_alone(
    target: Path, plain: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without draft KV are not drafted for, and what is left of it serves the others."""

    def few(*_: object) -> int:
        return 4

    monkeypatch.setattr(draft_window, "draft_pool_pages", few)
    for page_size in (1, 16):
        ran = Run(target, "dspark", waves(), speculative_draft_window_size=8, page_size=page_size)
        assert ran.tokens == plain
        assert ran.stats.window_page_failures > 0
        assert ran.stats.window_peak_pages == 3
        planned = ran.stats.window_drafts
        assert ran.stats.spec_draft_tokens < planned
        assert ran.stats.window_short_drafts > 0
