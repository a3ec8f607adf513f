"""The embedded model on native kernels: a token's logits have the same bits in every batch."""

import random
from collections import Counter

import pytest
import torch

from outrider.engine.kv_pool import KVPool
from outrider.engine.models import Model, load_model
from outrider.engine_core.model_config import ModelConfig, load_model_config
from outrider.engine_core.model_path import resolve_model

from .steps import Pages, Query, Sequence, make_batch

LENGTHS = (37, 64, 90)


@pytest.fixture(scope="module")
def pycoder() -> tuple[Model, ModelConfig]:
    folder = resolve_model("pycoder")
    config = load_model_config(folder)
    return load_model(folder, config, torch.float32, torch.device("cpu")), config


def texts(config: ModelConfig) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(config.vocab_size) for _ in range(n)] for n in LENGTHS]


class Run:
    """One pool; steps compare their logits with the expected ones bit for bit."""

    def __init__(self, model: Model, config: ModelConfig, page_size: int, seed: int) -> None:
        count = 400 // page_size + 8
        self.model = model
        self.kv = KVPool(count, page_size, config, model.dtype, torch.device("cpu"))
        self.pages = Pages(count, page_size, seed)

    def step(self, queries: list[Query]) -> list[torch.Tensor]:
        batch = make_batch(queries, self.pages)
        logits = self.model.logits(self.model.forward(batch, self.kv)[batch.logits_index])
        # The model uses its memory again in the next step.
        return list(torch.split(logits.clone(), [len(query.tokens) for query in queries]))


def one_by_one(model: Model, config: ModelConfig) -> list[torch.Tensor]:
    """Each text decoded alone from its first token: [len, V] logits a text."""
    results = []
    for text in texts(config):
        run, sequence, rows = Run(model, config, 16, 1), Sequence(), []
        for token in text:
            rows += run.step([Query(sequence, [token])])
            sequence.length += 1
        results.append(torch.cat(rows))
    return results


def test_bits_are_the_same_in_every_batch(pycoder: tuple[Model, ModelConfig]) -> None:
    model, config = pycoder
    expected = one_by_one(model, config)
    seen: Counter[str] = Counter()
    for seed, page_size in enumerate((1, 7, 16, 64)):
        rng = random.Random(seed)
        run = Run(model, config, page_size, seed)
        sequences = [Sequence() for _ in texts(config)]
        while True:
            work = [
                (i, s)
                for i, s in enumerate(sequences)
                if s.length < LENGTHS[i] and rng.random() < 0.8
            ]
            if all(s.length == n for s, n in zip(sequences, LENGTHS, strict=True)):
                break
            if not work:
                continue
            rng.shuffle(work)
            queries, truths, kept = [], [], []
            for i, sequence in work:
                text, begin = texts(config)[i], sequence.length
                end = min(begin + rng.choice((1, 2, 5, 12, 40)), LENGTHS[i])
                kind = rng.choice(("plain", "chain tree", "tree"))
                seen[kind] += 1
                tokens = text[begin:end]
                parents = list(range(-1, len(tokens) - 1))
                nodes = list(range(len(tokens)))
                if kind == "tree":
                    tokens, parents, nodes = with_siblings(rng, tokens, config.vocab_size)
                queries.append(Query(sequence, tokens, None if kind == "plain" else parents))
                truths.append((nodes, expected[i][begin:end]))
                kept.append((sequence, nodes))
            for (nodes, truth), logits in zip(truths, run.step(queries), strict=True):
                assert torch.equal(logits[nodes], truth)
            for sequence, nodes in kept:
                commit(run, sequence, nodes)
    assert min(seen.values()) >= 10, seen


def with_siblings(
    rng: random.Random, chain: list[int], vocab: int
) -> tuple[list[int], list[int], list[int]]:
    """The chain inside a tree with wrong siblings: tokens, parents and the chain's nodes."""
    tokens, parents, nodes = [chain[0]], [-1], [0]
    for token in chain[1:]:
        for _ in range(rng.choice((0, 0, 1))):
            parents.append(rng.randrange(len(tokens)))
            tokens.append(rng.randrange(vocab))
        parents.append(nodes[-1])
        nodes.append(len(tokens))
        tokens.append(token)
    return tokens, parents, nodes


def commit(run: Run, sequence: Sequence, nodes: list[int]) -> None:
    """Move the accepted nodes' KV to where the next step expects it."""
    slots = [
        sequence.pages[index // run.pages.page_size] * run.pages.page_size
        + index % run.pages.page_size
        for index in range(sequence.length, sequence.length + nodes[-1] + 1)
    ]
    source = torch.tensor([slots[node] for node in nodes])
    run.kv.move(source, torch.tensor(slots[: len(nodes)]))
    sequence.length += len(nodes)


def test_large_prefill_has_the_bits_of_small_chunks(pycoder: tuple[Model, ModelConfig]) -> None:
    model, config = pycoder
    rng = random.Random(9)
    text = [rng.randrange(config.vocab_size) for _ in range(300)]
    whole = Run(model, config, 16, 1).step([Query(Sequence(), text)])[0]
    run, sequence, parts = Run(model, config, 64, 2), Sequence(), []
    for size in (64, 3, 130, 50, 1, 52):
        parts += run.step([Query(sequence, text[sequence.length : sequence.length + size])])
        sequence.length += size
    assert torch.equal(torch.cat(parts), whole)
