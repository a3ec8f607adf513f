"""Block drafts that keep a window alone, through whole cores on a CPU."""

from pathlib import Path

import pytest
import torch

from outrider.engine.speculative.device_drafter import DraftRows
from outrider.engine_core import admission
from outrider.engine_core.ids import i32
from outrider.engine_core.messages import CoreStats, GenerateRequest
from outrider.engine_core.sampling_params import SamplingParams

from .block_cores import DRAFTS, VOCAB, BlockCore, block_core, write_target
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
