"""Ranks as threads: together their shares are the whole, and decide what the whole decides."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.models import Share, load_model
from outrider.engine.parallel.cpu_steps import FollowerRunner, share_decisions
from outrider.engine.parallel.sharding import ShardedTensors
from outrider.engine.step import StepRunner
from outrider.engine.weights import RandomTensors, TensorSource, WholeTensors
from outrider.engine_core.model_config import ModelConfig, load_model_config
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.tensor_parallel import shard_model

from ..checkpoints import save
from ..driver import CPU, Driver
from ..test_step import random_tree
from .meeting import LocalRank, Meeting

GREEDY = SamplingParams(temperature=0.0)
PROMPT = list(range(3, 20))
COUNT = 24
# Key/value heads split, and one head on several ranks; biases of every kind; a tied head.
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 2, {}),
    ("llama-mha-bias", 3, {"intermediate_size": 96}),
    ("llama-llama3-rope", 4, {}),
    ("mistral-window", 2, {}),
    ("qwen2", 3, {"intermediate_size": 96}),
    ("qwen3-tied-bias", 4, {}),
]


def share_of(config: ModelConfig, ranks: int) -> ModelConfig:
    share = shard_model(config, ranks)
    assert isinstance(share, ModelConfig), share
    return share


def rank_driver(folder: Path, config: ModelConfig, rank: LocalRank) -> Driver:
    def cut(source: WholeTensors) -> TensorSource:
        return ShardedTensors(source, config, rank.rank, rank.size)

    share = share_of(config, rank.size)
    model = load_model(folder, share, torch.float32, CPU, share=Share(cut, rank.reduce, rank.leads))
    driver = Driver(model, share)
    kind = StepRunner if rank.leads else FollowerRunner
    driver.runner = kind(
        model, driver.kv, driver.state, config.vocab_size, share=share_decisions(rank, check=True)
    )
    return driver


@pytest.mark.parametrize(("kind", "ranks", "fields"), CASES)
def test_ranks_decide_and_keep_what_one_does(
    tmp_path: Path, kind: str, ranks: int, fields: dict[str, Any]
) -> None:
    save(kind, tmp_path, **fields)
    config = load_model_config(tmp_path)
    whole = Driver(load_model(tmp_path, config, torch.float32, CPU, native=False), config)
    expected = [whole.enter(0, PROMPT, GREEDY)]
    while len(expected) < COUNT + 12:
        expected += whole.verify({0: None})[0][0]
    meeting = Meeting(ranks)

    def work(rank: LocalRank) -> tuple[list[int], torch.Tensor, int]:
        driver, rng = rank_driver(tmp_path, config, rank), random.Random(1)
        tokens, steps = [driver.enter(0, PROMPT, GREEDY)], 0
        while len(tokens) < COUNT:
            future = expected[len(tokens) : len(tokens) + 11]
            tokens += driver.verify({0: random_tree(rng, future, rng.randint(1, 11))})[0][0]
            steps += 1
        return tokens, driver.kv_of(0), steps

    results = meeting.run(work)
    tokens, _, steps = results[0]
    assert all(other[0] == tokens for other in results)
    assert tokens[:COUNT] == expected[:COUNT]
    assert 2 <= steps < COUNT - 2, "drafts were accepted and refused"
    # Two sums a layer, one check of the batch, one decision.
    assert meeting.collectives == (steps + 2) * (2 * config.num_hidden_layers + 2)
    plain = Driver(load_model(tmp_path, config, torch.float32, CPU, native=False), config)
    plain.enter(0, PROMPT + tokens[:-1], GREEDY)
    # [layers, 2, tokens, heads, head_dim]; neighbours may hold the same head.
    repeats = max(1, ranks // config.num_key_value_heads)
    shares = [kv for _, kv, _ in results]
    kept = torch.cat(shares[::repeats], dim=3)
    torch.testing.assert_close(kept, plain.kv_of(0), atol=1e-4, rtol=1e-4)
    for number, share in enumerate(shares):
        assert torch.equal(share, shares[number - number % repeats])


def test_random_weights_are_shares_of_one_model(tmp_path: Path) -> None:
    save("qwen3-tied-bias", tmp_path, tie_word_embeddings=False)
    config = load_model_config(tmp_path)
    sources = [RandomTensors(torch.float32) for _ in range(3)]
    whole, *ranks = [
        sources[0],
        *(ShardedTensors(source, config, rank, 2) for rank, source in enumerate(sources[1:])),
    ]
    at = "model.layers.0."
    hidden, q, inner = config.hidden_size, config.q_size, config.intermediate_size

    def take(name: str, shape: tuple[int, ...], cut: int | None) -> list[torch.Tensor]:
        shared = tuple(size // 2 if axis == cut else size for axis, size in enumerate(shape))
        return [whole.take(name, shape), *(rank.take(name, shared) for rank in ranks)]

    for name, shape, cut in (
        ("lm_head.weight", (config.vocab_size, hidden), None),
        (f"{at}self_attn.q_proj.weight", (q, hidden), 0),
        (f"{at}self_attn.q_proj.bias", (q,), 0),
        (f"{at}self_attn.o_proj.weight", (hidden, q), 1),
        (f"{at}mlp.down_proj.weight", (hidden, inner), 1),
        (f"{at}mlp.down_proj.bias", (hidden,), None),
        (f"{at}input_layernorm.weight", (hidden,), None),
    ):
        all_of_it, first, second = take(name, shape, cut)
        if cut is not None:
            assert torch.equal(torch.cat((first, second), cut), all_of_it), name
            assert first.untyped_storage().nbytes() == first.nbytes, "it keeps its part alone"
        else:
            assert torch.equal(first, all_of_it), name
            is_norm = name.endswith("norm.weight")
            assert torch.equal(second, all_of_it) if is_norm else not second.any(), name
    assert not ranks[1].has("lm_head.weight")
    # All parts are cut out of one place.
    assert [len(source._scratch) for source in sources] == [0, *[max(q, inner) * hidden] * 2]


def test_a_rank_with_another_batch_is_noticed(tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = load_model_config(tmp_path)

    def work(rank: LocalRank) -> None:
        driver = rank_driver(tmp_path, config, rank)
        driver.enter(0, PROMPT, GREEDY)
        driver.state.last_tokens[0] += rank.rank
        driver.verify({0: None})

    with pytest.raises(RuntimeError, match="another batch than rank 0"):
        Meeting(2).run(work)
