"""Reading safetensors checkpoints: by mmap, and strictly."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class WeightsError(ValueError):
    """A checkpoint that does not hold exactly the tensors its config promises."""


class TensorSource(Protocol):
    """Where a loader takes tensors from."""

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor ``name``; it must have ``shape``."""
        ...

    def has(self, name: str) -> bool:
        """Whether ``name`` is there."""
        ...


class WholeTensors(TensorSource, Protocol):
    """A source that also copies parts out of its tensors."""

    def part(
        self, name: str, shape: tuple[int, ...], axis: int, begin: int, size: int
    ) -> torch.Tensor:
        """Elements ``begin`` to ``begin + size`` along ``axis`` of ``name``, which has ``shape``:
        a tensor of its own, that keeps no more in memory.
        """
        ...


class _SafeFile(Protocol):
    """The part of safetensors' untyped file handle that is used here."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class Checkpoint:
    """The tensors of ``folder``: model.safetensors, or shards by model.safetensors.index.json.

    Tensors are views of memory-mapped files in the checkpoint's own dtype. Every problem raises
    WeightsError with the tensor's or the file's name.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _SafeFile] = {}
        self._shard_of = self._find_tensors()
        self._taken: set[str] = set()

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._shard_of)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds ``name``."""
        return name in self._shard_of

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor ``name``; it must exist, have ``shape`` and be bf16, fp16 or fp32."""
        tensor = self.take_any(name, shape)
        if tensor.dtype not in _FLOATS:
            raise WeightsError(
                f"{self._folder / self._shard_of[name]}: tensor {name!r} is {tensor.dtype}; only "
                "bfloat16, float16 and float32 checkpoints are supported"
            )
        return tensor

    def take_any(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor ``name`` of whatever type; it must exist and have ``shape``."""
        shard = self._shard_of.get(name)
        if shard is None:
            raise WeightsError(
                f"{self._folder}: the checkpoint lacks tensor {name!r} {list(shape)}; config.json "
                "and the weights do not belong together, or a shard is missing"
            )
        tensor = self._files[shard].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise WeightsError(
                f"{self._folder / shard}: tensor {name!r} has shape {list(tensor.shape)}, "
                f"config.json asks for {list(shape)}"
            )
        self._taken.add(name)
        return tensor

    def part(
        self, name: str, shape: tuple[int, ...], axis: int, begin: int, size: int
    ) -> torch.Tensor:
        """A copy of the part; see ``take``."""
        return self.take(name, shape).narrow(axis, begin, size).clone()

    def finish(self, ignorable: Iterable[str] = ()) -> None:
        """Raise if a tensor was never taken; names ending in one of ``ignorable`` may be left."""
        endings = tuple(ignorable)
        left = [n for n in self._shard_of if n not in self._taken and not n.endswith(endings)]
        if left:
            shown = ", ".join(repr(n) for n in sorted(left)[:8])
            raise WeightsError(
                f"{self._folder}: {len(left)} tensors are in the checkpoint but not in the model "
                f"of config.json: {shown}{', …' if len(left) > 8 else ''}"
            )

    def _find_tensors(self) -> dict[str, str]:
        index = self._folder / "model.safetensors.index.json"
        if not index.is_file():
            single = "model.safetensors"
            if not (self._folder / single).is_file():
                raise WeightsError(
                    f"{self._folder}: has neither model.safetensors nor "
                    "model.safetensors.index.json; only safetensors checkpoints are supported"
                )
            return dict.fromkeys(self._open(single), single)
        try:
            weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except msgspec.MsgspecError as error:
            raise WeightsError(f"{index}: {error}") from None
        shard_of: dict[str, str] = {}
        for shard in sorted(set(weight_map.values())):
            if Path(shard).name != shard:
                raise WeightsError(f"{index}: shard {shard!r} is not a plain file name")
            for name in self._open(shard):
                if name in shard_of:
                    raise WeightsError(
                        f"{index}: tensor {name!r} is in both {shard_of[name]} and {shard}"
                    )
                shard_of[name] = shard
        for name, shard in weight_map.items():
            if shard_of.get(name) != shard:
                raise WeightsError(f"{self._folder / shard}: lacks tensor {name!r} of the index")
        return shard_of

    def _open(self, shard: str) -> list[str]:
        path = self._folder / shard
        try:
            file: _SafeFile = safe_open(path, framework="pt", device="cpu")
            names = list(file.keys())
        except FileNotFoundError:
            raise WeightsError(f"{path}: the shard that the index names is missing") from None
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"{path}: is truncated or not a safetensors file ({error}); fetch it again"
            ) from None
        self._files[shard] = file
        return names


class RandomTensors:
    """Deterministic normal tensors instead of a checkpoint (load_format "dummy").

    Each is drawn in place, in ``dtype`` on ``device``: nothing passes through another type or
    the host. The numbers of two devices differ, those of a tensor and of its parts do not: parts
    are copied out of the whole, for which all share memory as large as the largest.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device | None = None, std: float = 0.02
    ) -> None:
        self._device = torch.device("cpu") if device is None else device
        self._generator = torch.Generator(self._device).manual_seed(0)
        self._dtype = dtype
        self._std = std
        self._scratch = self._empty(0)

    def has(self, name: str) -> bool:
        """Only what is asked for by ``take`` exists."""
        return False

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Ones for norms, else N(0, std^2)."""
        return self._draw(name, self._empty(math.prod(shape)).view(shape))

    def part(
        self, name: str, shape: tuple[int, ...], axis: int, begin: int, size: int
    ) -> torch.Tensor:
        """The part of what ``take`` would have drawn."""
        elements = math.prod(shape)
        if len(self._scratch) < elements:
            self._scratch = self._empty(0)  # the smaller one may go first
            self._scratch = self._empty(elements)
        whole = self._draw(name, self._scratch[:elements].view(shape))
        return whole.narrow(axis, begin, size).clone()

    def _empty(self, elements: int) -> torch.Tensor:
        return torch.empty(elements, dtype=self._dtype, device=self._device)

    def _draw(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 1 and name.endswith(".weight"):
            return tensor.fill_(1)
        return tensor.normal_(0.0, self._std, generator=self._generator)
