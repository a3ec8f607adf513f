"""Nominal integer and string types: a slot can never be passed where a page is meant."""

from enum import IntEnum
from typing import NewType

import numpy as np
import numpy.typing as npt

RequestId = NewType("RequestId", str)
SlotId = NewType("SlotId", int)
PageId = NewType("PageId", int)
Position = NewType("Position", int)
TokenId = NewType("TokenId", int)

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


class RowKind(IntEnum):
    """What a row of a step does (one byte on the wire)."""

    PREFILL = 0  # a chunk of the prompt; emits nothing
    PREFILL_LAST = 1  # the prompt's last chunk; emits the first token
    VERIFY = 2  # the bonus token and 0..k drafts; emits 1..k+1 tokens


def i32(buffer: bytes) -> I32:
    """View wire bytes as int32[N] without a copy; read-only."""
    return np.frombuffer(buffer, dtype=np.int32)


def u8(buffer: bytes) -> U8:
    """View wire bytes as uint8[N] without a copy; read-only."""
    return np.frombuffer(buffer, dtype=np.uint8)


def f32(buffer: bytes) -> F32:
    """View wire bytes as float32[N] without a copy; read-only."""
    return np.frombuffer(buffer, dtype=np.float32)
