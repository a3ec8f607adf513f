"""Damaged drafts: every problem is an error that names the tensor or the file, and the remedy."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.models.draft_loader import load_draft
from outrider.engine.models.draft_net import DraftNet
from outrider.engine.models.loader import load_model
from outrider.engine.models.model import TargetModel
from outrider.engine.weights import WeightsError
from outrider.engine_core.draft_config import DraftAlgorithm
from outrider.engine_core.draft_config_json import load_draft_config
from outrider.engine_core.draft_names import our_name
from outrider.engine_core.model_config import ModelConfig, ModelConfigError, load_model_config

from .draft_checkpoints import DRAFTS, write_eagle, write_standalone
from .tiny import write_checkpoint

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
Target = tuple[Path, ModelConfig, TargetModel]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = write_checkpoint(tmp_path_factory.mktemp("target"), 48, layers=3)
    config = load_model_config(folder)
    return folder, config, load_model(folder, config, torch.float32, CPU)


def load(
    folder: Path,
    target: Target,
    algorithm: DraftAlgorithm = "EAGLE3",
    token_map: tuple[int, ...] | None = None,
) -> DraftNet:
    config = load_draft_config(folder, target[1], algorithm)
    return load_draft(folder, config, target[2], torch.float32, CPU, token_map=token_map)


def damaged(
    folder: Path, target: Target, change: Callable[[Tensors], object], kind: str = "eagle3"
) -> Path:
    DRAFTS[kind].write(folder, target[0])
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), r"lacks tensor 'model\.fc\.weight' \[16, 48\]"),
        (lambda t: t.pop("midlayer.hidden_norm.weight"), "lacks tensor 'model.layers.0.*norm"),
        (lambda t: t.pop("lm_head.weight"), r"lacks tensor 'lm_head\.weight' \[24, 16\]"),
        (lambda t: t.update(extra=torch.ones(2)), "1 tensors .* 'extra'"),
        (lambda t: t.update({"fc.bias": torch.ones(16)}), ""),
        (
            lambda t: t.update({"layers.0.hidden_norm.weight": torch.ones(16)}),
            "'.*hidden_norm.weight' and '.*hidden_norm.weight' are the same one",
        ),
        (lambda t: t.update({"fc.weight": torch.ones(16, 32)}), r"'fc\.weight' has shape \[16, 32"),
        (lambda t: t.pop("d2t"), r"lacks tensor 'd2t' \[24\], which says"),
        (lambda t: t.update(d2t=t["d2t"][1:].clone()), r"'d2t' has shape \[23\]"),
        (lambda t: t["d2t"].add_(48), "'d2t': names token .*outside the target's vocabulary of 48"),
        (lambda t: t.update(d2t=-torch.arange(24)), "'d2t': two draft ids are the same token"),
        (lambda t: t.update(d2t=t["d2t"].float()), "'d2t' is torch.float32"),
        (lambda t: t["t2d"].logical_not_(), "'d2t' and 't2d' disagree on 48 tokens"),
        (lambda t: t.update(t2d=torch.ones(47, dtype=torch.bool)), r"'t2d' has shape \[47\]"),
        (lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}), "torch.int8"),
    ],
)
def test_damaged(
    tmp_path: Path, target: Target, change: Callable[[Tensors], object], message: str
) -> None:
    folder = damaged(tmp_path, target, change)
    if not message:  # what the config leaves open is taken as it is
        load(folder, target)
        return
    with pytest.raises(WeightsError, match=message) as caught:
        load(folder, target)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_mask_may_be_missing(tmp_path: Path, target: Target) -> None:
    load(damaged(tmp_path, target, lambda t: t.pop("t2d")), target)


def test_a_map_of_the_whole_vocabulary_is_none(tmp_path: Path, target: Target) -> None:
    def widen(tensors: Tensors) -> None:
        tensors["d2t"] = torch.zeros(48, dtype=torch.int64)
        tensors["t2d"] = torch.ones(48, dtype=torch.bool)
        tensors["lm_head.weight"] = torch.randn(48, 16)

    folder = damaged(tmp_path, target, widen)
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"draft_vocab_size": 24', '"draft_vocab_size": 48'))
    assert load(folder, target).token_ids is None


def test_a_head_that_the_config_does_not_size(tmp_path: Path, target: Target) -> None:
    folder = damaged(tmp_path, target, lambda t: None)
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"draft_vocab_size": 24, ', ""))
    with pytest.raises(WeightsError, match="'d2t' has shape"):
        load(folder, target)


def test_a_token_map_is_needed_and_fits(tmp_path: Path, target: Target) -> None:
    DRAFTS["eagle-hot"].write(tmp_path, target[0])
    with pytest.raises(WeightsError, match=r"proposes 20 tokens .* none is given.*token-map"):
        load(tmp_path, target, "EAGLE")
    with pytest.raises(WeightsError, match="the one given has 3"):
        load(tmp_path, target, "EAGLE", (1, 2, 3))
    net = load(tmp_path, target, "EAGLE", tuple(range(20, 40)))
    assert net.token_ids is not None
    assert net.token_ids.tolist() == list(range(20, 40))


def test_pickles_are_refused(tmp_path: Path, target: Target) -> None:
    write_eagle(tmp_path, target[0])
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pytorch_model.bin, which can run code.*convert it"):
        load(tmp_path, target, "EAGLE")
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(WeightsError, match=r"has neither model.safetensors nor"):
        load(tmp_path, target, "EAGLE")


def test_the_conversion_that_is_advised_works(tmp_path: Path, target: Target) -> None:
    write_eagle(tmp_path, target[0])
    path = tmp_path / "model.safetensors"
    torch.save(load_file(path), tmp_path / "pytorch_model.bin")
    path.unlink()
    with pytest.raises(WeightsError) as caught:
        load(tmp_path, target, "EAGLE")
    code = str(caught.value).partition('python -c "')[2].rstrip('"')
    names = {
        "torch.load('pytorch_model.bin'": f"torch.load({str(tmp_path / 'pytorch_model.bin')!r}"
    }
    names["'model.safetensors'"] = repr(str(path))
    for theirs, here in names.items():
        assert theirs in code
        code = code.replace(theirs, here)
    exec(code, {})  # our own message's code
    load(tmp_path, target, "EAGLE")


def test_a_whole_model_is_no_eagle_draft(tmp_path: Path, target: Target) -> None:
    write_standalone(tmp_path, target[0], architectures=["LlamaForCausalLM"])
    with pytest.raises(ModelConfigError, match=r"whole model.*--speculative-algorithm STANDALONE"):
        load(tmp_path, target, "EAGLE")


def test_a_norm_in_front_of_eagles_first_layer(tmp_path: Path, target: Target) -> None:
    norm = {"layers.0.input_layernorm.weight": torch.ones(16)}
    damaged(tmp_path, target, lambda t: t.update(norm), "eagle")
    assert load(tmp_path, target, "EAGLE").config.first_layer_norm


@pytest.mark.parametrize("bias", [True, False])
def test_a_bias_that_the_config_leaves_open(tmp_path: Path, target: Target, bias: bool) -> None:
    write_eagle(tmp_path, target[0], bias=bias)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace(f'"bias": {str(bias).lower()}, ', ""))
    assert load(tmp_path, target, "EAGLE").config.fc_bias == bias


def test_names() -> None:
    assert our_name("midlayer.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert our_name("model.layers.1.mlp.up_proj.weight") == "model.layers.1.mlp.up_proj.weight"
    assert our_name("model.midlayer.hidden_norm.weight") == "model.layers.0.hidden_norm.weight"
    assert our_name("aux_norm_high.weight") == "model.fc_norm.2.weight"
    assert our_name("transformer.self_attn.q_proj.weight") == (
        "model.layers.0.self_attn.q_proj.weight"
    )
    assert our_name("fusion_fc.bias") == "model.fc.bias"
    assert our_name("d2t") == "d2t"
    assert our_name("model.lm_head.weight") == "lm_head.weight"
