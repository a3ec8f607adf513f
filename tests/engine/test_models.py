"""Both decoders against transformers on tiny random checkpoints of each family."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.kv_pool import KVPool
from outrider.engine.models import Model, load_model
from outrider.engine_core.model_config import ModelConfig, load_model_config

from .checkpoints import KINDS, save
from .steps import Pages, Query, Sequence, make_batch

CPU = torch.device("cpu")
TOLERANCE = 1e-4


@dataclass
class Loaded:
    """One checkpoint in transformers and here."""

    folder: Path
    reference: Any
    config: ModelConfig
    model: Model

    def expected(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.reference(torch.tensor([tokens])).logits[0]
        return logits


@pytest.fixture(scope="module", params=[(k, n) for k in KINDS for n in (True, False)], ids=str)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    kind, native = request.param
    folder = tmp_path_factory.mktemp(kind)
    reference = save(kind, folder, shard_size="60KB")
    config = load_model_config(folder)
    return Loaded(
        folder,
        reference,
        config,
        load_model(folder, config, torch.float32, CPU, native=native),
    )


class Session:
    """A pool and its pages; every step returns the logits of all its tokens."""

    def __init__(self, model: Model, config: ModelConfig, page_size: int, seed: int) -> None:
        count = 600 // page_size + 4
        self.model = model
        self.kv = KVPool(count, page_size, config, model.dtype, CPU)
        self.kv.data.fill_(torch.nan)
        self.pages = Pages(count, page_size, seed)

    def step(self, *queries: Query) -> torch.Tensor:
        batch = make_batch(list(queries), self.pages)
        hidden = self.model.forward(batch, self.kv)[batch.logits_index]
        return self.model.logits(hidden).clone()  # its memory is used again

    def extend(self, sequence: Sequence, tokens: list[int]) -> torch.Tensor:
        logits = self.step(Query(sequence, tokens))
        sequence.length += len(tokens)
        return logits


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_chunks_then_decode(loaded: Loaded, page_size: int) -> None:
    rng = random.Random(page_size)
    tokens = [rng.randrange(loaded.config.vocab_size) for _ in range(90)]
    session, sequence = Session(loaded.model, loaded.config, page_size, 1), Sequence()
    parts = []
    for size in (33, 1, 20, 1, 1, 34):
        parts.append(session.extend(sequence, tokens[sequence.length : sequence.length + size]))
    close(torch.cat(parts), loaded.expected(tokens))


def test_ragged_batch_with_trees(loaded: Loaded) -> None:
    """Prefill, decode and tree rows in one step; every branch equals its own full forward."""
    rng = random.Random(5)
    vocab = loaded.config.vocab_size
    session = Session(loaded.model, loaded.config, 4, 2)
    texts = [[rng.randrange(vocab) for _ in range(n)] for n in (13, 40, 7)]
    sequences = [Sequence() for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        session.extend(sequence, text)
    parents = [-1, 0, 0, 1, 1, 2, 5, 3, 0, 6, 6, 4]
    nodes = [rng.randrange(vocab) for _ in parents]
    new = [[rng.randrange(vocab) for _ in range(n)] for n in (1, 0, 9)]
    logits = session.step(
        Query(sequences[0], new[0]),
        Query(sequences[1], nodes, parents),
        Query(sequences[2], new[2]),
    )
    close(logits[:1], loaded.expected(texts[0] + new[0])[-1:])
    close(logits[13:], loaded.expected(texts[2] + new[2])[-9:])
    for node in range(len(parents)):
        branch: list[int] = []
        at = node
        while at >= 0:
            branch.insert(0, nodes[at])
            at = parents[at]
        close(logits[1 + node], loaded.expected(texts[1] + branch)[-1])


def test_captured_streams_match_transformers(loaded: Loaded) -> None:
    tokens = list(range(11))
    session, sequence = Session(loaded.model, loaded.config, 4, 3), Sequence()
    batch = make_batch([Query(sequence, tokens)], session.pages)
    hidden, captured = loaded.model.forward_capture(batch, session.kv, (0, 2))
    hidden = hidden.clone()
    with torch.inference_mode():
        output = loaded.reference(torch.tensor([tokens]), output_hidden_states=True)
    close(captured, torch.cat([output.hidden_states[0][0], output.hidden_states[2][0]], dim=1))
    close(hidden, output.hidden_states[3][0])
    assert torch.equal(hidden, loaded.model.forward(batch, session.kv))
    _, last = loaded.model.forward_capture(batch, session.kv, (3,))
    assert last.shape == hidden.shape
    _, none = loaded.model.forward_capture(batch, session.kv, ())
    assert none.shape == (len(tokens), 0)


def test_weight_bytes_and_dtype(loaded: Loaded) -> None:
    stored = sum(parameter.nbytes for parameter in loaded.reference.parameters())
    assert stored <= loaded.model.weight_bytes + 4 * 1024
    assert loaded.model.weight_bytes < 1.3 * stored
    assert loaded.model.dtype == torch.float32


def test_bfloat16_checkpoint_is_widened_exactly(tmp_path: Path) -> None:
    save("qwen3", tmp_path).bfloat16().save_pretrained(tmp_path)
    reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    config = load_model_config(tmp_path)
    model = load_model(tmp_path, config, torch.float32, CPU)
    tokens = list(range(40, 70))
    session = Session(model, config, 16, 0)
    logits = session.extend(Sequence(), tokens)
    with torch.inference_mode():
        close(logits, reference(torch.tensor([tokens])).logits[0])
    assert config.torch_dtype == "bfloat16"
    assert model.weight_bytes * 1.9 < sum(p.nbytes for p in reference.parameters())


def test_dummy_weights_need_no_checkpoint(tmp_path: Path) -> None:
    save("qwen2", tmp_path)
    config = load_model_config(tmp_path)
    for native in (True, False):
        models = [
            load_model(Path("/nowhere"), config, torch.float32, CPU, "dummy", native)
            for _ in range(2)
        ]
        outs = [Session(m, config, 4, 0).extend(Sequence(), [1, 2, 3]) for m in models]
        assert torch.equal(outs[0], outs[1])
        assert float(outs[0].std()) > 0


def test_tokens_outside_the_model_are_refused(tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = load_model_config(tmp_path)
    session = Session(load_model(tmp_path, config, torch.float32, CPU), config, 4, 0)
    with pytest.raises(ValueError, match="input_ids"):
        session.extend(Sequence(), [config.vocab_size])
    with pytest.raises(ValueError, match="context of 512"):
        session.extend(Sequence(), [1] * 513)
