"""What a draft window's pool takes of the memory, beside a pool like the target's."""

from pathlib import Path

import msgspec

from outrider.engine_core.config import EngineConfig
from outrider.engine_core.device_config import Placement
from outrider.engine_core.draft_source import find_draft
from outrider.engine_core.memory_plan import MemoryPlan, plan_memory
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.refusal import Refused
from outrider.frontend.commands.plan import plan_table

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
ON_CUDA = Placement("cuda", "bfloat16", 0.9)


def test_a_plan_says_what_a_window_saves() -> None:
    """The draft's pool has its size whatever the target's; what is saved are the target's pages."""
    folder = CONFIGS / "qwen3-8b-dflash"
    target = load_model_config(CONFIGS / "qwen3-8b")
    plans, width = [], 0
    for window in (None, 2048):
        config = EngineConfig(
            model=str(CONFIGS / "qwen3-8b"),
            load_format="dummy",
            speculative_algorithm="DFLASH",
            speculative_draft_model_path=str(folder),
            speculative_draft_window_size=window,
            max_total_tokens=10_000_000,
            page_size=64,
        )
        draft = find_draft(config, target)
        assert draft is not None
        resolved, width = config.with_shape(draft.shape), draft.shape.num_draft_tokens
        most = plan_memory(resolved, target, {}, ON_CUDA, 140 << 30, draft)
        assert isinstance(most, Refused)
        tokens = int(most.reason.rsplit("allows ", 1)[1].split(";")[0])
        fitting = msgspec.structs.replace(resolved, max_total_tokens=tokens)
        plan = plan_memory(fitting, target, {}, ON_CUDA, 150 << 30, draft)
        assert isinstance(plan, MemoryPlan), plan
        plans.append(plan)
    whole, ours = plans
    pages = 48 * -(-(2048 + 63 + 3 * width) // 64) + 1
    assert (whole.draft_window_pages, ours.draft_window_pages) == (0, pages)
    assert whole.draft_kv_bytes == whole.full_draft_kv_bytes
    assert ours.draft_kv_bytes == pages * 64 * ours.draft_kv_bytes_per_token
    assert ours.draft_kv_bytes < ours.full_draft_kv_bytes / 3
    assert ours.num_tokens > 1.07 * whole.num_tokens
    for plan in plans:
        of_target = (plan.num_pages + 1) * 64 * plan.kv_bytes_per_token
        assert plan.kv_bytes == of_target + plan.draft_kv_bytes
    text = plan_table(ours)
    assert "draft KV, its window" in text
    assert f"{pages:,} pages" in text
    assert "draft KV, its window" not in plan_table(whole)


def test_a_window_that_does_not_fit_is_refused() -> None:
    target = load_model_config(CONFIGS / "qwen3-8b")
    config = EngineConfig(
        model=str(CONFIGS / "qwen3-8b"),
        load_format="dummy",
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(CONFIGS / "qwen3-8b-dflash"),
        speculative_draft_window_size=32_000,
        max_running_requests=4000,
    )
    draft = find_draft(config, target)
    assert draft is not None
    plan = plan_memory(config.with_shape(draft.shape), target, {}, ON_CUDA, 140 << 30, draft)
    assert isinstance(plan, Refused)
    assert plan.field == "mem_fraction_static"
    assert "of the draft's window" in plan.reason
