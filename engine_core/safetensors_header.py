"""The types of a checkpoint's tensors, read from its safetensors headers alone."""

from pathlib import Path

import msgspec

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class HeaderError(ValueError):
    """A file that does not begin with a safetensors header."""


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def tensor_dtypes(folder: Path) -> dict[str, str]:
    """Type of every tensor of the folder's checkpoint by name, e.g. "bfloat16".

    Empty for a folder without a checkpoint. Raises HeaderError naming the file.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if not index.is_file():
        return _header(single) if single.is_file() else {}
    try:
        shards = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except msgspec.MsgspecError as error:
        raise HeaderError(f"{index}: {error}") from None
    found: dict[str, str] = {}
    for shard in sorted(shards):
        if Path(shard).name != shard:
            raise HeaderError(f"{index}: shard {shard!r} is not a plain file name")
        found |= _header(folder / shard)
    return found


def _header(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > _MAX_HEADER_BYTES:
                raise HeaderError(f"{path}: is not a safetensors file")
            raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        tensors = {n: msgspec.json.decode(t, type=_Tensor) for n, t in raw.items() if n[:2] != "__"}
    except (OSError, msgspec.MsgspecError) as error:
        raise HeaderError(f"{path}: has no readable safetensors header: {error}") from None
    return {name: _NAMES.get(tensor.dtype, tensor.dtype) for name, tensor in tensors.items()}
