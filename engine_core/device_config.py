"""What the flags mean on the device that the model runs on, and what is refused there."""

from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from .refusal import Refused
from .spec_shape import MAX_CUDA_TOPK

if TYPE_CHECKING:
    from .config import EngineConfig

Device = Literal["cpu", "cuda"]
Dtype = Literal["bfloat16", "float16", "float32"]
DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
MEM_FRACTIONS: dict[Device, float] = {"cpu": 0.5, "cuda": 0.9}


class Placement(NamedTuple):
    """A configuration's device, the type it computes in and its share of the free memory."""

    device: Device
    dtype: Dtype
    mem_fraction: float


def place(config: "EngineConfig", has_cuda: bool, checkpoint_dtype: str) -> Placement | Refused:
    """Resolve ``device``, ``dtype`` and ``mem_fraction_static``.

    ``has_cuda``: whether torch can use a CUDA device here. ``checkpoint_dtype``: the model's own
    type, which "auto" means on CUDA; on a CPU it means float32.
    """
    if config.device == "cuda" and not has_cuda:
        return Refused(
            "device",
            "cuda: torch finds no CUDA device here; use --device cpu, or check the driver and "
            "that torch is a CUDA build",
        )
    device: Device = "cpu" if config.device == "cpu" or not has_cuda else "cuda"
    refused = refuse_on(config, device)
    if refused is not None:
        return refused
    dtype = config.dtype
    if dtype == "auto":
        if device == "cpu":
            dtype = "float32"
        elif checkpoint_dtype in DTYPE_BYTES:
            dtype = cast(Dtype, checkpoint_dtype)
        else:
            return Refused(
                "dtype",
                f"auto: nothing computes in the checkpoint's {checkpoint_dtype}; name one of "
                f"{', '.join(DTYPE_BYTES)}",
            )
    fraction = config.mem_fraction_static
    return Placement(device, dtype, MEM_FRACTIONS[device] if fraction is None else fraction)


def refuse_on(config: "EngineConfig", device: Device) -> Refused | None:
    """Check the flags that depend on the device."""
    source = config.speculative_ngram_source
    if device == "cuda":
        return _refuse_on_cuda(config)
    if config.dtype not in ("auto", "float32"):
        return Refused(
            "dtype",
            f"{config.dtype}: a CPU computes in float32 (the weights of a bfloat16 checkpoint "
            "stay bfloat16 in memory); leave it out, or use --device cuda",
        )
    for field, given in (
        ("cuda_graph_max_bs", config.cuda_graph_max_bs is not None),
        ("disable_cuda_graph", config.disable_cuda_graph),
    ):
        if given:
            return Refused(field, "a CPU has no CUDA graphs; leave it out, or use --device cuda")
    if source != "cpu":
        return Refused(
            "speculative_ngram_source",
            f"{source}: needs a CUDA device, which keeps the requests' tokens and matches inside "
            "the step; on a CPU use cpu, whose trie has each request's own text too",
        )
    return None


def _refuse_on_cuda(config: "EngineConfig") -> Refused | None:
    topk = config.speculative_eagle_topk
    if topk is None or topk <= MAX_CUDA_TOPK:
        return None
    return Refused(
        "speculative_eagle_topk",
        f"{topk} branches, of which a GPU ranks {MAX_CUDA_TOPK} at most; use {MAX_CUDA_TOPK} or "
        "less, with the steps and draft tokens that fit it, or --device cpu",
    )
