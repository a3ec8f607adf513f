"""Both draft networks against the equations, in every format, and what a config says of them."""

import json
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.kv_pool import KVPool
from outrider.engine.models.draft_loader import load_draft
from outrider.engine.models.draft_net import DraftNet
from outrider.engine.models.loader import load_model
from outrider.engine.models.model import TargetModel
from outrider.engine_core.draft_config import DraftConfig
from outrider.engine_core.draft_config_json import load_draft_config
from outrider.engine_core.model_config import ModelConfig, load_model_config

from ..reference.eagle_ref import EagleReference, Equations, Memory
from .draft_checkpoints import DRAFTS, DraftKind, write_standalone
from .steps import Pages, Query, Sequence, make_batch, tree_masks
from .tiny import write_checkpoint

CPU = torch.device("cpu")
TOLERANCE = 1e-4
PAGE_SIZE = 5
VOCAB = 67


@dataclass
class Target:
    folder: Path
    config: ModelConfig
    model: TargetModel
    tensors: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = write_checkpoint(tmp_path_factory.mktemp("target"), VOCAB, layers=3)
    config = load_model_config(folder)
    model = load_model(folder, config, torch.float32, CPU)
    return Target(folder, config, model, load_file(folder / "model.safetensors"))


@dataclass
class Draft:
    """A draft here and as equations."""

    config: DraftConfig
    net: DraftNet
    reference: EagleReference


@pytest.fixture(params=[(kind, native) for kind in DRAFTS for native in (True, False)], ids=str)
def draft(request: pytest.FixtureRequest, tmp_path: Path, target: Target) -> Draft:
    name, native = request.param
    kind = DRAFTS[name]
    folder = kind.write(tmp_path / "draft", target.folder)
    config = load_draft_config(folder, target.config, kind.algorithm)
    hot = tuple(random.Random(1).sample(range(VOCAB), kind.hot)) if kind.hot else None
    net = load_draft(folder, config, target.model, torch.float32, CPU, native=native, token_map=hot)
    return Draft(config, net, reference(kind, folder, target, hot))


def reference(
    kind: DraftKind, folder: Path, target: Target, hot: tuple[int, ...] | None
) -> EagleReference:
    tensors = load_file(folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text())
    layer = said.get("transformer_layer_config", said)
    equations = Equations(
        eagle3=kind.algorithm == "EAGLE3",
        heads=layer["num_attention_heads"],
        kv_heads=layer["num_key_value_heads"],
        head_dim=layer["head_dim"],
        eps=layer["rms_norm_eps"],
        theta=layer["rope_theta"],
        **kind.equations,
    )
    embed = target.tensors["model.embed_tokens.weight"]
    if layer["hidden_size"] != target.config.hidden_size:
        embed = tensors["embed_tokens.weight"]
    head = target.tensors["lm_head.weight"]
    if hot is not None:
        head = head[list(hot)]
    for name, tensor in tensors.items():
        if name.endswith("lm_head.weight"):
            head = tensor
    return EagleReference(equations, tensors, embed, head)


class Session:
    """A draft's pool and one dense memory a sequence; every pass is held against the equations."""

    def __init__(self, draft: Draft, seed: int) -> None:
        self.net, self.reference = draft.net, draft.reference
        self.kv = KVPool(60, PAGE_SIZE, draft.config.model, torch.float32, CPU)
        self.kv.data.fill_(torch.nan)
        self.pages = Pages(60, PAGE_SIZE, seed)
        self.memories: dict[int, Memory] = {}

    def forward(self, hidden: torch.Tensor, *queries: Query) -> torch.Tensor:
        """Run a step; the recurrent states. Lengths stay as they are."""
        batch = make_batch(list(queries), self.pages)
        out = self.net.forward(batch, hidden, self.kv)
        recurrent, logits = out.recurrent.clone(), self.net.logits(out.head_input).clone()
        begin = 0
        for query in queries:
            end = begin + len(query.tokens)
            if query.tokens:
                wanted = self._expected(query, batch.positions[begin:end], hidden[begin:end])
                close(recurrent[begin:end], wanted[0])
                close(logits[begin:end], wanted[1])
            begin = end
        return recurrent

    def _expected(
        self, query: Query, positions: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(query.tokens)
        own = torch.ones(count, count, dtype=torch.bool).tril()
        if query.parents is not None:
            masks = torch.tensor(tree_masks(query.parents)[0])
            own = (masks[:, None] >> torch.arange(count)) & 1 == 1
        memory = self.memories.setdefault(id(query.sequence), Memory())
        memory.forget(query.sequence.length)
        return self.reference.forward(memory, torch.tensor(query.tokens), hidden, positions, own)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.double(), theirs, atol=TOLERANCE, rtol=0)


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def features(draft: Draft, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, draft.config.feature_size, generator=generator)


def fused(draft: Draft, count: int, seed: int) -> torch.Tensor:
    given = features(draft, count, seed)
    kept = given.clone()
    hidden = draft.net.fuse(given)
    assert torch.equal(given, kept)
    close(hidden, draft.reference.fuse(given))
    return hidden.clone()


def test_prefill_then_a_chain_of_its_own_states(draft: Draft) -> None:
    session, sequence = Session(draft, 1), Sequence()
    for size in (13, 1, 7):
        hidden = session.forward(fused(draft, size, size), Query(sequence, tokens(size, size)))
        sequence.length += size
    hidden = hidden[-1:]
    for step in range(4):
        hidden = session.forward(hidden, Query(sequence, tokens(1, step)))
        sequence.length += 1


def test_prefill_rows_and_trees_in_one_pass(draft: Draft) -> None:
    session = Session(draft, 2)
    chain, tree, late = Sequence(), Sequence(), Sequence()
    for sequence, size in ((chain, 9), (tree, 16)):
        session.forward(fused(draft, size, size), Query(sequence, tokens(size, size)))
        sequence.length += size
    parents = [-1, -1, 0, 0, 1, 2, 4, 4]
    size = 1 + len(parents) + 6
    session.forward(
        fused(draft, size, 5),
        Query(chain, tokens(1, 3)),
        Query(tree, tokens(len(parents), 4), parents),
        Query(late, tokens(6, 5)),
    )


def test_answers_are_the_inputs_of_the_next_pass(draft: Draft) -> None:
    """Without a copy, as the drafters pass them on."""
    session, sequence = Session(draft, 3), Sequence()
    hidden = fused(draft, 5, 1)
    pool = session.kv.data.clone()
    answers = []
    for copies in (True, False):
        session.kv.data.copy_(pool)
        state = hidden
        for step in range(3):
            batch = make_batch([Query(sequence, tokens(5, step))], session.pages)
            state = draft.net.forward(batch, state, session.kv).recurrent
            state = state.clone() if copies else state
        answers.append(state.clone())
    assert torch.equal(*answers)


def test_weight_bytes_are_those_of_its_own_tensors(draft: Draft, tmp_path: Path) -> None:
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    foreign = (
        ("t2d", "d2t") if draft.config.owns_embedding else ("t2d", "d2t", "embed_tokens.weight")
    )
    stored = sum(t.nbytes for name, t in tensors.items() if not name.endswith(foreign))
    if draft.config.hot_tokens:
        stored += draft.config.draft_vocab_size * draft.config.model.hidden_size * 4
    assert abs(draft.net.weight_bytes - stored) < 0.25 * stored  # norms, biases and padding


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", DRAFTS)
def test_dummy_weights(name: str, native: bool, tmp_path: Path, target: Target) -> None:
    kind = DRAFTS[name]
    folder = kind.write(tmp_path, target.folder)
    config = load_draft_config(folder, target.config, kind.algorithm)
    hot = tuple(range(kind.hot)) or None
    load = partial(load_draft, config=config, target=target.model, dtype=torch.float32, device=CPU)
    net = load(folder, native=native, token_map=hot)
    dummy = load(Path("/nowhere"), load_format="dummy", native=native, token_map=hot)
    assert dummy.weight_bytes == net.weight_bytes
    if config.draft_vocab_size < VOCAB:
        assert dummy.token_ids is not None
        assert len(set(dummy.token_ids.tolist())) == config.draft_vocab_size
        assert 0 <= int(dummy.token_ids.min()) <= int(dummy.token_ids.max()) < VOCAB
    batch = make_batch([Query(Sequence(), [1, 2, 3])], Pages(4, 4, 0))
    kv = KVPool(4, 4, config.model, torch.float32, CPU)
    hidden = dummy.fuse(torch.randn(3, config.feature_size))
    out = dummy.forward(batch, hidden, kv)
    assert dummy.logits(out.head_input).shape == (3, config.draft_vocab_size)
    assert bool(out.recurrent.isfinite().all())


def test_token_ids_are_the_targets(tmp_path: Path, target: Target) -> None:
    folder = DRAFTS["eagle3"].write(tmp_path, target.folder)
    config = load_draft_config(folder, target.config, "EAGLE3")
    net = load_draft(folder, config, target.model, torch.float32, CPU)
    mask = load_file(folder / "model.safetensors")["t2d"]
    assert net.token_ids is not None
    assert net.token_ids.tolist() == mask.nonzero().flatten().tolist()


@pytest.mark.parametrize("native", [True, False])
def test_standalone_is_the_model_itself(tmp_path: Path, target: Target, native: bool) -> None:
    folder = write_standalone(tmp_path, target.folder)
    config = load_draft_config(folder, target.config, "STANDALONE")
    net = load_draft(folder, config, target.model, torch.float32, CPU, native=native)
    batch = make_batch([Query(Sequence(), tokens(9, 1))], Pages(4, 4, 0))
    pools = [KVPool(4, 4, config.model, torch.float32, CPU) for _ in range(2)]
    ours = net.logits(net.forward(batch, None, pools[0]).head_input).clone()
    theirs = target.model.logits(target.model.forward(batch, pools[1]))
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
    assert net.token_ids is None
    assert net.config.feature_size == 0


@pytest.mark.parametrize("native", [True, False])
def test_bfloat16_weights(tmp_path: Path, target: Target, native: bool) -> None:
    """Native kernels keep them as they are; the answers are those of their float32 values."""
    folder = DRAFTS["eagle3"].write(tmp_path, target.folder)
    path = folder / "model.safetensors"
    rounded = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in load_file(path).items()
    }
    config = load_draft_config(folder, target.config, "EAGLE3")
    save_file({n: t.float() if t.is_floating_point() else t for n, t in rounded.items()}, path)
    wide = load_draft(folder, config, target.model, torch.float32, CPU, native=native)
    # Not the same file: the first net may still read it.
    save_file(rounded, folder / "new.safetensors")
    path.unlink()
    (folder / "new.safetensors").rename(path)
    narrow = load_draft(folder, config, target.model, torch.float32, CPU, native=native)
    batch = make_batch([Query(Sequence(), tokens(9, 1))], Pages(4, 4, 0))
    answers = []
    for net in (wide, narrow):
        kv = KVPool(4, 4, config.model, torch.float32, CPU)
        hidden = net.fuse(torch.ones(9, config.feature_size)).clone()
        answers.append(net.logits(net.forward(batch, hidden, kv).head_input).clone())
    assert torch.equal(*answers)
    if native:
        assert narrow.weight_bytes * 1.9 < wide.weight_bytes
