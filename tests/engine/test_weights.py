"""Damaged checkpoints: every problem is an error that names the tensor or the file."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.models import load_model
from outrider.engine.weights import WeightsError
from outrider.engine_core.model_config import load_model_config

from .checkpoints import save

Tensors = dict[str, torch.Tensor]
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


def load(folder: Path) -> None:
    config = load_model_config(folder)
    load_model(folder, config, torch.float32, torch.device("cpu"))


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_missing_tensor(tmp_path: Path) -> None:
    save("llama", tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop(O_PROJ))
    with pytest.raises(WeightsError, match=r"lacks tensor 'model\.layers\.1\.self_attn\.o_proj"):
        load(tmp_path)


def test_unread_tensor(tmp_path: Path) -> None:
    save("llama", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.extra.weight": torch.ones(2)}))
    with pytest.raises(WeightsError, match=r"1 tensors .* 'model\.extra\.weight'"):
        load(tmp_path)


def test_old_rotary_buffers_are_tolerated(tmp_path: Path) -> None:
    save("llama", tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(tmp_path, lambda tensors: tensors.update({name: torch.ones(4)}))
    load(tmp_path)


def test_wrong_shape_and_type(tmp_path: Path) -> None:
    save("llama", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({O_PROJ: tensors[O_PROJ][:, :-1].contiguous()}))
    with pytest.raises(WeightsError, match=r"o_proj.weight' has shape \[48, 47\].*\[48, 48\]"):
        load(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({O_PROJ: torch.ones(48, 48, dtype=torch.int8)}))
    with pytest.raises(WeightsError, match=r"o_proj.weight' is torch.int8"):
        load(tmp_path)


def test_tied_head_may_be_stored_only_if_equal(tmp_path: Path) -> None:
    save("llama-llama3-rope", tmp_path)
    edit(
        tmp_path,
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    )
    load(tmp_path)
    edit(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(WeightsError, match=r"lm_head.weight: differs"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    save("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"model\.safetensors: is truncated or not"):
        load(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    save("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="has neither"):
        load(tmp_path)


def test_broken_indexes(tmp_path: Path) -> None:
    save("llama", tmp_path, shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    load(tmp_path)

    def broken(match: str, text: str) -> None:
        index.write_text(text)
        with pytest.raises(WeightsError, match=match):
            load(tmp_path)

    first = good["weight_map"][O_PROJ]
    other = next(shard.name for shard in shards if shard.name != first)
    broken("malformed|truncated", "{")
    broken("weight_map", "{}")
    moved = {**good["weight_map"], O_PROJ: other}
    broken(rf"{other}: lacks tensor '{O_PROJ}'", json.dumps({"weight_map": moved}))
    outside = {**good["weight_map"], O_PROJ: "../model.safetensors"}
    broken("not a plain file name", json.dumps({"weight_map": outside}))
    gone = {**good["weight_map"], O_PROJ: "model-x.safetensors"}
    broken("model-x.safetensors: the shard", json.dumps({"weight_map": gone}))
    save_file({**load_file(tmp_path / other), O_PROJ: torch.ones(48, 48)}, tmp_path / other)
    broken(rf"'{O_PROJ}' is in both", json.dumps(good))
