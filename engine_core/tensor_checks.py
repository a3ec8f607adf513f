"""A checkpoint's headers against its config: what the loader would refuse, before any loading."""

from collections.abc import Collection, Mapping
from pathlib import Path

from .block_tensors import block_shapes, is_spare
from .draft_config import DraftConfig
from .draft_names import our_name
from .model_config import ModelConfig
from .safetensors_header import HeaderError, StoredTensor, tensor_headers
from .tensor_shapes import HEAD, IGNORABLE, UNUSED, Shapes, decoder_shapes, draft_shapes

_FLOATS = ("bfloat16", "float16", "float32")
_SHOWN = 8  # names of a list in a message


def check_model_tensors(folder: Path, config: ModelConfig) -> None:
    """A target's or a STANDALONE draft's; none are checked in a folder without a checkpoint.

    Raises HeaderError naming the file or tensor.
    """
    stored = tensor_headers(folder)
    shapes = decoder_shapes(config)
    if HEAD in stored:  # beside a tied table: the loader compares the two
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    if stored:
        _check(folder, stored, shapes)
        _refuse_left(folder, [name for name in stored if name not in shapes], IGNORABLE)


def check_draft_tensors(folder: Path, config: DraftConfig) -> None:
    """A draft's, as ``check_model_tensors``. No values are read, nor those of its token ids."""
    if config.algorithm == "STANDALONE":
        check_model_tensors(folder, config.model)
        return
    actual = tensor_headers(folder)
    if not actual:
        return
    stored: dict[str, StoredTensor] = {}
    names: dict[str, str] = {}  # as the checkpoint has them, by ours
    for name, tensor in actual.items():
        ours = our_name(name)
        if ours in stored:
            raise HeaderError(f"{folder}: tensors {names[ours]!r} and {name!r} are the same one")
        stored[ours], names[ours] = tensor, name
    if config.block is not None:
        shapes = block_shapes(config)
        _check(folder, stored, shapes, names)
        left = [n for ours, n in names.items() if ours not in shapes and not is_spare(ours, config)]
        _refuse_left(folder, left, ())
        return
    shapes = draft_shapes(config, stored) | _token_maps(config, stored)
    _check(folder, stored, shapes, names)
    left = [names[ours] for ours in stored if ours not in shapes and not _spare_norm(ours, stored)]
    _refuse_left(folder, left, (*UNUSED, *IGNORABLE))


def _check(
    folder: Path,
    stored: Mapping[str, StoredTensor],
    shapes: Shapes,
    called: Mapping[str, str] | None = None,
) -> None:
    """``called``: what the checkpoint calls ``stored``, if that is not their names."""
    for name, shape in shapes.items():
        tensor = stored.get(name)
        shown = (called or {}).get(name, name)
        if tensor is None:
            raise HeaderError(
                f"{folder}: the checkpoint lacks tensor {shown!r} {list(shape)}; config.json and "
                "the weights do not belong together, or a shard is missing"
            )
        if tensor.shape != shape:
            raise HeaderError(
                f"{folder}: tensor {shown!r} has shape {list(tensor.shape)}, config.json asks for "
                f"{list(shape)}"
            )
        if name == "d2t":
            if not tensor.dtype.startswith(("I", "U")):
                raise HeaderError(
                    f"{folder}: tensor 'd2t' is {tensor.dtype}; it must hold whole numbers"
                )
        elif name != "t2d" and tensor.dtype not in _FLOATS:
            raise HeaderError(
                f"{folder}: tensor {shown!r} is {tensor.dtype}; only bfloat16, float16 and "
                "float32 checkpoints are supported"
            )


def _token_maps(config: DraftConfig, stored: Collection[str]) -> Shapes:
    """An EAGLE3 draft's, where its vocabulary is its own or it has them all the same."""
    vocab, size = config.model.vocab_size, config.draft_vocab_size
    if config.algorithm != "EAGLE3" or (size == vocab and "d2t" not in stored):
        return {}
    maps: Shapes = {"d2t": (size,)}
    if "t2d" in stored:
        maps["t2d"] = (vocab,)
    return maps


def _spare_norm(name: str, stored: Collection[str]) -> bool:
    plain = "input_layernorm.weight"
    return name.endswith(plain) and name.replace(plain, "hidden_norm.weight") in stored


def _refuse_left(folder: Path, left: list[str], ignorable: tuple[str, ...]) -> None:
    left = sorted(name for name in left if not name.endswith(ignorable))
    if left:
        shown = ", ".join(map(repr, left[:_SHOWN]))
        more = ", …" if len(left) > _SHOWN else ""
        raise HeaderError(
            f"{folder}: {len(left)} tensors are in the checkpoint but not in the model of "
            f"config.json: {shown}{more}"
        )
