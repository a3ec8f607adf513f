"""Whole steps on the device against the CPU runner: tokens, counts, KV, features."""

import random
from pathlib import Path

import pytest
import torch

from outrider.engine.gpu.tiers import Tier
from outrider.engine.models import Model, load_model
from outrider.engine.weights import Checkpoint
from outrider.engine_core.ids import i32
from outrider.engine_core.model_config import ModelConfig, load_model_config
from outrider.engine_core.sampling_params import SamplingParams

from ..driver import CPU, Drafts, Driver, chain
from ..test_step import GREEDY, PROMPT, SEEDED, VOCAB, random_tree
from ..tiny import write_checkpoint
from .gpu_driver import DEVICE, GpuDriver

COUNT = 15 if DEVICE.type == "cuda" else 3
EDITED = SamplingParams(
    temperature=0.9,
    top_k=12,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias={3: 2.0, 5: -4.0},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", VOCAB)


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[Model, ModelConfig]:
    config = load_model_config(folder)
    return load_model(folder, config, torch.float32, CPU), config


def gpu(folder: Path, page_size: int = 4, graphs: bool = True) -> GpuDriver:
    return GpuDriver(
        Checkpoint(folder), load_model_config(folder), page_size=page_size, graphs=graphs
    )


def plain(
    reference: tuple[Model, ModelConfig], params: SamplingParams, count: int, seed: int = 77
) -> list[int]:
    driver = Driver(*reference)
    tokens = [driver.enter(0, PROMPT, params, seed)]
    while len(tokens) < count:
        tokens += driver.verify({0: None})[0][0]
    return tokens


@pytest.mark.parametrize(
    ("params", "page_size"),
    [(GREEDY, 1), (GREEDY, 16), (SEEDED, 4), (EDITED, 4)],
    ids=["greedy-1", "greedy-16", "seeded", "edited"],
)
def test_random_trees_give_the_tokens_and_kv_of_the_cpu(
    folder: Path, reference: tuple[Model, ModelConfig], params: SamplingParams, page_size: int
) -> None:
    count = 100 if DEVICE.type == "cuda" else 6
    expected = plain(reference, params, count + 12)
    rng = random.Random(page_size)
    driver = gpu(folder, page_size)
    tokens = [driver.enter(0, PROMPT, params, 77)]
    while len(tokens) < count:
        drafts = random_tree(rng, expected[len(tokens) : len(tokens) + 11], rng.randint(1, 11))
        tokens += driver.verify({0: drafts})[0][0]
    assert tokens[:count] == expected[:count]
    other = Driver(*reference, page_size=page_size)
    other.enter(0, PROMPT + tokens[:-1], GREEDY)
    torch.testing.assert_close(driver.kv_of(0), other.kv_of(0), atol=1e-4, rtol=1e-4)


def test_plain_rows_and_chains_of_many_requests(
    folder: Path, reference: tuple[Model, ModelConfig]
) -> None:
    expected = [plain(reference, GREEDY, 20), plain(reference, SEEDED, 20)]
    driver = gpu(folder)
    params = [GREEDY, SEEDED, GREEDY]
    got = [[driver.enter(slot, PROMPT, params[slot], 77)] for slot in range(3)]
    while min(len(tokens) for tokens in got) < COUNT:
        rows: dict[int, Drafts | None] = {}
        for slot in (2, 0, 1):
            future = expected[slot % 2][len(got[slot]) :][:3]
            if len(future) == 3:
                rows[slot] = chain([*future[:2], (future[2] + 1) % VOCAB]) if slot else None
        emitted, result = driver.verify(rows)
        for slot, tokens in emitted.items():
            assert len(tokens) == (3 if rows[slot] else 1)
            got[slot] += tokens
        assert result.busy_ns > 0
    for slot in range(3):
        assert got[slot][:COUNT] == expected[slot % 2][:COUNT]


def test_prefill_chunks_and_verify_rows_share_a_step(
    folder: Path, reference: tuple[Model, ModelConfig]
) -> None:
    expected = plain(reference, GREEDY, 12)
    driver = gpu(folder)
    tokens = [driver.enter(0, PROMPT, GREEDY)]
    result = driver.verify_beside_prompt({0: chain(expected[1:4])}, 1, PROMPT, GREEDY)
    assert i32(result.accept_lens).tolist() == [4, 1]
    assert i32(result.tokens).tolist() == [*expected[1:5], tokens[0]]
    assert i32(result.depths).tolist() == [3, 0]


def test_logprobs_are_the_cpus(folder: Path, reference: tuple[Model, ModelConfig]) -> None:
    params = SamplingParams(temperature=0, logprobs=3)
    expected = plain(reference, GREEDY, 12)
    results = []
    for driver in (Driver(*reference), gpu(folder)):
        driver.enter(0, PROMPT, params)
        _, result = driver.verify({0: chain(expected[1:4])})
        results.append(result)
    left, right = (result.logprobs[0].tokens for result in results)
    assert len(left) == len(right) == 4
    for a, b in zip(left, right, strict=True):
        assert a.token == b.token
        assert a.top_ids == b.top_ids
        assert a.value == pytest.approx(b.value, abs=1e-4)


def test_unusable_logits_are_an_error_of_their_row(folder: Path) -> None:
    driver = gpu(folder)
    for slot in (0, 1):
        driver.enter(slot, PROMPT, GREEDY)
    slot_of = driver.device_state.page_table[1, 0] * driver.kv.page_size
    driver.kv.data[:, :, slot_of] = torch.nan
    _, result = driver.verify({0: None, 1: None})
    assert [error.row for error in result.errors] == [1]
    assert i32(result.accept_lens).tolist() == [1, 0]


def test_broken_drafts_are_named(folder: Path) -> None:
    driver = gpu(folder)
    driver.enter(0, PROMPT, GREEDY)
    with pytest.raises(ValueError, match="parents precede"):
        driver.verify({0: Drafts([1], [1])})


@pytest.mark.gpu
def test_graphs_replay_and_agree_with_single_launches(folder: Path) -> None:
    assert DEVICE.type == "cuda"
    results = []
    for graphs in (False, True):
        driver, rng = gpu(folder, graphs=graphs), random.Random(5)
        tokens = [[driver.enter(slot, PROMPT[slot:], GREEDY)] for slot in range(4)]
        for _ in range(20):
            rows = {slot: random_tree(rng, [], rng.randint(0, 11)) for slot in range(4)}
            for slot, emitted in driver.verify(rows)[0].items():
                tokens[slot] += emitted
        assert driver.gpu_runner.replays == (20 if graphs else 0)
        results.append(tokens)
    assert results[0] == results[1]


def test_a_page_is_copied_before_its_end_is_computed_again(folder: Path) -> None:
    driver, alone = gpu(folder), gpu(folder)
    driver.enter(0, PROMPT, GREEDY)
    other = [*PROMPT[:4], 2, 31]
    tokens = [driver.enter_copying(1, 0, 4, other, SEEDED)]
    expected = [alone.enter(1, other, SEEDED)]
    before = driver.kv_of(0).clone()
    for _ in range(2):
        tokens += driver.verify({1: None})[0][1]
        expected += alone.verify({1: None})[0][1]
    assert tokens == expected
    torch.testing.assert_close(driver.kv_of(1), alone.kv_of(1), rtol=1e-5, atol=1e-5)
    assert torch.equal(driver.kv_of(0), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precisions_sample(folder: Path, dtype: torch.dtype) -> None:
    config = load_model_config(folder)
    driver = GpuDriver(Checkpoint(folder), config, dtype=dtype)
    tokens = [driver.enter(0, PROMPT, SEEDED, 77)]
    tokens += driver.verify({0: None})[0][0]
    assert all(0 <= token < VOCAB for token in tokens)


@pytest.mark.gpu
def test_timing_a_tier_leaves_the_state_alone(folder: Path) -> None:
    driver = gpu(folder)
    driver.enter(0, PROMPT, GREEDY)
    first = driver.verify({0: None})[0][0]
    lens = driver.device_state.seq_lens.clone()
    assert driver.gpu_runner.seconds_of(1, 2) > 0
    plain = driver.gpu_runner.plain_seconds([1, 4, 40], 2)
    drafting = driver.gpu_runner.drafting_seconds([1, 4], 2)
    assert min(plain + drafting) > 0
    assert torch.equal(driver.device_state.seq_lens, lens)
    assert len(first) == 1


def test_drafting_is_what_full_steps_take_above_those_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device where rows take 1, tokens 0.1, and drafting 7 and 2 a row."""
    runner = gpu(folder).gpu_runner

    def seconds(tier: Tier) -> float:
        drafting = 7 + 2 * tier.rows if tier.width > 1 else 0
        return 1 + 0.1 * tier.tokens + drafting

    monkeypatch.setattr(runner, "_timed_run", seconds)
    monkeypatch.setattr(runner, "_timed_replay", seconds)
    rows, width = runner._tiers.max_rows, runner._tiers.width
    assert runner.plain_seconds([1, rows], 0) == pytest.approx([1.1, 1 + 0.1 * rows])
    drafting = runner.drafting_seconds([1, 2, rows], 0)
    wide = [width, 2 * width, rows * width]
    for count, tokens, plain, extra in zip(
        (1, 2, rows), wide, runner.plain_seconds(wide, 0), drafting, strict=True
    ):
        assert plain + extra == pytest.approx(8 + 2 * count + 0.1 * tokens)
    assert drafting[0] == pytest.approx(9) or width > rows


@pytest.mark.gpu
def test_only_edits_are_captured_after_the_start(folder: Path) -> None:
    driver = gpu(folder)
    assert driver.graphs is not None
    driver.gpu_runner.capture()
    captured = 2 * len(driver.tiers.all())
    assert len(driver.graphs) == captured
    for params, more in ((GREEDY, 0), (SEEDED, 0), (EDITED, 2), (EDITED, 2)):
        driver.enter(0, PROMPT, params, 77)
        driver.verify({0: None})
        driver.verify({0: chain([3, 4])})
        assert len(driver.graphs) == captured + more
    assert driver.gpu_runner.replays == 8
