"""Programmatic dependent launch: a kernel starts before the one ahead of it has ended.

All of our kernels that take ``pdl`` read nothing but the model's constants before they wait for
the kernel ahead, and write nothing: so each has seen all work before it end, and it is safe to mix
them in a stream with any others. Most let their successor start as soon as their own programs have:
a matmul's weights then come while the small kernels before it run.
"""

import torch


def launches_dependents(device: torch.device) -> bool:
    """Whether ``device`` can do so: a GPU of the Hopper generation or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
