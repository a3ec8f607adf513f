"""A checkpoint's tensors, read from its safetensors headers alone."""

import math
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# Of types that may stand in a checkpoint; sizes of others are not checked.
_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "BOOL": 1, "U8": 1, "I8": 1}

_Size = Annotated[int, msgspec.Meta(ge=0)]


class HeaderError(ValueError):
    """A checkpoint whose headers cannot be read, or say that it cannot be loaded."""


class StoredTensor(NamedTuple):
    """``dtype``: by its name in torch where it is a model's, e.g. "bfloat16"."""

    dtype: str
    shape: tuple[int, ...]


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def tensor_dtypes(folder: Path) -> dict[str, str]:
    """Type of every tensor of the folder's checkpoint by name; see ``tensor_headers``."""
    return {name: tensor.dtype for name, tensor in tensor_headers(folder).items()}


def tensor_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's checkpoint by name; files are as long as their headers say.

    Empty for a folder without a checkpoint. Raises HeaderError naming the file.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if not index.is_file():
        return _header(single) if single.is_file() else {}
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except msgspec.MsgspecError as error:
        raise HeaderError(f"{index}: {error}") from None
    found: dict[str, StoredTensor] = {}
    shard_of: dict[str, str] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise HeaderError(f"{index}: shard {shard!r} is not a plain file name")
        tensors = _header(folder / shard)
        for name in tensors:
            if name in found:
                raise HeaderError(
                    f"{index}: tensor {name!r} is in both {shard_of[name]} and {shard}"
                )
            shard_of[name] = shard
        found |= tensors
    for name, shard in weight_map.items():
        if shard_of.get(name) != shard:
            raise HeaderError(f"{folder / shard}: lacks tensor {name!r} of the index")
    return found


def _header(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > _MAX_HEADER_BYTES:
                raise HeaderError(f"{path}: is not a safetensors file")
            raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        size = path.stat().st_size - _LENGTH_BYTES - length
        tensors = {n: msgspec.json.decode(t, type=_Tensor) for n, t in raw.items() if n[:2] != "__"}
    except FileNotFoundError:
        raise HeaderError(f"{path}: the shard that the index names is missing") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise HeaderError(f"{path}: has no readable safetensors header: {error}") from None
    _check_sizes(path, tensors, size)
    return {
        name: StoredTensor(_NAMES.get(tensor.dtype, tensor.dtype), tensor.shape)
        for name, tensor in tensors.items()
    }


def _check_sizes(path: Path, tensors: dict[str, _Tensor], size: int) -> None:
    """Raise unless the tensors lie one behind the other in ``size`` bytes."""
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda entry: entry[1].data_offsets):
        begin, end = tensor.data_offsets
        item = _ITEM_BYTES.get(tensor.dtype)
        needed = end - begin if item is None else math.prod(tensor.shape) * item
        if begin != at or end - begin != needed:
            raise HeaderError(f"{path}: the header's place of tensor {name!r} cannot be")
        at = end
    if at != size:
        raise HeaderError(
            f"{path}: is truncated or damaged: its tensors take {at} bytes, of which it has "
            f"{max(size, 0)}; fetch it again"
        )
