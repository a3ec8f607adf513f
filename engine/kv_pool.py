"""The paged KV pool of a model, target or draft."""

from collections.abc import Iterable

import torch

from ..engine_core.model_config import ModelConfig
from ..engine_core.model_sizes import kv_bytes_per_token
from ..engine_core.plan import StepPlan


class KVPool:
    """Keys and values of every layer, in pages of ``page_size`` tokens.

    Slot = page * page_size + offset. Page 0 is the sink: padding writes go there and nothing reads
    it, so ``num_pages`` usable pages are numbered 1..num_pages. ``data`` is
    [layers, 2 (key, value), slots, kv heads, head_dim] and starts as zeros.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"num_pages, page_size: must be at least 1, are {num_pages} and {page_size}"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (
            config.num_hidden_layers,
            2,
            (num_pages + 1) * page_size,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.data = torch.zeros(shape, dtype=dtype, device=device)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value caches of a layer, each [slots, kv heads, head_dim]."""
        return self.data[index, 0], self.data[index, 1]

    def move(self, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> None:
        """Copy slot ``src_slots[i]`` to ``dst_slots[i]`` (int64[n]) in all layers.

        All sources are read before the first write, so the two lists may overlap; destinations
        must differ from each other.
        """
        if src_slots.numel():
            self.data[:, :, dst_slots] = self.data[:, :, src_slots]

    def copy_page(self, source: int, destination: int) -> None:
        """Copy a page in all layers; the two must differ."""
        size = self.page_size
        pages = self.data[:, :, destination * size : (destination + 1) * size]
        pages.copy_(self.data[:, :, source * size : (source + 1) * size])


def copy_pages(plan: StepPlan, pools: Iterable[KVPool]) -> None:
    """Copy what requests that enter a slot need of cached pages, in every pool with these pages.

    Before anything else of the step. Raises ValueError for a page that a pool does not have.
    """
    for init in plan.inits:
        for source, destination in init.page_copies:
            for pool in pools:
                if not (0 < source <= pool.num_pages and 0 < destination <= pool.num_pages):
                    raise ValueError(
                        f"step {plan.step} copies page {source} to {destination}, of 1 to "
                        f"{pool.num_pages}"
                    )
                pool.copy_page(source, destination)


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """KV bytes that one token takes over all layers."""
    return kv_bytes_per_token(config, dtype.itemsize)
