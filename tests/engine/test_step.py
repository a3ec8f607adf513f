"""Verify steps of a real tiny model: trees, chains and plain decoding are the same thing."""

import random

import pytest
import torch

from outrider.engine.models import Model
from outrider.engine_core.ids import i32
from outrider.engine_core.model_config import ModelConfig
from outrider.engine_core.sampling_params import SamplingParams

from .driver import Drafts, Driver, chain
from .tiny import load_tiny, write_checkpoint

VOCAB = 40
PROMPT = [3, 9, 1, 22, 17, 9, 30]
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, ModelConfig]:
    return load_tiny(write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", VOCAB))


def plain(tiny: tuple[Model, ModelConfig], params: SamplingParams, count: int) -> list[int]:
    driver = Driver(*tiny)
    tokens = [driver.enter(0, PROMPT, params, 77)]
    while len(tokens) < count:
        tokens += driver.verify({0: None})[0][0]
    return tokens


def random_tree(rng: random.Random, future: list[int], nodes: int) -> Drafts:
    """Nodes in random order around the true continuation, which often is not the first child."""
    tokens: list[int] = []
    parents: list[int] = []
    depth, truth = [0], [True]
    for _ in range(nodes):
        parent = rng.choice([0, len(tokens), rng.randint(0, len(tokens))])
        right = truth[parent] and depth[parent] < len(future) and rng.random() < 0.6
        token = future[depth[parent]] if right else rng.randrange(VOCAB)
        tokens.append(token)
        parents.append(parent)
        depth.append(depth[parent] + 1)
        truth.append(
            truth[parent] and depth[parent] < len(future) and token == future[depth[parent]]
        )
    return Drafts(tokens, parents)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("page_size", [2, 4])
def test_a_page_is_copied_before_its_end_is_computed_again(
    tiny: tuple[Model, ModelConfig], params: SamplingParams, page_size: int
) -> None:
    driver, alone = Driver(*tiny, page_size=page_size), Driver(*tiny, page_size=page_size)
    driver.enter(0, [*PROMPT, 5, 8], GREEDY)
    other = [*PROMPT[:4], 2, 31, 7]
    tokens = [driver.enter_copying(1, 0, 4, other, params)]
    expected = [alone.enter(1, other, params)]
    before = driver.kv_of(0).clone()
    for _ in range(8):
        tokens += driver.verify({1: None})[0][1]
        expected += alone.verify({1: None})[0][1]
    assert tokens == expected
    assert torch.equal(driver.kv_of(1), alone.kv_of(1))
    assert torch.equal(driver.kv_of(0), before)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_trees_give_the_plain_tokens(
    tiny: tuple[Model, ModelConfig], params: SamplingParams, page_size: int
) -> None:
    expected = plain(tiny, params, 120)
    rng = random.Random(page_size)
    driver = Driver(*tiny, page_size=page_size)
    tokens = [driver.enter(0, PROMPT, params, 77)]
    scattered = 0
    while len(tokens) < 100:
        drafts = random_tree(rng, expected[len(tokens) : len(tokens) + 11], rng.randint(1, 11))
        emitted = driver.verify({0: drafts})[0][0]
        buffers = driver.runner._buffers
        path = buffers.accept_idx[: len(emitted)].tolist()
        scattered += path != list(range(len(path)))
        tokens += emitted
        reference = Driver(*tiny, page_size=page_size)
        if len(tokens) % 5 == 0:
            reference.enter(0, PROMPT + tokens[:-1], GREEDY)
            torch.testing.assert_close(driver.kv_of(0), reference.kv_of(0), atol=1e-4, rtol=1e-4)
    assert tokens[:100] == expected[:100]
    assert scattered >= 10


def test_a_chain_beside_a_tree_is_bitwise_the_chain_alone(
    tiny: tuple[Model, ModelConfig],
) -> None:
    """Another row's branching sends a chain through the tree code: nothing may change."""
    results = []
    for other in (chain([5, 6, 7, 8]), Drafts([5, 6, 7, 8], [0, 0, 2, 2])):
        driver = Driver(*tiny)
        tokens = [driver.enter(slot, PROMPT[slot:], GREEDY) for slot in (0, 1)]
        history = [tokens[0]]
        for _ in range(6):
            follow = plain(tiny, GREEDY, len(history) + 4)[len(history) :]
            drafts = chain([*follow[:2], (follow[2] + 1) % VOCAB, 0])
            emitted, result = driver.verify({0: drafts, 1: other})
            history += emitted[0]
            assert i32(result.depths).tolist()[0] == 4
        assert not driver.runner._buffers.is_tree[0]
        results.append((history, driver.kv_of(0), driver.state.seq_lens[0]))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


def test_prefill_chunks_and_verify_rows_share_a_step(tiny: tuple[Model, ModelConfig]) -> None:
    expected = plain(tiny, GREEDY, 12)
    driver = Driver(*tiny)
    tokens = [driver.enter(0, PROMPT, GREEDY)]
    result = driver.verify_beside_prompt({0: chain(expected[1:4])}, 1, PROMPT, GREEDY)
    assert i32(result.accept_lens).tolist() == [4, 1]
    assert i32(result.proposed).tolist() == [3, 0]
    assert i32(result.tokens).tolist() == [*expected[1:5], tokens[0]]
    assert result.batch_tokens == 4 + len(PROMPT)


def test_seeded_tokens_do_not_depend_on_batch_or_drafts(tiny: tuple[Model, ModelConfig]) -> None:
    expected = plain(tiny, SEEDED, 60)
    rng = random.Random(2)
    driver = Driver(*tiny)
    mine = [driver.enter(5, PROMPT, SEEDED, 77)]
    for slot in range(5):
        driver.enter(slot, [slot + 1, 2], [GREEDY, SEEDED][slot % 2], slot)
    while len(mine) < 50:
        rows: dict[int, Drafts | None] = {
            slot: random_tree(rng, [], rng.randint(1, 6)) for slot in rng.sample(range(5), 3)
        }
        rows[5] = random_tree(rng, expected[len(mine) : len(mine) + 6], rng.randint(1, 9))
        mine += driver.verify(rows)[0][5]
    assert mine[:50] == expected[:50]


def test_missing_pages_and_broken_drafts_are_named(tiny: tuple[Model, ModelConfig]) -> None:
    driver = Driver(*tiny, page_size=4, max_tokens=8)
    driver.enter(0, PROMPT, GREEDY)
    with pytest.raises(ValueError, match="row 0"):
        driver.verify({0: chain([1, 2, 3])})
    with pytest.raises(ValueError, match="parents precede"):
        driver.verify({0: Drafts([1], [1])})
