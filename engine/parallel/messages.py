"""Between rank 0 and the others: what a worker is asked, in order, and how a rank comes up.

Step plans and drafts travel as they are. A launch line comes on standard input as JSON, all else
as one msgpack frame each.
"""

import msgspec

from ...engine_core.config import CoreConfig, EngineConfig
from ...engine_core.plan import HostDrafts, StepPlan
from ...engine_core.refusal import Refused


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank's first line. ``endpoint``: a ZeroMQ PAIR that rank 0 has bound; ``store``: the file
    through which the ranks meet. ``config`` is rank 0's, its device and thread count resolved.
    """

    config: EngineConfig
    rank: int
    endpoint: str
    store: str


class OpenPool(msgspec.Struct, frozen=True, array_like=True, tag="open_pool"):
    """Meet the other ranks and allocate KV pages: what fits on every rank."""

    num_pages: int


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag="prepare"):
    """Get ready for steps of this configuration."""

    config: CoreConfig


class Measure(msgspec.Struct, frozen=True, array_like=True, tag="measure"):
    """Take part in measuring T(batch tokens), or with ``drafting`` what drafting takes by rows."""

    sizes: tuple[int, ...]
    drafting: bool = False


class Collect(msgspec.Struct, frozen=True, array_like=True, tag="collect"):
    """Wait for the oldest launched step."""


class Reset(msgspec.Struct, frozen=True, array_like=True, tag="reset"):
    """Forget every slot."""


class VerifyWidth(msgspec.Struct, frozen=True, array_like=True, tag="verify_width"):
    """Verify rows have up to ``width`` query tokens from now on."""

    width: int


class Replay(msgspec.Struct, frozen=True, array_like=True, tag="replay"):
    """Take part in timing a graph."""

    rows: int
    tokens: int
    steps: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """End, after the steps already launched."""


ToRank = (
    OpenPool
    | Prepare
    | Measure
    | StepPlan
    | HostDrafts
    | Collect
    | Reset
    | VerifyWidth
    | Replay
    | Stop
)


class RankLoaded(msgspec.Struct, frozen=True, array_like=True, tag="rank_loaded"):
    """The weights are in; so many pages of KV fit beside them."""

    num_pages: int


class RankReady(msgspec.Struct, frozen=True, array_like=True, tag="rank_ready"):
    """Steps may come."""


class RankRefused(msgspec.Struct, frozen=True, array_like=True, tag="rank_refused"):
    """The configuration does not work on this rank, which ends."""

    refused: Refused


class RankFailed(msgspec.Struct, frozen=True, array_like=True, tag="rank_failed"):
    """This rank ends after an error; its traceback is on standard error."""

    message: str


FromRank = RankLoaded | RankReady | RankRefused | RankFailed

_encoder = msgspec.msgpack.Encoder()
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


def encode(message: ToRank | FromRank) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode_to_rank(frame: bytes) -> ToRank:
    """Read a frame of rank 0. Raises msgspec.MsgspecError."""
    return _to_rank.decode(frame)


def decode_from_rank(frame: bytes) -> FromRank:
    """Read a frame of another rank. Raises msgspec.MsgspecError."""
    return _from_rank.decode(frame)


def encode_launch(launch: RankLaunch) -> bytes:
    """The launch line, newline included."""
    return msgspec.json.encode(launch) + b"\n"


def decode_launch(line: bytes) -> RankLaunch:
    """Read the launch line. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(line, type=RankLaunch)
