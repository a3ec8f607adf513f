"""A graph's staging block has room for the pages that the core gives to the rows of one step."""

from typing import Any

import pytest

from outrider.engine.gpu.tier_shapes import tier_staging
from outrider.engine.gpu.tiers import Tiers
from outrider.engine_core.draft_window import draft_pool_pages
from outrider.engine_core.ids import RowKind, i32
from outrider.engine_core.plan import StepPlan

from ...engine_core.core_fixtures import device_oracle, make_core, request, run_all
from ...engine_core.fake_worker import FakeWorker
from ...engine_core.window_worker import WindowWorker

WIDTH, ROWS = 4, 24
DEVICE: dict[str, Any] = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": WIDTH,
    "speculative_ngram_source": "gpu",
    "max_running_requests": ROWS,
}


class Recording(FakeWorker):
    """Keeps the plans without prefill rows."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.decode_plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> None:
        if plan.kinds == bytes([RowKind.VERIFY]) * plan.num_rows:
            self.decode_plans.append(plan)
        super().launch(plan)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("reach", [0, 65])
def test_every_decode_step_has_room_for_its_pages(
    page_size: int, overlap: bool, reach: int
) -> None:
    """All rows verify for the first time in one step, which gives each its whole reach."""
    worker = Recording(
        num_pages=8192 // page_size,
        page_size=page_size,
        max_slots=2 * ROWS,
        device_drafter=device_oracle(),
        draft_reach=reach,
    )
    core = make_core(worker, disable_overlap_schedule=not overlap, **DEVICE)
    for i in range(ROWS):
        assert core.submit(request(f"r{i}", range(1 + i, 9 + i), 40, ignore_eos=True)) is None
    run_all(core)
    tiers, narrow = Tiers(ROWS, WIDTH), 0
    for plan in worker.decode_plans:
        tier = tiers.of(plan.num_rows, int(i32(plan.q_caps).sum()), False)
        assert tier is not None
        pages = len(i32(plan.page_slots))
        assert pages <= tier_staging(tier, page_size, max(1, reach)).updates
        narrow += pages > tier_staging(tier, page_size).updates
    assert len(worker.decode_plans) > 10
    assert (narrow > 0) == (reach > 0), "where drafts reach further, the width alone is too little"


class RecordingWindows(WindowWorker):
    """Keeps the plans without prefill rows."""

    decode_plans: list[StepPlan]

    def launch(self, plan: StepPlan) -> None:
        if plan.kinds == bytes([RowKind.VERIFY]) * plan.num_rows:
            self.decode_plans.append(plan)
        super().launch(plan)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overlap", [True, False])
def test_every_decode_step_has_room_for_its_windows(page_size: int, overlap: bool) -> None:
    """Pages come and slide out in every row; now and then requests end."""
    window = 20
    pages = draft_pool_pages(ROWS, window, page_size, WIDTH, overlap)
    worker = RecordingWindows(
        pages, window, WIDTH,
        num_pages=8192 // page_size, page_size=page_size, max_slots=2 * ROWS,
    )  # fmt: skip
    worker.decode_plans = []
    flags: dict[str, Any] = {
        "speculative_algorithm": "DFLASH",
        "speculative_num_steps": WIDTH - 1,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": WIDTH,
        "speculative_draft_window_size": window,
        "max_running_requests": ROWS,
    }
    core = make_core(worker, disable_overlap_schedule=not overlap, **flags)
    for i in range(ROWS):
        assert core.submit(request(f"r{i}", range(1 + i, 9 + i), 40, ignore_eos=True)) is None
    run_all(core)
    tiers, most = Tiers(ROWS, WIDTH), 0
    for plan in worker.decode_plans:
        tier = tiers.of(plan.num_rows, int(i32(plan.q_caps).sum()), False)
        assert tier is not None
        room = tier_staging(tier, page_size, windowed=True)
        assert room.holds(plan)
        most = max(most, len(i32(plan.window_pages)))
    assert most >= ROWS
