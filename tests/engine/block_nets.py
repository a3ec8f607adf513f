"""Random block drafts, here and as equations, and a run of one that both are held to."""

import math
from itertools import chain
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.nn.functional as F
from msgspec.structs import replace

from outrider.engine.forward_batch import ForwardBatch, RowGroup
from outrider.engine.kv_pool import KVPool
from outrider.engine.models.block_net import BlockNet
from outrider.engine.models.block_weights import BlockWeights, ConfidenceWeights, MarkovWeights
from outrider.engine.models.decoder_weights import LayerWeights
from outrider.engine.models.model import TargetModel
from outrider.engine_core.draft_config import BlockConfig, DraftConfig, MarkovConfig, MarkovKind
from outrider.engine_core.model_config import ModelConfig

from ..reference.block_draft import BlockReference, Context, Equations, Tensors
from .tiny import bigram_config

CPU = torch.device("cpu")
VOCAB, HIDDEN, PAGE, MASK = 61, 16, 4, 60
MODEL = replace(
    bigram_config(VOCAB),
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    qk_norm=True,
)


def block_config(
    windows: tuple[int, ...],
    causal: tuple[bool, ...],
    drafts: int = 4,
    first_row: int = 1,
    markov: MarkovKind | None = None,
    layers: tuple[int, ...] = (1, 2, 4),
    model: ModelConfig = MODEL,
    **fields: Any,
) -> DraftConfig:
    model = replace(model, num_hidden_layers=len(windows), sliding_windows=windows)
    return DraftConfig(
        algorithm="DSPARK" if markov else "DFLASH",
        model=model,
        feature_layers=layers,
        feature_size=len(layers) * model.hidden_size,
        draft_vocab_size=model.vocab_size,
        owns_embedding=False,
        owns_head=False,
        block=BlockConfig(
            drafts=drafts,
            first_row=1 if first_row else 0,
            mask_token_id=model.vocab_size - 1,
            causal=causal,
            markov=MarkovConfig(markov, 6) if markov else None,
            **fields,
        ),
    )


BIASED = replace(MODEL, qkv_bias=True, o_bias=True, qk_norm=False)
CONFIGS: dict[str, DraftConfig] = {
    "full": block_config((0, 0), (False, False)),
    "mixed": block_config((0, 6, 0), (False, True, False)),
    "causal": block_config((0, 5), (True, True)),
    "wide windows": block_config((6,), (False,)),
    "narrow windows": block_config((3, 0), (False, False), drafts=5),
    "whole-block windows": block_config((5, 0, 2), (False, False, True), whole_block_window=True),
    "bias": block_config((0,), (False,), layers=(2,), model=BIASED, embed_scale=1.5),
    "vanilla": block_config((0,), (False,), 4, 0, "vanilla", confidence=True),
    "gated": block_config(
        (0, 7), (False, True), 3, 0, "gated", confidence=True, confidence_with_markov=True
    ),
    "rnn": block_config((0,), (False,), 4, 1, "rnn", confidence=True, confidence_with_markov=True),
    "confident": block_config((0,), (False,), confidence=True),
    "one draft": block_config((0,), (False,), 1, 0, "vanilla"),
}


def random_tensor(name: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    if len(shape) == 1:
        return torch.rand(shape, generator=generator) + 0.5
    return torch.randn(shape, generator=generator) / math.sqrt(shape[1])


def random_tensors(config: DraftConfig) -> Tensors:
    """By the names of checkpoints."""
    model, block = config.model, config.block
    assert block is not None
    hidden, inner, vocab = model.hidden_size, model.intermediate_size, model.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.feature_layers) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(model.num_hidden_layers):
        prefix, attention = f"layers.{layer}.", f"layers.{layer}.self_attn."
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        for part, size in (("q", model.q_size), ("k", model.kv_size), ("v", model.kv_size)):
            shapes[f"{attention}{part}_proj.weight"] = (size, hidden)
            if model.qkv_bias:
                shapes[f"{attention}{part}_proj.bias"] = (size,)
        if model.o_bias:
            shapes[f"{attention}o_proj.bias"] = (hidden,)
        if model.qk_norm:
            shapes[f"{attention}q_norm.weight"] = (model.head_dim,)
            shapes[f"{attention}k_norm.weight"] = (model.head_dim,)
        shapes[f"{attention}o_proj.weight"] = (hidden, model.q_size)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
    width = hidden
    if block.markov is not None:
        kind, rank = block.markov.kind, block.markov.rank
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (vocab, rank)
        if kind == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        if kind == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
        width += rank if block.confidence_with_markov else 0
    if block.confidence:
        shapes["confidence_head.proj.weight"] = (1, width)
        shapes["confidence_head.proj.bias"] = (1,)
    tensors = {name: random_tensor(name, *shape) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if name.endswith(".bias"):
            tensor -= 1
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        if name in tensors:
            tensors[name] *= 4  # so that the token before matters
    return tensors


def weights_of(config: DraftConfig, tensors: Tensors) -> BlockWeights:
    def layer(index: int) -> LayerWeights:
        prefix = f"layers.{index}."

        def joined(kind: str, *names: str) -> torch.Tensor | None:
            parts = [tensors.get(f"{prefix}{name}.{kind}") for name in names]
            some = [part for part in parts if part is not None]
            return torch.cat(some) if some else None

        def matrix(*names: str) -> torch.Tensor:
            made = joined("weight", *names)
            assert made is not None
            return made

        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return LayerWeights(
            qkv=matrix(*qkv),
            qkv_bias=joined("bias", *qkv),
            q_norm=joined("weight", "self_attn.q_norm"),
            k_norm=joined("weight", "self_attn.k_norm"),
            o=matrix("self_attn.o_proj"),
            o_bias=joined("bias", "self_attn.o_proj"),
            post_norm=matrix("post_attention_layernorm"),
            gate_up=matrix("mlp.gate_proj", "mlp.up_proj"),
            gate_up_bias=None,
            down=matrix("mlp.down_proj"),
            down_bias=None,
            input_norm=matrix("input_layernorm"),
        )

    weights = BlockWeights(
        tensors["fc.weight"].clone(),
        tensors["hidden_norm.weight"],
        tensors["norm.weight"],
        [layer(index) for index in range(config.model.num_hidden_layers)],
    )
    if "markov_head.markov_w1.weight" in tensors:
        weights.markov = MarkovWeights(
            tensors["markov_head.markov_w1.weight"],
            tensors["markov_head.markov_w2.weight"],
            tensors.get("markov_head.gate_proj.weight"),
            tensors.get("markov_head.gate_proj.bias"),
            tensors.get("markov_head.joint_proj.weight"),
            tensors.get("markov_head.joint_proj.bias"),
        )
    if "confidence_head.proj.weight" in tensors:
        weights.confidence = ConfidenceWeights(
            tensors["confidence_head.proj.weight"][0], tensors["confidence_head.proj.bias"][0]
        )
    return weights


def reference_of(config: DraftConfig, tensors: Tensors, target: TargetModel) -> BlockReference:
    model, block = config.model, config.block
    assert block is not None
    equations = Equations(
        heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        eps=model.rms_norm_eps,
        theta=model.rope.theta,
        windows=list(model.sliding_windows),
        causal=list(block.causal),
        whole_block=block.whole_block_window,
        embed_scale=block.embed_scale,
        first_row=block.first_row,
        markov=block.markov.kind if block.markov else "",
        confidence_with_markov=block.confidence_with_markov,
    )
    return BlockReference(equations, tensors, target.embedding.cpu(), target.output_head.cpu())


class Tables:
    """What a draft shares with its target, which never runs."""

    weight_bytes = 0

    def __init__(self, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> None:
        self.dtype = dtype
        self.embedding = random_tensor("embedding", VOCAB, HIDDEN).to(device, dtype) * 4
        self.output_head = random_tensor("head", VOCAB, HIDDEN).to(device, dtype)

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        raise AssertionError("the target does not run")

    def forward_capture(
        self, batch: ForwardBatch, kv: KVPool, capture_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("the target does not run")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.output_head).float()


class Block(NamedTuple):
    """One sequence's part of a pass: tokens before the block, and the block's rows."""

    before: int
    rows: int


class Passed(NamedTuple):
    """A pass over blocks: of the net, and of the equations; by block hidden states [B, H]."""

    blocks: list[Block]
    hidden: list[torch.Tensor]
    wanted: list[torch.Tensor]
    injected: list[torch.Tensor]
    contexts: list[Context]


def features_of(config: DraftConfig, count: int) -> torch.Tensor:
    """Of ``count`` positions."""
    layers = config.feature_layers
    parts = [random_tensor(f"layer {layer}", 64, HIDDEN)[:count] * 4 for layer in layers]
    return torch.cat(parts, dim=1)


@torch.inference_mode()
def run_blocks(
    net: BlockNet, reference: BlockReference, blocks: list[Block], device: torch.device
) -> Passed:
    """Blocks of several sequences in one pass; their contexts come in chunks behind old blocks."""
    config = net.config
    assert config.block is not None
    longest = max(block.before + config.block.rows for block in blocks)
    width = -(-longest // PAGE)
    order = torch.randperm(len(blocks) * width, generator=torch.Generator().manual_seed(1)) + 1
    table = order.view(len(blocks), width).int()
    kv = KVPool(len(blocks) * width, PAGE, config.model, net.dtype, device)
    kv.data.fill_(100.0)

    def places(row: int, begin: int, end: int) -> torch.Tensor:
        index = torch.arange(begin, end)
        return table[row][index // PAGE].long() * PAGE + index % PAGE

    contexts, injected = [], []
    for row, block in enumerate(blocks):
        features = features_of(config, block.before)
        cut = block.before // 3
        for begin, end in ((0, cut), (cut, block.before)):
            net.inject(
                features[begin:end].to(device, net.dtype),
                torch.arange(begin, end, device=device),
                places(row, begin, end).to(device),
                kv,
            )
        contexts.append(reference.inject(features))
        injected.append(kv.data[:, :, places(row, 0, block.before).to(device)].float().cpu())
    lengths = [block.rows for block in blocks]
    ids = [[(7 * row + 3) % VOCAB, *[MASK] * rows][:rows] for row, rows in enumerate(lengths)]
    cu_q = torch.tensor([0, *lengths]).cumsum(0).int()
    padding = 3
    at = [torch.arange(block.before, block.before + block.rows) for block in blocks]
    zeros = torch.zeros(padding, dtype=torch.int64)
    total = int(cu_q[-1]) + padding
    slots = [places(r, b.before, b.before + b.rows) for r, b in enumerate(blocks)]
    batch = ForwardBatch(
        input_ids=torch.tensor([*chain.from_iterable(ids), *zeros.tolist()]).to(device),
        positions=torch.cat((*at, zeros)).to(device),
        kv_slots=torch.cat((*slots, zeros)).to(device),
        cu_q=cu_q.to(device),
        kv_lens=torch.tensor([sum(b) if b.rows else 0 for b in blocks]).int().to(device),
        page_table=table.to(device),
        tree_bits=torch.zeros(total, dtype=torch.int64, device=device),
        is_tree=torch.zeros(len(blocks), dtype=torch.uint8, device=device),
        logits_index=torch.arange(total, device=device),
        groups=(RowGroup(0, len(blocks), config.block.rows),),
    )
    out = net.forward(batch, kv).float().cpu()
    found = list(torch.split(out[: int(cu_q[-1])], lengths))
    wanted = [
        reference.forward(context, torch.tensor(own)) if own else out.new_empty(0, HIDDEN)
        for context, own in zip(contexts, ids, strict=True)
    ]
    return Passed(blocks, found, wanted, injected, contexts)


def ragged(config: DraftConfig) -> list[Block]:
    """Blocks of all sizes, an empty one among them."""
    assert config.block is not None
    most, least = config.block.rows, config.block.first_row + 1
    return [Block(9, most), Block(1, least), Block(6, 0), Block(14, max(least, most - 1))]


@torch.inference_mode()
def check_choice(
    net: BlockNet, reference: BlockReference, device: torch.device, tolerance: float
) -> None:
    """Drafts and confidence of three blocks of random hidden states."""
    block = net.config.block
    assert block is not None
    hidden = random_tensor("states", 3 * block.rows, HIDDEN).view(3, block.rows, HIDDEN) * 8
    bonus = torch.tensor([5, 0, VOCAB - 1])
    tokens = torch.empty(block.drafts, 3, dtype=torch.int64, device=device)
    picked = hidden[:, block.first_row :].transpose(0, 1).contiguous()
    given = picked.to(device, net.dtype), bonus.to(device), tokens
    net.choose(*given)
    sure = net.confidence(*given)
    assert (sure is None) == (not block.confidence)
    for row in range(3):
        drafts, raw = reference.choose(hidden[row].double(), int(bonus[row]))
        assert tokens[:, row].tolist() == drafts
        if sure is not None:
            assert sure.shape == (3, block.drafts)
            found = sure[row].double().cpu()
            torch.testing.assert_close(
                found, torch.tensor(raw).double(), atol=tolerance, rtol=tolerance
            )
