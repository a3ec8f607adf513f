"""Block drafts in training against one block at a time; their heads, weights, masks and export."""

import json
import math
import warnings
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from outrider.engine.training import block_attention
from outrider.engine.training.accept_length import AgreementCounts, whole_drafts
from outrider.engine.training.batches import Batch, RowSource
from outrider.engine.training.block_attention import DENSE, disagreement
from outrider.engine.training.block_layout import draw_anchors, every_anchor
from outrider.engine.training.block_loss import Drafted, Objective, block_loss
from outrider.engine.training.block_recipe import BlockRecipe
from outrider.engine.training.block_setup import mask_token, spread
from outrider.engine.training.block_weighting import decay_weights, dpace_weights
from outrider.engine.training.calibration import calibrate, held_out_errors
from outrider.engine.training.dense import DenseTarget
from outrider.engine.training.export import CONFIG, write_draft
from outrider.engine.training.markov_head import MarkovHead
from outrider.engine.training.recipe import Setting
from outrider.engine.training.registry import default_recipes
from outrider.engine.weights import Checkpoint
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.refusal import RefusedError
from outrider.engine_core.train_spec import TrainSpec

from ...reference import block_training_ref as ref
from ..tiny import write_checkpoint

CPU = torch.device("cpu")
VOCAB, LENGTH, MASK = 61, 20, 7
CASES: dict[str, dict[str, object]] = {
    "DFLASH": {"block_size": 4},
    "DFLASH-decay": {"block_weighting": "decay", "hard_weight": 0.0, "feature_layers": (1, 2, 4)},
    "DFLASH-window": {"block_size": 5, "sliding_window": 6, "sliding_layers": (1,)},
    "DFLASH-lk": {"block_size": 4, "loss": "lk", "num_attention_heads": 4},
    "DSPARK": {"block_size": 3, "confidence_greedy": 0.0},
    "DSPARK-gated": {"block_size": 4, "markov_head": "gated", "confidence_greedy": 0.3},
    "DSPARK-rnn": {"block_size": 4, "markov_head": "rnn", "hard_weight": 1.0, "sliding_window": 3},
    "DSPARK-dpace": {"block_size": 3, "block_weighting": "dpace", "markov_rank": 5},
}


class Made(NamedTuple):
    """A recipe with random parameters, its target and what it exports, in float64."""

    recipe: BlockRecipe
    spec: TrainSpec
    target: DenseTarget
    weights: ref.Named
    shape: ref.Shape


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), VOCAB, layers=5, scale=0.3)


def spec_of(folder: Path, name: str, **fields: object) -> TrainSpec:
    made = TrainSpec(
        algorithm=name.partition("-")[0],
        model=str(folder),
        data=("d",),
        output="o",
        steps=1,
        num_hidden_layers=2,
        mask_token_id=MASK,
        anchors=5,
    )
    return msgspec.structs.replace(made, **{**CASES.get(name, {}), **fields})


def make(folder: Path, name: str, **fields: object) -> Made:
    spec, config = spec_of(folder, name, **fields), load_model_config(folder)
    target = DenseTarget(Checkpoint(folder), config, torch.float32, CPU)
    setting = Setting(spec, target, np.ones(VOCAB, dtype=np.int64), text(), False)
    recipe = default_recipes().make(setting)
    assert isinstance(recipe, BlockRecipe)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for leaf in recipe.parameters.values():
            leaf += 0.3 * torch.randn(leaf.shape, generator=generator)
    weights = {n: t.double() for n, t in recipe.export(torch.float32).tensors.items()}
    model = recipe._model
    shape = ref.Shape(
        model.num_attention_heads,
        model.num_key_value_heads,
        model.head_dim,
        model.rope.theta,
        model.rms_norm_eps,
        model.sliding_windows,
    )
    return Made(recipe, spec, target, weights, shape)


def text() -> torch.Tensor:
    return torch.randint(1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(9))


def own_batch(made: Made) -> Batch:
    """Text with the target's own greedy text in it."""
    ids = text()
    ids[:, 6:] = made.target.generate(ids[:, :6], LENGTH - 6)
    own = torch.arange(LENGTH).expand(ids.shape) >= 6
    return Batch(ids, own)


def hidden_at(made: Made, ids: torch.Tensor, row: int, anchor: int) -> torch.Tensor:
    """[K, H] by the reference: the rows that propose."""
    layers = made.spec.feature_layers or tuple(i + 1 for i in spread(5, 2))
    streams = made.target.forward(ids, layers).streams
    features = torch.cat(streams, dim=-1)[row, :anchor].double()
    first = made.recipe.first_row
    rows = made.recipe._drafts + first
    block = [int(ids[row, anchor])] + [MASK] * (rows - 1)
    entering = made.target.embedding[block].double()
    return ref.block_hidden(made.weights, made.shape, features, entering)[first:]


def distributions(made: Made, ids: torch.Tensor) -> torch.Tensor:
    return F.linear(made.target.forward(ids).hidden, made.target.lm_head).double()


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_the_one_of_the_equations(name: str, folder: Path) -> None:
    made = make(folder, name)
    spec, drafts = made.spec, made.recipe._drafts
    batch = own_batch(made)
    batch.own[0] = False  # a row of text alone
    batch.ids[0] = text()[0]
    torch.manual_seed(3)
    blocks = draw_anchors(batch.own, spec.anchors, drafts)
    torch.manual_seed(3)
    found = made.recipe.step(batch)
    logits = distributions(made, batch.ids)
    dspark, dpace = spec.algorithm == "DSPARK", name in ("DFLASH", "DFLASH-lk", "DFLASH-window")
    dpace = dpace or name == "DSPARK-dpace"
    total = norm = doubt = doubt_norm = 0.0
    agrees: dict[tuple[int, int], list[bool]] = {}
    for row in range(2):
        for anchor, valid in zip(*(part[row].tolist() for part in blocks), strict=True):
            if not valid:
                continue
            hidden = hidden_at(made, batch.ids, row, anchor)
            tokens = batch.ids[row].tolist()
            before, labels = tokens[anchor : anchor + drafts], tokens[anchor + 1 :][:drafts]
            z = hidden @ made.target.lm_head.double().T
            if dspark:
                z = z + ref.markov_biases(made.weights, spec.markov_head, hidden, before)
            p = logits[row, anchor : anchor + drafts].softmax(-1)
            q, top = z.softmax(-1), p.argmax(-1)
            goal = (1 - spec.hard_weight) * p + spec.hard_weight * F.one_hot(top, VOCAB)
            ce = -(goal * q.log()).sum(-1)
            tv = (goal - q).abs().sum(-1) / 2
            if spec.loss == "lk":
                share = torch.exp(-3 * (1 - tv))
                one = share * ce + (1 - share) * tv
            else:
                one = spec.ce_weight * ce + spec.l1_weight * 2 * tv if dspark else ce
            own = batch.own[row, anchor + 1 : anchor + 1 + drafts].tolist()
            left = ref.alive(labels, top.tolist(), spec.survival_floor)
            base = [(1.0 if mine else 0.3) for mine in own]
            by_place = ref.decay(drafts, spec.decay_gamma)
            weight = [b * a for b, a in zip(base, left, strict=True)]
            if dpace:
                chances = [float(q[i, top[i]]) for i in range(drafts)]
                scales = ref.dpace(chances, [True] * drafts, spec.dpace_alpha)
                norm += base[0]
            else:
                scales = by_place
                norm += sum(w * s for w, s in zip(weight, by_place, strict=True))
            agree = q.argmax(-1) == top
            agrees[row, anchor] = agree.tolist()
            for i in range(drafts):
                total += float(one[i]) * weight[i] * scales[i]
            if dspark:
                score = ref.confidence(made.weights, hidden, before)
                sampled = 1 - (p - q).abs().sum(-1) / 2
                greedy = spec.confidence_greedy
                wanted = (1 - greedy) * sampled + greedy * agree
                bce = F.binary_cross_entropy_with_logits(score, wanted, reduction="none")
                for i in range(drafts):
                    doubt += float(bce[i]) * weight[i] * by_place[i]
                    doubt_norm += weight[i] * by_place[i]
    expected = total / norm + (doubt / doubt_norm if dspark else 0.0)
    assert float(found.loss.detach()) == pytest.approx(expected, rel=1e-4)
    assert found.drafted is not None
    places = {(int(r), int(a)) for r, a in found.drafted.nonzero()}
    assert places == set(agrees)
    for place, wanted_there in agrees.items():
        assert found.agree[place].tolist() == wanted_there


@pytest.mark.parametrize("name", ["DFLASH-window", "DSPARK", "DSPARK-gated", "DSPARK-rnn"])
def test_drafts_follow_their_own_choices(name: str, folder: Path) -> None:
    made = make(folder, name)
    batch = own_batch(made)
    found = made.recipe.propose(batch)
    drafts, head = made.recipe._drafts, made.target.lm_head.double()
    top = distributions(made, batch.ids).argmax(-1)
    for row in range(2):
        for anchor in range(LENGTH - drafts):
            hidden = hidden_at(made, batch.ids, row, anchor)
            z = hidden @ head.T
            tokens = [int(batch.ids[row, anchor])]
            for i in range(drafts):
                biased = z[: i + 1]
                if "DSPARK" in name:
                    kind = made.spec.markov_head
                    biased = biased + ref.markov_biases(made.weights, kind, hidden[: i + 1], tokens)
                tokens.append(int(biased[i].argmax()))
            assert found.tokens[row, anchor].tolist() == tokens[1:]
            here = top[row, anchor : anchor + drafts].tolist()
            wanted = [a == b for a, b in zip(tokens[1:], here, strict=True)]
            assert found.agree[row, anchor].tolist() == wanted
            if found.confidence is not None:
                score = ref.confidence(made.weights, hidden, tokens[:-1])
                mine = found.confidence[row, anchor].double()
                torch.testing.assert_close(mine, score, atol=1e-4, rtol=1e-4)
    assert made.recipe.agreement(batch).agree.equal(found.agree)


def test_the_gradient_is_that_of_the_loss(folder: Path) -> None:
    """Through the Markov table, too; D-PACE's weights are constants."""
    generator = torch.Generator().manual_seed(0)
    size, width, rank = (6, 3), 5, 2
    head = torch.randn(11, width, generator=generator)
    leaves = [
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in ((*size, width), (*size, rank), (11, rank))
    ]
    target = torch.randn(*size, width, generator=generator)
    labels = torch.randint(0, 11, size, generator=generator)
    weight = torch.rand(size, generator=generator)
    objective = Objective(0.3, 0.8, False, 0.4, 0.5, 0.25, None)
    drafted = Drafted(leaves[0], head, leaves[1], leaves[2])
    mine = block_loss(drafted, target, labels, weight, objective)
    z = leaves[0] @ head.T + leaves[1] @ leaves[2].T
    p, q = (target @ head.T).softmax(-1), z.softmax(-1)
    goal = 0.6 * p + 0.4 * F.one_hot(p.argmax(-1), 11)
    rows = 0.3 * -(goal * q.log()).sum(-1) + 0.8 * (goal - q).abs().sum(-1) / 2
    plain = (rows * weight * mine.alive).sum()
    torch.testing.assert_close(mine.loss, plain)
    for one, other in zip(
        torch.autograd.grad(2 * mine.loss, leaves), torch.autograd.grad(2 * plain, leaves),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    # In chunks it is the same.
    block_loss_chunks = [
        block_loss(
            Drafted(leaves[0][i : i + 2], head, leaves[1][i : i + 2], leaves[2]),
            target[i : i + 2], labels[i : i + 2], weight[i : i + 2], objective,
        ).loss
        for i in (0, 2, 4)
    ]  # fmt: skip
    torch.testing.assert_close(torch.stack(block_loss_chunks).sum(), mine.loss)


def test_weights_of_the_papers_examples() -> None:
    chances, all_valid = torch.tensor([0.9, 0.5, 0.2]), torch.ones(3, dtype=torch.bool)
    full = dpace_weights(chances, all_valid, 0.5)
    torch.testing.assert_close(full, torch.tensor([2.09, 1.14, 0.4275]))
    holed = dpace_weights(chances, torch.tensor([True, False, True]), 0.5)
    torch.testing.assert_close(holed[[0, 2]], torch.tensor([1.52, 0.57]))
    assert ref.dpace([0.9, 0.5, 0.2], [True] * 3, 0.5) == pytest.approx([2.09, 1.14, 0.4275])
    wanted = torch.tensor([1.0, 0.7788, 0.6065, 0.4724])
    torch.testing.assert_close(decay_weights(4, 4.0, CPU), wanted, atol=5e-5, rtol=0)


def test_markov_heads_of_the_papers_examples() -> None:
    gated = {
        "markov_head.gate_proj.weight": torch.tensor([[0.3, 0.1]]),
        "markov_head.gate_proj.bias": torch.tensor([0.2]),
    }
    hidden, embedded = torch.tensor([[2.0]]), torch.tensor([[0.5]])
    latent, _ = MarkovHead("gated", 1).advance(hidden, embedded, None, gated)
    assert float(latent) == pytest.approx(0.350284, abs=1e-6)
    rnn = {
        "markov_head.joint_proj.weight": torch.tensor(
            [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]]
        ),
        "markov_head.joint_proj.bias": torch.zeros(3),
    }
    head = MarkovHead("rnn", 1)
    hidden, embedded = torch.tensor([[[2.0], [1.0]]]), torch.tensor([[[0.5], [-1.0]]])
    latents = head.latents(hidden, embedded, rnn)
    assert latents.flatten().tolist() == pytest.approx([0.975743, 0.298654], abs=1e-6)
    state = head.advance(hidden[:, 0], embedded[:, 0], None, rnn)[1]
    assert float(state) == pytest.approx(0.297202, abs=1e-6)  # type: ignore[arg-type]
    state = head.advance(hidden[:, 1], embedded[:, 1], state, rnn)[1]
    assert float(state) == pytest.approx(0.258974, abs=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layers", "count", "wanted"),
    [
        (28, 5, [1, 7, 13, 19, 25]),
        (36, 5, [1, 9, 17, 25, 33]),
        (64, 5, [1, 16, 31, 46, 61]),
        (36, 6, [1, 7, 14, 20, 27, 33]),
        (48, 8, [1, 7, 14, 20, 26, 32, 39, 45]),
        (24, 3, [1, 11, 21]),
        (4, 2, [1, 1]),
        (12, 1, [6]),
    ],
)
def test_target_layers_are_spread(layers: int, count: int, wanted: list[int]) -> None:
    assert spread(layers, count) == wanted
    with pytest.raises(ValueError, match="3 layers"):
        spread(3, 2)


def test_anchors_stand_before_own_text() -> None:
    own = torch.zeros(3, 30, dtype=torch.bool)
    own[0, 10:20] = True
    own[1, 3:5] = True
    torch.manual_seed(0)
    blocks = draw_anchors(own, 6, 4)
    assert (blocks.anchors.diff() > 0).all()
    for anchor, valid in zip(*(part[0].tolist() for part in blocks), strict=True):
        assert valid
        assert own[0, anchor + 1]
    assert blocks.anchors[1][blocks.valid[1]].tolist() == [2, 3]
    assert blocks.valid[2].all()
    assert blocks.anchors.min() >= 1
    assert blocks.anchors.max() + 4 < 30
    seen = torch.cat([draw_anchors(own, 6, 4).anchors[2] for _ in range(100)])
    assert set(seen.tolist()) == set(range(1, 26))
    parts = list(every_anchor(own.long(), 7, 4))
    assert [part for part, _ in parts] == [slice(i, min(i + 7, 26)) for i in range(0, 26, 7)]
    assert parts[-1][1].anchors[0].tolist() == [21, 22, 23, 24, 25, 25, 25]


def test_flex_attention_is_the_whole_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled, which takes a CPU long."""
    monkeypatch.setattr(block_attention, "compiled", lambda function: function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert disagreement(block_attention._flex(), CPU, torch.float32, 16) < 1e-4
    wrong = DENSE._replace(mask=lambda visible, like, keys: DENSE.mask(visible, like, keys) | True)  # type: ignore[operator]
    assert disagreement(wrong, CPU, torch.float32, 16) > 0.1


def test_figures_of_some_rows_are_of_these_alone() -> None:
    agree = torch.tensor([[[1, 1], [0, 0], [1, 0], [1, 1]]]).bool()
    own = torch.ones(1, 6, dtype=torch.bool)
    counts = AgreementCounts(2)
    counts.add(agree, own, 0, torch.tensor([[True, False, True, False]]))
    found = counts.result()
    assert found.projected == 1 + (2 + 1) / 2
    assert found.walked is None
    assert whole_drafts(own, 0, 4, 2).tolist() == [[True] * 4]
    own[0, 4:] = False
    assert whole_drafts(own, 0, 4, 2).tolist() == [[True, True, True, False]]
    assert whole_drafts(own & False, 0, 4, 2).all()


@pytest.mark.parametrize("name", ["DFLASH-window", "DSPARK-gated", "DSPARK-rnn", "DSPARK"])
def test_the_export_is_what_loaders_read(name: str, folder: Path, tmp_path: Path) -> None:
    made = make(folder, name)
    exported = made.recipe.export(torch.bfloat16)
    write_draft(tmp_path, exported, "")
    config = json.loads((tmp_path / CONFIG).read_text())
    dspark = name.startswith("DSPARK")
    assert config["architectures"] == ["DSparkDraftModel" if dspark else "DFlashDraftModel"]
    assert config["block_size"] == made.spec.block_size
    assert config["num_target_layers"] == 5
    nested = config["dflash_config"]
    assert nested["mask_token_id"] == MASK
    assert nested["target_layer_ids"] == [1, 2]  # by rule, of layers 0 to 4
    drafts = made.recipe._drafts
    assert config["outrider"] == {"steps": drafts, "topk": 1, "num_draft_tokens": drafts + 1}
    windows = made.recipe._model.sliding_windows
    assert config["layer_types"] == [
        "sliding_attention" if window else "full_attention" for window in windows
    ]
    assert config.get("sliding_window") == (max(windows) or None)
    hidden, inner, size = 16, 24, 8
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(2):
        shapes |= {
            f"layers.{layer}.{part}.weight": shape
            for part, shape in {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (2 * size, hidden),
                "self_attn.k_proj": (size, hidden),
                "self_attn.v_proj": (size, hidden),
                "self_attn.o_proj": (hidden, 2 * size),
                "self_attn.q_norm": (size,),
                "self_attn.k_norm": (size,),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items()
        }
    if dspark:
        rank = 8
        for where in (config, nested):
            assert where["markov_rank"] == rank
            assert where["markov_head_type"] == made.spec.markov_head
            assert where["enable_confidence_head"] is True
            assert where["confidence_head_with_markov"] is True
            assert where["sample_from_anchor"] is True
        head = "markov_head"
        shapes |= {f"{head}.markov_w{i}.weight": (VOCAB, rank) for i in (1, 2)}
        if made.spec.markov_head == "gated":
            shapes |= {f"{head}.gate_proj.weight": (rank, hidden + rank)}
            shapes |= {f"{head}.gate_proj.bias": (rank,)}
        if made.spec.markov_head == "rnn":
            shapes |= {f"{head}.joint_proj.weight": (3 * rank, 2 * rank + hidden)}
            shapes |= {f"{head}.joint_proj.bias": (3 * rank,)}
        shapes |= {"confidence_head.proj.weight": (1, hidden + rank)}
        shapes |= {"confidence_head.proj.bias": (1,)}
    assert {name: tuple(tensor.shape) for name, tensor in exported.tensors.items()} == shapes
    for tensor_name, tensor in exported.tensors.items():
        wide = tensor_name.startswith("confidence_head")
        assert tensor.dtype == (torch.float32 if wide else torch.bfloat16)


def test_the_mask_token_is_the_tokenizers() -> None:
    config = load_model_config(Path("models/pycoder-11m"))
    spec = TrainSpec(algorithm="DFLASH", model="pycoder", data=("d",), output="o", steps=1)
    assert mask_token(spec, config) == 3
    assert mask_token(msgspec.structs.replace(spec, mask_token_id=5), config) == 5


def test_another_mask_token_than_the_tokenizers_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    words = {"<m>": 4, "a": 0}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "a"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text('{"mask_token": {"content": "<m>"}}')
    config = load_model_config(tmp_path)
    assert mask_token(spec_of(tmp_path, "DFLASH", mask_token_id=None), config) == 4
    with pytest.raises(RefusedError, match="mask_token_id: is 7, but 4 is the tokenizer's <m>"):
        mask_token(spec_of(tmp_path, "DFLASH"), config)


def test_temperatures_are_tried_on_other_rows(folder: Path, tmp_path: Path) -> None:
    made = make(folder, "DSPARK")
    said: list[str] = []
    ids = np.random.default_rng(0).integers(1, VOCAB, (12, LENGTH)).astype(np.int32)
    source = RowSource(ids, None, 0, CPU)
    table = calibrate(made.recipe, source, 12, 4, said.append)  # type: ignore[arg-type]
    assert table is not None
    assert table.num_samples == 6 * (LENGTH - 3)
    assert f"{2 * table.num_samples} positions, fewer than" in said[0]
    parts = [source.take(first, 4) for first in (0, 4, 8)]
    found = [made.recipe.propose(part) for part in parts]
    logits = torch.cat([one.confidence for one in found if one.confidence is not None])
    accepted = torch.cat([one.agree for one in found]).int().cumprod(-1)
    rest = slice(1, None, 2)
    errors = held_out_errors(
        logits[rest].flatten(0, 1).double().numpy(),
        accepted[rest].flatten(0, 1).double().numpy(),
        table.temperatures,
    )
    assert table.ece_after == pytest.approx(errors)
    few = calibrate(made.recipe, RowSource(ids[:1], None, 0, CPU), 1, 4, said.append)  # type: ignore[arg-type]
    assert few is None
    assert not math.isnan(sum(errors))
