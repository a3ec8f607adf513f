"""Whole block drafts in training against one block at a time; what they export."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from outrider.engine.training.batches import Batch
from outrider.engine.training.block_layout import draw_anchors
from outrider.engine.training.export import CONFIG, write_draft

from ...reference import block_training_ref as ref
from .block_recipes import CASES, LENGTH, MASK, VOCAB, Made, make, text, write_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def own_batch(made: Made) -> Batch:
    """Text with the target's own greedy text in it."""
    ids = text()
    ids[:, 6:] = made.target.generate(ids[:, :6], LENGTH - 6)
    own = torch.arange(LENGTH).expand(ids.shape) >= 6
    return Batch(ids, own)


def hidden_at(made: Made, ids: torch.Tensor, row: int, anchor: int) -> torch.Tensor:
    """[K, H] by the reference: the rows that propose."""
    layers = made.spec.feature_layers or (2, 3)
    streams = made.target.forward(ids, layers).streams
    features = torch.cat(streams, dim=-1)[row, :anchor].double()
    first = made.recipe.first_row
    rows = made.recipe._drafts + first
    block = [int(ids[row, anchor])] + [MASK] * (rows - 1)
    entering = made.target.embedding[block].double()
    return ref.block_hidden(made.weights, made.shape, features, entering)[first:]


def distributions(made: Made, ids: torch.Tensor) -> torch.Tensor:
    return F.linear(made.target.forward(ids).hidden, made.target.lm_head).double()


def text_chances(made: Made, ids: torch.Tensor) -> torch.Tensor:
    """float32[B, T] of the text's tokens; 1 for a row's first."""
    laws = distributions(made, ids).softmax(-1)[:, :-1]
    return F.pad(laws.gather(-1, ids[:, 1:, None])[..., 0], (1, 0), value=1.0).float()


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_the_one_of_the_equations(name: str, folder: Path) -> None:
    made = make(folder, name)
    spec, drafts = made.spec, made.recipe._drafts
    batch = own_batch(made)
    batch.own[0] = False  # a row of text alone
    batch.ids[0] = text()[0]
    unlikely = 1 - text_chances(made, batch.ids)
    torch.manual_seed(3)
    blocks = draw_anchors(batch.own, spec.anchors, drafts, unlikely, spec.start_focus)
    torch.manual_seed(3)
    found = made.recipe.step(batch)
    logits = distributions(made, batch.ids)
    dspark, dpace = spec.algorithm == "DSPARK", name in ("DFLASH", "DFLASH-lk", "DFLASH-window")
    dpace = dpace or name == "DSPARK-dpace"
    total = norm = doubt = doubt_norm = 0.0
    agrees: dict[tuple[int, int], list[bool]] = {}
    for row in range(2):
        for anchor, valid, counts in zip(*(part[row].tolist() for part in blocks), strict=True):
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
            base = [counts * (1.0 if mine else 0.3) for mine in own]
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
    shape = {"steps": drafts, "topk": 1, "num_draft_tokens": drafts + 1}
    assert config["outrider"] == shape | {"trained_length": made.spec.sequence_length}
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
