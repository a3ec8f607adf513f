"""What ``outrider plan`` refuses by a checkpoint's headers is what the loader refuses."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.models.block_checkpoint import read_block_weights
from outrider.engine.models.draft_loader import read_weights
from outrider.engine.models.loader import load_model
from outrider.engine.weights import WeightsError
from outrider.engine_core.draft_config import DraftConfig
from outrider.engine_core.draft_config_json import load_draft_config
from outrider.engine_core.model_config import ModelConfig, load_model_config
from outrider.engine_core.safetensors_header import HeaderError
from outrider.engine_core.tensor_checks import check_draft_tensors, check_model_tensors

from .block_checkpoints import BLOCKS
from .checkpoints import KINDS, save
from .draft_checkpoints import DRAFTS
from .tiny import write_checkpoint

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
Reads = Callable[[], object]


def _drop(tensors: Tensors, name: str) -> None:
    del tensors[name]


def _longer(tensors: Tensors, name: str) -> None:
    tensors[name] = torch.cat([tensors[name], tensors[name][:1]])


def _flat(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].reshape(1, -1)


def _double(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].double()


def _whole(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].int()


def _renamed(tensors: Tensors, name: str) -> None:
    tensors[f"{name}.old"] = tensors.pop(name)


def _extra(tensors: Tensors, name: str) -> None:
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)


def _buffer(tensors: Tensors, name: str) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)


CHANGES = (_drop, _longer, _flat, _double, _whole, _renamed, _extra, _buffer)


def _refuses(reads: Reads, error: type[Exception]) -> bool:
    try:
        reads()
    except error:
        return True
    return False


def compare(folder: Path, loads: Reads, checks: Reads, seed: int) -> tuple[int, int]:
    """Both on one damage a tensor; how many were accepted and refused."""
    loads()
    checks()
    rng, file = random.Random(seed), folder / "model.safetensors"
    whole, answers = load_file(file), [0, 0]
    for name in sorted(whole):
        change, changed = rng.choice(CHANGES), dict(whole)
        change(changed, name)
        save_file({key: value.clone() for key, value in changed.items()}, file)
        refused = _refuses(loads, WeightsError)
        assert _refuses(checks, HeaderError) == refused, (name, change.__name__)
        answers[refused] += 1
    return answers[0], answers[1]


@pytest.mark.parametrize("kind", KINDS)
def test_targets(tmp_path: Path, kind: str) -> None:
    save(kind, tmp_path)
    config: ModelConfig = load_model_config(tmp_path)
    accepted, refused = compare(
        tmp_path,
        lambda: load_model(tmp_path, config, torch.float32, CPU, native=False),
        lambda: check_model_tensors(tmp_path, config),
        seed=len(kind),
    )
    assert accepted > 0
    assert refused > 10


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), 48, layers=3)


@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts(tmp_path: Path, target: Path, kind: str) -> None:
    made = DRAFTS[kind]
    made.write(tmp_path, target)
    config: DraftConfig = load_draft_config(tmp_path, load_model_config(target), made.algorithm)

    def loads() -> object:
        if config.algorithm == "STANDALONE":
            return load_model(tmp_path, config.model, torch.float32, CPU, native=False)
        return read_weights(tmp_path, config)

    _, refused = compare(tmp_path, loads, lambda: check_draft_tensors(tmp_path, config), len(kind))
    assert refused > 4


@pytest.mark.parametrize("kind", BLOCKS)
def test_block_drafts(tmp_path: Path, target: Path, kind: str) -> None:
    made = BLOCKS[kind]
    for asked in (False, True):  # whether the confidence head is read
        made.write(tmp_path, target)
        config = load_draft_config(tmp_path, load_model_config(target), made.algorithm)
        assert config.block is not None
        if asked and not config.block.confidence:
            return
        block = msgspec.structs.replace(config.block, confidence=asked)
        config = msgspec.structs.replace(config, block=block)
        _, refused = compare(
            tmp_path,
            partial(read_block_weights, tmp_path, config),
            partial(check_draft_tensors, tmp_path, config),
            len(kind) + asked,
        )
        assert refused > 4


def test_a_tied_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    save("qwen2", tmp_path)
    config, file = load_model_config(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    check_model_tensors(tmp_path, config)
    save_file(tensors | {"lm_head.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(HeaderError, match=r"'lm_head.weight' has shape \[2, 2\]"):
        check_model_tensors(tmp_path, config)


def test_files_are_as_long_as_their_headers_say(tmp_path: Path) -> None:
    save("qwen3", tmp_path, shard_size="60KB")
    config = load_model_config(tmp_path)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    check_model_tensors(tmp_path, config)
    for shard in (shards[0], shards[-1]):
        data = shard.read_bytes()
        for wrong in (data[:-1], data[: len(data) // 2], data + b"\0"):
            shard.write_bytes(wrong)
            with pytest.raises(HeaderError, match=rf"{shard.name}: is truncated or damaged: its"):
                check_model_tensors(tmp_path, config)
        shard.write_bytes(data)
    shards[0].rename(tmp_path / "gone")
    with pytest.raises(HeaderError, match=rf"{shards[0].name}: the shard that the index names is"):
        check_model_tensors(tmp_path, config)
