"""How much a block draft drafts: flags against config.json; and where such a draft is found."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from outrider.engine_core import model_path
from outrider.engine_core.block_shape import block_notes, resolve_block
from outrider.engine_core.config import CoreConfig, EngineConfig, refuse_config, resolve_config
from outrider.engine_core.draft_config import SpecShape
from outrider.engine_core.draft_source import DraftSource, find_draft
from outrider.engine_core.draft_window import WindowPool
from outrider.engine_core.drafter_spec import DraftKV
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.refusal import Refused, RefusedError
from outrider.engine_core.speculative_config import apply_speculative_config
from outrider.engine_core.worker import WorkerInfo

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
QWEN = load_model_config(CONFIGS / "qwen3-8b")
DFLASH = CONFIGS / "qwen3-8b-dflash"
B, GAMMA = "speculative_dflash_block_size", "speculative_dspark_block_size"
STEPS, TOPK = "speculative_num_steps", "speculative_eagle_topk"
NODES, PATH = "speculative_num_draft_tokens", "speculative_draft_model_path"
OWN = SpecShape(9, 1, 10)


def config(algorithm: str | None, **fields: Any) -> EngineConfig:
    given = {"model": "m", "load_format": "dummy", **fields}
    return EngineConfig(speculative_algorithm=algorithm, **given)


def shape(algorithm: str, own: SpecShape | None = OWN, **fields: Any) -> SpecShape | Refused:
    asked = config(algorithm, **fields)
    default = 15 if algorithm == "DFLASH" else 7
    return refuse_config(asked) or resolve_block(asked, algorithm, default, own)


def notes(algorithm: str, fields: dict[str, Any], own: SpecShape | None = OWN) -> tuple[str, ...]:
    found = shape(algorithm, own, **fields)
    assert isinstance(found, SpecShape)
    return tuple(block_notes(config(algorithm, **fields), algorithm, own, found))


@pytest.mark.parametrize(
    ("algorithm", "own", "fields", "drafts"),
    [
        ("DFLASH", None, {}, 15),
        ("DFLASH", OWN, {}, 9),
        ("DFLASH", OWN, {B: 8}, 7),
        ("DFLASH", OWN, {NODES: 8}, 7),
        ("DFLASH", OWN, {B: 8, NODES: 8}, 7),
        ("DFLASH", OWN, {B: 64}, 63),
        ("DSPARK", None, {}, 7),
        ("DSPARK", OWN, {}, 9),
        ("DSPARK", OWN, {NODES: 10}, 9),
        ("DSPARK", OWN, {GAMMA: 4}, 4),
        ("DSPARK", OWN, {GAMMA: 4, NODES: 5}, 4),
        ("DSPARK", None, {NODES: 5}, 4),
        ("DSPARK", None, {GAMMA: 1}, 1),
        ("DSPARK", OWN, {STEPS: 3, TOPK: 4}, 9),
    ],
)
def test_precedence(
    algorithm: str, own: SpecShape | None, fields: dict[str, Any], drafts: int
) -> None:
    assert shape(algorithm, own, **fields) == SpecShape(drafts, 1, drafts + 1)


@pytest.mark.parametrize(
    ("algorithm", "fields", "field", "words"),
    [
        ("DFLASH", {B: 8, NODES: 9}, NODES, "9 contradicts --speculative-dflash-block-size 8"),
        ("DFLASH", {B: 0}, B, "must be between 2 and 64, got 0"),
        ("DFLASH", {B: 1}, B, "must be between 2 and 64, got 1"),
        ("DFLASH", {B: 65}, B, "must be between 2 and 64, got 65"),
        ("DFLASH", {NODES: 1}, NODES, "leaves no draft"),
        ("DSPARK", {GAMMA: 0}, GAMMA, "must be between 1 and 63, got 0"),
        ("DSPARK", {GAMMA: 64}, GAMMA, "must be between 1 and 63, got 64"),
        ("DSPARK", {GAMMA: 4, NODES: 4}, NODES, "with which it is 5; leave one out"),
        ("DSPARK", {NODES: 9}, NODES, "9 is not the draft's 9 tokens and the bonus token"),
        ("DFLASH", {GAMMA: 4}, GAMMA, "needs --speculative-algorithm DSPARK"),
        ("DSPARK", {B: 4}, B, "needs --speculative-algorithm DFLASH"),
        ("EAGLE3", {B: 4}, B, "needs --speculative-algorithm DFLASH"),
        ("NGRAM", {GAMMA: 4}, GAMMA, "needs --speculative-algorithm DSPARK"),
        (None, {GAMMA: 4}, GAMMA, "needs --speculative-algorithm"),
        ("DFLASH", {"speculative_token_map": "x"}, "speculative_token_map", "whole head"),
        (
            "DSPARK",
            {"speculative_draft_model_quantization": "int8"},
            "speculative_draft_model_quantization",
            "a DSPARK draft runs as its checkpoint is",
        ),
        ("DFLASH", {"tp_size": 2}, "tp_size", "a draft model runs beside a target of one rank"),
        ("DFLASH", {B: 4, "simulate_accept_length": 4.5}, "simulate_accept_length", "and the 4 t"),
        ("DFLASH", {"simulate_accept_length": 11.0}, "simulate_accept_length", "and the 10 tok"),
    ],
)
def test_what_cannot_be_is_refused(
    algorithm: str | None, fields: dict[str, Any], field: str, words: str
) -> None:
    refused = shape(algorithm, **fields) if algorithm else refuse_config(config(None, **fields))
    assert isinstance(refused, Refused)
    assert (refused.field, words in refused.reason) == (field, True), refused


def test_flags_that_have_no_say_or_contradict_the_draft_are_noted() -> None:
    assert notes("DFLASH", {}) == ()
    assert notes("DSPARK", {}, None) == ()
    assert notes("DFLASH", {STEPS: 9, TOPK: 1}) == ()
    forced = notes("DSPARK", {STEPS: 3, TOPK: 4})
    assert [note.split(":")[0] for note in forced] == [STEPS, TOPK]
    assert "3 becomes 9: DSPARK drafts a block of 9 tokens at once" in forced[0]
    other = notes("DFLASH", {B: 8})
    assert other == (f"{B}: 7 tokens are drafted, the draft was trained for 9",)


def test_resolved_flags_resolve_to_themselves() -> None:
    rng = random.Random(5)
    kept = refusals = 0
    for _ in range(1500):
        algorithm = rng.choice(("DFLASH", "DSPARK"))
        flag = B if algorithm == "DFLASH" else GAMMA
        fields = {
            flag: rng.choice((None, None, 1, 2, 7, 8, 63, 64)),
            NODES: rng.choice((None, None, 2, 8, 9, 10, 64)),
            STEPS: rng.choice((None, 1, 9)),
            TOPK: rng.choice((None, 1, 4)),
        }
        own = rng.choice((None, OWN))
        found = shape(algorithm, own, **fields)
        if isinstance(found, Refused):
            refusals += 1
            continue
        again = config(algorithm, **fields).with_shape(found)
        assert refuse_config(again) is None
        assert resolve_block(again, algorithm, 1, own) == found
        assert all(note.startswith(flag) for note in block_notes(again, algorithm, own, found))
        kept += 1
    assert min(kept, refusals) > 200


def test_the_core_knows_a_block_as_a_chain() -> None:
    asked = config("DSPARK", **{GAMMA: 4}).with_shape(SpecShape(4, 1, 5))
    sizes = WorkerInfo(
        vocab_size=100,
        context_length=512,
        num_pages=64,
        page_size=16,
        max_slots=8,
        eos_ids=(0,),
        weight_bytes=1,
        kv_bytes_per_token=1,
        num_threads=1,
        device="cpu",
        dtype="float32",
    )
    core = resolve_config(asked, sizes)
    assert not isinstance(core, Refused)
    assert (core.draft_width, core.draft_topk, core.draft_reach, core.kv_reach) == (5, 1, 5, 5)
    assert not core.recomputes_last
    assert core.drafter is not None
    assert core.drafter.drafting_takes_time
    assert not core.drafter.tree


def test_speculative_config_counts_drafts() -> None:
    def flags(method: str, count: int) -> object:
        said = {"method": method, "model": "d", "num_speculative_tokens": count}
        return apply_speculative_config(json.dumps(said))

    assert flags("dflash", 7) == {"speculative_algorithm": "DFLASH", PATH: "d", NODES: 8}
    assert flags("dspark", 7) == {"speculative_algorithm": "DSPARK", PATH: "d", GAMMA: 7}


def find(algorithm: str, **fields: Any) -> DraftSource | Refused:
    try:
        found = find_draft(config(algorithm, **fields), QWEN)
    except RefusedError as error:
        return error.refused
    assert found is not None
    return found


def source(algorithm: str, **fields: Any) -> DraftSource:
    found = find(algorithm, **fields)
    assert isinstance(found, DraftSource), found
    return found


def write(folder: Path, raw: dict[str, Any], **fields: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**raw, **fields}))
    return str(folder)


def dspark(folder: Path, **fields: Any) -> str:
    raw = json.loads((DFLASH / "config.json").read_text())
    heads = {"markov_rank": 256, "markov_head_type": "vanilla", "block_size": 5}
    return write(folder, raw, **{"architectures": ["DSparkDraftModel"], **heads, **fields})


def test_a_draft_is_found_with_the_size_that_is_served(tmp_path: Path) -> None:
    own = source("DFLASH", **{PATH: str(DFLASH)})
    assert (own.shape, own.notes) == (SpecShape(15, 1, 16), ())
    other = source("DFLASH", **{PATH: str(DFLASH), NODES: 8, STEPS: 2})
    assert other.shape == SpecShape(7, 1, 8)
    assert other.config.block is not None
    assert (other.config.block.drafts, other.config.block.rows) == (7, 8)
    assert [note.split(":")[0] for note in other.notes] == [STEPS, B]
    path = dspark(tmp_path, num_target_layers=30)
    five = source("DSPARK", **{PATH: path})
    assert five.shape == SpecShape(5, 1, 6)
    assert "num_target_layers: the draft was trained for a target of 30" in five.notes[0]
    assert five.config.block is not None
    assert not five.config.block.confidence  # nothing plans by it
    refused = find("DSPARK", **{PATH: path, NODES: 8})
    assert isinstance(refused, Refused)
    assert refused.field == NODES
    refused = find("DFLASH", **{PATH: path})
    assert isinstance(refused, Refused)
    assert "use --speculative-algorithm DSPARK" in refused.reason


MODE = "speculative_ragged_verify_mode"


def test_a_draft_without_a_confidence_head_has_no_use_for_its_tables(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.write_text("{}")
    path = {PATH: dspark(tmp_path / "d", enable_confidence_head=False)}
    for mode in ("static", "compact", "cap-accept"):
        found = source("DSPARK", **path, **{MODE: mode})
        assert found.config.block is not None
        assert not found.config.block.confidence
    for field, value in (
        ("speculative_dspark_sps_table_path", str(table)),
        ("speculative_dspark_confidence_sts_path", str(table)),
        ("speculative_dspark_align_verify_tokens_to_graph_tier", True),
        ("simulate_survival", 0.5),
    ):
        refused = find("DSPARK", **path, **{MODE: "compact", field: value})
        assert isinstance(refused, Refused)
        assert refused.field == field
        assert "(enable_confidence_head: false) does not; leave it out" in refused.reason
        with_head = find("DSPARK", **{PATH: dspark(tmp_path / "e"), MODE: "compact", field: value})
        assert isinstance(with_head, DraftSource)


def test_a_mask_token_is_looked_up_in_the_targets_tokenizer(tmp_path: Path) -> None:
    raw = json.loads((DFLASH / "config.json").read_text())
    raw["dflash_config"].pop("mask_token_id")
    path = write(tmp_path / "draft", raw)
    refused = find("DFLASH", **{PATH: path})
    assert isinstance(refused, Refused)
    assert (refused.field, "write the id" in refused.reason) == (PATH, True)
    tokens = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 7, "content": "<|MASK|>"}]}
    target = write(tmp_path / "target", json.loads((CONFIGS / "qwen3-8b/config.json").read_text()))
    (tmp_path / "target/tokenizer.json").write_text(json.dumps(tokens))
    for fields in ({"model": target}, {"tokenizer_path": target}):
        found = source("DFLASH", **{PATH: path, **fields})
        assert found.config.block is not None
        assert found.config.block.mask_token_id == 7


def test_a_dspark_draft_that_comes_with_its_target(tmp_path: Path) -> None:
    target = tmp_path / "target"
    raw = json.loads((CONFIGS / "qwen3-8b/config.json").read_text())
    refused = find("DSPARK", model=write(target, raw))
    assert isinstance(refused, Refused)
    assert (refused.field, "no draft of it ships" in refused.reason) == (PATH, True)
    dspark(target / "dspark")
    assert source("DSPARK", model=str(target)).folder == target / "dspark"
    other = dspark(tmp_path / "other")
    assert source("DSPARK", model=str(target), **{PATH: other}).folder == Path(other)
    refused = find("DFLASH", model=str(target))
    assert isinstance(refused, Refused)
    # In the target's own config.json: its tensors are of a layout that is refused by its name.
    write(target, raw, dspark_block_size=5, dspark_markov_rank=8)
    refused = find("DSPARK", model=str(target))
    assert isinstance(refused, Refused)
    assert refused.field == PATH
    assert f"{target / 'config.json'}: architectures: " in refused.reason


def test_the_embedded_targets_block_drafts_are_found_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package" / "engine_core"
    package.mkdir(parents=True)
    monkeypatch.setattr(model_path, "__file__", str(package / "model_path.py"))
    models = package.parent / "models"
    for algorithm in ("DFLASH", "DSPARK"):
        refused = find(algorithm, model="pycoder")
        assert isinstance(refused, Refused)
        assert f"{algorithm} needs one; no draft of it ships with 'pycoder'" in refused.reason
    write(models / "pycoder-11m-dflash", json.loads((DFLASH / "config.json").read_text()))
    dspark(models / "pycoder-11m-dspark")
    for algorithm in ("DFLASH", "DSPARK"):
        folder = models / f"pycoder-11m-{algorithm.lower()}"
        assert source(algorithm, model="pycoder").folder == folder


WINDOW = "speculative_draft_window_size"


@pytest.mark.parametrize(
    ("algorithm", "fields", "says"),
    [
        ("NGRAM", {}, "NGRAM has no KV of its own; leave it out"),
        ("EAGLE3", {}, "EAGLE3 has KV of the whole context; leave it out"),
        (None, {}, "needs --speculative-algorithm"),
        ("DFLASH", {WINDOW: 0}, "must be 1 or more, got 0"),
        ("DFLASH", {WINDOW: 9}, "9 is less than the 10 tokens that a step verifies"),
        ("DSPARK", {WINDOW: 7, GAMMA: 7}, "7 is less than the 8 tokens that a step verifies"),
    ],
)
def test_windows_that_cannot_be_are_refused(
    algorithm: str | None, fields: dict[str, Any], says: str
) -> None:
    given = {WINDOW: 64, **fields}
    refused = refuse_config(config(algorithm, **given))
    if refused is None:
        assert algorithm is not None
        found = shape(algorithm, **given)
        assert isinstance(found, Refused)
        refused = found
    assert refused.field == WINDOW
    assert says in refused.reason


def test_a_window_gives_the_draft_a_pool_of_its_own() -> None:
    info = WorkerInfo(
        vocab_size=9, context_length=500, num_pages=99, page_size=16, max_slots=8, eos_ids=(),
        weight_bytes=1, kv_bytes_per_token=1, num_threads=1, device="cpu", dtype="float32",
    )  # fmt: skip
    for asked, window in ((None, 0), (64, 64), (10_000, 500)):
        given = {WINDOW: asked, STEPS: 9, TOPK: 1, NODES: 10, "max_running_requests": 4}
        found = resolve_config(config("DFLASH", **given), info)
        assert isinstance(found, CoreConfig)
        assert found.drafter is not None
        if asked is None:
            assert (found.window_pool, found.kv_reach) == (None, 10)
            assert found.drafter.draft_kv is DraftKV.SHARED_SLOTS
            continue
        pages = 4 * -(-(window + 15 + 3 * 10) // 16) + 1
        assert found.window_pool == WindowPool(window, pages)
        assert found.drafter.draft_kv is DraftKV.WINDOW_POOL
        assert found.kv_reach == 0
