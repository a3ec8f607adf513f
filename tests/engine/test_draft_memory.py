"""A draft model beside its target: what is loaded, and that it is what was planned."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.build import build_worker
from outrider.engine.kv_pool import KVPool
from outrider.engine.models import load_model
from outrider.engine.models.cpu_draft import NativeDraft
from outrider.engine.models.draft_loader import load_draft
from outrider.engine.rank_worker import find_site, load_rank
from outrider.engine_core.config import EngineConfig, refuse_config
from outrider.engine_core.device_config import Placement
from outrider.engine_core.draft_config import SpecShape
from outrider.engine_core.draft_memory import draft_parts
from outrider.engine_core.draft_sizes import draft_sizes, refuse_quantization
from outrider.engine_core.draft_source import DraftSource, find_draft
from outrider.engine_core.memory_parts import StepSize
from outrider.engine_core.memory_plan import MemoryPlan, memory_parts, plan_memory
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.refusal import RefusedError
from outrider.engine_core.sampling_params import SamplingParams

from . import draft_checkpoints as drafts
from .cores import drive, request, running_engine, tokens_of
from .tiny import write_checkpoint

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
QWEN, EAGLE3 = CONFIGS / "qwen3-8b", CONFIGS / "qwen3-8b-eagle3"
CPU = torch.device("cpu")
GIB = 1 << 30
VOCAB = 64
ON_CUDA = Placement("cuda", "bfloat16", 0.9)
ON_CPU = Placement("cpu", "float32", 0.9)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "target", VOCAB, layers=4)


def config_of(target: Path, algorithm: str, draft: Path, **fields: Any) -> EngineConfig:
    values: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_total_tokens": 512}
    return EngineConfig(
        model=str(target),
        speculative_algorithm=algorithm,
        speculative_draft_model_path=str(draft),
        **{**values, **fields},
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["standalone", *drafts.DRAFTS])
def test_weights_of_every_format_are_planned_exactly(
    target: Path, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    model, fields = load_model_config(target), {}
    if name == "standalone":
        algorithm, folder = "STANDALONE", drafts.write_standalone(tmp_path / name, target)
    else:
        kind = drafts.DRAFTS[name]
        algorithm, folder = kind.algorithm, kind.write(tmp_path / name, target)
        if kind.hot:
            (tmp_path / "map.json").write_text(str([*range(kind.hot)]))
            fields["speculative_token_map"] = str(tmp_path / "map.json")
    tensors = load_file(folder / "model.safetensors")
    floats = {k: t.to(dtype) if t.is_floating_point() else t for k, t in tensors.items()}
    save_file(floats, folder / "model.safetensors")
    config = config_of(target, algorithm, folder, **fields)
    source = find_draft(config, model)
    assert isinstance(source, DraftSource), source
    for computed, device in ((torch.float32, "cpu"), (torch.bfloat16, "cuda")):
        native = device == "cpu"
        loaded = load_model(target, model, computed, CPU, native=native)
        net = load_draft(
            folder, source.config, loaded, computed, CPU, "auto", native, source.token_map
        )
        placement = Placement(device, str(computed).removeprefix("torch."), 0.5)  # type: ignore[arg-type]
        assert draft_sizes(source, placement).weight_bytes == net.weight_bytes
    dummy = source._replace(stored={})
    net = load_draft(
        folder, source.config, loaded, torch.bfloat16, CPU, "dummy", False, source.token_map
    )
    assert draft_sizes(dummy, placement).weight_bytes == net.weight_bytes


def test_a_map_of_hot_tokens_copies_their_rows(target: Path, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text("[9, 1, 63]")
    folder = drafts.write_eagle(tmp_path / "eagle", target)
    config = config_of(target, "EAGLE", folder, speculative_token_map=str(tmp_path / "map.json"))
    loaded = load_rank(find_site(config))
    assert isinstance(loaded.draft, NativeDraft)
    assert loaded.draft.token_ids is not None
    assert loaded.draft.token_ids.tolist() == [9, 1, 63]
    plain = load_rank(find_site(config_of(target, "EAGLE", folder)))
    assert plain.draft is not None
    hidden = torch.randn(5, 16)
    rows = plain.draft.logits(hidden)[:, [9, 1, 63]]
    torch.testing.assert_close(loaded.draft.logits(hidden), rows)
    assert loaded.site.plan.draft_weight_bytes == loaded.draft.weight_bytes


def test_both_pools_have_the_pages_that_were_planned(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[tuple[int, int]] = []

    class Recorded(KVPool):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            pools.append((self.num_pages, self.data.nbytes))

    monkeypatch.setattr("outrider.engine.rank_worker.KVPool", Recorded)
    for algorithm, folder in (
        ("STANDALONE", drafts.write_standalone(tmp_path / "standalone", target)),
        ("EAGLE3", drafts.write_eagle3(tmp_path / "eagle3", target, hidden=24)),
    ):
        pools.clear()
        config = config_of(target, algorithm, folder, page_size=32)
        plan = find_site(config).plan
        worker = build_worker(config)
        try:
            assert worker.info().num_pages == plan.num_pages == 16
        finally:
            worker.shutdown()
        assert [pages for pages, _ in pools] == [16, 16]
        assert sum(size for _, size in pools) == plan.kv_bytes
        assert plan.draft_kv_bytes_per_token * 17 * 32 == pools[1][1]


def test_a_site_says_how_much_is_drafted(
    target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = drafts.write_eagle3(
        tmp_path / "d", target, outrider={"steps": 4, "topk": 2, "num_draft_tokens": 9}
    )
    config = find_site(config_of(target, "EAGLE3", folder)).config
    found = (config.speculative_num_steps, config.speculative_eagle_topk)
    assert (*found, config.speculative_num_draft_tokens) == (4, 2, 9)
    assert capfd.readouterr().err == ""
    flags = {"speculative_num_steps": 2, "speculative_num_draft_tokens": 8}
    config = find_site(config_of(target, "EAGLE3", folder, **flags)).config
    assert config.speculative_num_draft_tokens == 3
    warning = "warning: speculative_num_draft_tokens: 8 becomes 3"
    assert warning in capfd.readouterr().err


def test_an_engine_reports_the_shape_that_it_drafts(target: Path, tmp_path: Path) -> None:
    own = {"steps": 2, "topk": 2, "num_draft_tokens": 5}
    folder = drafts.write_standalone(tmp_path / "d", target, outrider=own)
    fields: dict[str, Any] = {"skip_tokenizer_init": True, "max_running_requests": 2}
    with running_engine(config_of(target, "STANDALONE", folder, **fields)) as engine:
        assert engine.info.draft_shape == SpecShape(2, 2, 5)
        assert (engine.info.drafter, engine.info.num_draft_tokens) == ("STANDALONE", 5)
    with running_engine(
        config_of(target, "STANDALONE", folder, **fields).without_speculation()
    ) as engine:
        assert engine.info.draft_shape is None


def test_what_is_wrong_with_a_draft_names_its_flag(target: Path, tmp_path: Path) -> None:
    folder = drafts.write_eagle(tmp_path / "d", target)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(RefusedError) as caught:
        build_worker(config_of(target, "EAGLE", folder))
    assert caught.value.refused.field == "speculative_draft_model_path"
    weights.unlink()
    with pytest.raises(RefusedError) as caught:
        build_worker(config_of(target, "EAGLE", folder))
    assert caught.value.refused.field == "speculative_draft_model_path"
    site = find_site(config_of(target, "EAGLE", folder, speculative_draft_load_format="dummy"))
    loaded = load_rank(site)
    assert loaded.draft is not None
    assert loaded.draft.weight_bytes == site.plan.draft_weight_bytes


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_a_rounded_draft_is_planned_loaded_and_changes_no_output(
    target: Path, tmp_path: Path, algorithm: str
) -> None:
    kind = next(k for k in drafts.DRAFTS.values() if k.algorithm == algorithm and not k.hot)
    folder = kind.write(tmp_path / "d", target)
    fields = {"speculative_draft_model_quantization": "int8"}
    site = find_site(config_of(target, algorithm, folder, **fields))
    whole = find_site(config_of(target, algorithm, folder))
    loaded = load_rank(site)
    assert loaded.draft is not None
    assert loaded.draft.weight_bytes == site.plan.draft_weight_bytes
    assert whole.plan.draft_weight_bytes > 0
    prompts = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8]]
    greedy = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    found = []
    for config in (
        config_of(target, algorithm, folder).without_speculation(),
        config_of(target, algorithm, folder, **fields),
    ):
        with running_engine(config) as engine:
            requests = [request(f"{n}", ids, greedy) for n, ids in enumerate(prompts)]
            outputs = drive(engine.core, requests)
            found.append({rid: tokens_of(some) for rid, some in outputs.items()})
    assert found[0] == found[1]


def test_where_a_draft_cannot_be_rounded(target: Path, tmp_path: Path) -> None:
    kind = next(k for k in drafts.DRAFTS.values() if k.algorithm == "EAGLE3")
    folder = kind.write(tmp_path / "d", target)
    config = config_of(target, "EAGLE3", folder, speculative_draft_model_quantization="int8")
    model = load_model_config(target)
    draft = find_draft(config, model)
    assert draft is not None
    assert refuse_quantization(draft, ON_CPU) is None
    refused = refuse_quantization(draft, ON_CUDA)
    assert refused is not None
    assert (refused.field, refused.status) == ("speculative_draft_model_quantization", 501)
    refused = refuse_config(
        config_of(target, "STANDALONE", folder, speculative_draft_model_quantization="int8")
    )
    assert refused is not None
    assert refused.field == "speculative_draft_model_quantization"


def planned(fraction: float = 0.9, **fields: Any) -> MemoryPlan:
    model = load_model_config(QWEN)
    config = EngineConfig(
        model=str(QWEN),
        load_format="dummy",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(EAGLE3),
        **fields,
    )
    draft = find_draft(config, model)
    assert isinstance(draft, DraftSource), draft
    config = config.with_shape(draft.shape)
    placement = ON_CUDA._replace(mem_fraction=fraction)
    plan = plan_memory(config, model, {}, placement, 139 * GIB, draft)
    assert isinstance(plan, MemoryPlan), plan
    return plan


def test_qwen3_8b_eagle3_by_hand() -> None:
    plan = planned()
    layer = (4096 + 2 * 1024) * 8192 + 4096 * 4096 + 3 * 12_288 * 4096 + 3 * 4096
    assert plan.draft_weight_bytes == 2 * (layer + 3 * 4096 * 4096 + 4096 + 32_000 * 4096)
    assert plan.draft_kv_bytes_per_token == 2 * 8 * 128 * 2 == 4096
    assert plan.kv_bytes == (plan.num_pages + 1) * 16 * (147_456 + 4096)
    # Twice, as all of a step: features, embedding and hidden side by side, and what fc gives.
    tokens = 512 + 48 * 4
    assert plan.draft_activation_bytes == 2 * tokens * (3 * 4096 + 3 * 4096) * 2
    assert plan.total_bytes == sum(size for _, size in memory_parts(plan))
    plain = planned(speculative_num_steps=1)
    tree = planned(
        speculative_num_steps=5, speculative_eagle_topk=4, speculative_num_draft_tokens=16
    )
    assert plain.draft_graph_bytes < plan.draft_graph_bytes < tree.draft_graph_bytes
    assert planned(disable_cuda_graph=True).draft_graph_bytes == 0


def test_the_drafts_part_comes_out_of_the_pool() -> None:
    plan = planned(0.8, max_running_requests=1024)
    budget = int((139 * GIB - plan.context_bytes) * 0.8)
    weights = plan.weight_bytes + plan.draft_weight_bytes
    page = 16 * (147_456 + 4096)
    assert 0 <= budget - weights - plan.kv_bytes < page


def test_logits_kept_for_rejection_sampling_are_planned(target: Path, tmp_path: Path) -> None:
    """Of every draft until acceptance, and of EAGLE's slots what the head reads."""
    folder = drafts.write_eagle3(tmp_path / "eagle3", target, draft_vocab=40)
    shape: dict[str, Any] = {"speculative_num_steps": 3, "max_running_requests": 5}
    plain = find_site(config_of(target, "EAGLE3", folder, **shape))
    drawn = find_site(
        config_of(target, "EAGLE3", folder, speculative_use_rejection_sampling=True, **shape)
    )
    least = 5 * 3 * 40 * 4
    assert drawn.plan.draft_activation_bytes - plain.plan.draft_activation_bytes >= least
    assert drawn.plan.state_bytes - plain.plan.state_bytes == 11 * 16 * 4
    source = drawn.draft
    assert source is not None
    size, context = StepSize(64, 20), 100
    parts = [
        draft_parts(site.config, source, site.whole, size, context, ON_CUDA)
        for site in (plain, drawn)
    ]
    kept = 5 * 3 * 40 * 2 + 5 * 40 * 4
    assert parts[1].activation_bytes - parts[0].activation_bytes == kept
    assert parts[1].graph_bytes > parts[0].graph_bytes
