"""Wire messages between SDK clients and a server's gateway: text level, msgpack, no pickle.

One frame a message. The gateway answers what it cannot read with ``ClientRefused``.
"""

import msgspec

from ..engine_core.messages import CoreStats, FinishReason
from ..engine_core.plan import TokenLogprobs
from ..engine_core.refusal import Refused
from ..engine_core.sampling_params import SamplingParams
from .meta_info import MetaInfo

SDK_VERSION = 1
MAX_SDK_FRAME_BYTES = 16 * 1024 * 1024
MAX_RID_CHARS = 256
HEARTBEAT_S = 1.0  # a client sends something at least this often
SILENCE_S = 5.0  # a peer that was silent for this long is gone

# --- client to gateway --------------------------------------------------------------------------


class ClientHello(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="client_hello"
):
    """First message; answered by ``Welcome`` or ``ClientRefused``."""

    version: int
    token: str = ""


class ClientGenerate(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="client_generate"
):
    """A prompt to continue: ``text``, or ``token_ids`` (int32 bytes) where text is None.
    ``params.n`` may exceed 1.
    """

    rid: str
    text: str | None
    token_ids: bytes
    params: SamplingParams
    stream: bool = True
    priority: int = 0
    cache_salt: str = ""
    speculative: bool = True


class ClientAbort(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="client_abort"
):
    """End one of this client's requests, or all of them with ``all_requests``."""

    rid: str = ""
    all_requests: bool = False


class ClientStats(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="client_stats"
):
    """Ask for the core's counters."""

    call: int


class ClientInfo(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="client_info"
):
    """Ask for what ``/server_info`` shows."""

    call: int


class ClientFlush(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="client_flush"
):
    """Empty the radix cache and the learned n-grams; refused unless idle."""

    call: int


class ClientPing(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="client_ping"
):
    """Sign of life; answered by ``Pong``."""


class ClientBye(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="client_bye"
):
    """The client leaves; its requests are aborted."""


ToGateway = (
    ClientHello
    | ClientGenerate
    | ClientAbort
    | ClientStats
    | ClientInfo
    | ClientFlush
    | ClientPing
    | ClientBye
)

# --- gateway to client --------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Answer to ``ClientHello``."""

    version: int
    model: str
    context_length: int


class TextChunk(msgspec.Struct, frozen=True, array_like=True, tag="text_chunk"):
    """New text and tokens (int32 bytes) of completion ``index`` of a request.

    ``prompt_logprobs``: as in Delta.
    """

    rid: str
    index: int
    text: str
    tokens: bytes
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    meta_info: MetaInfo | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class StatsReply(msgspec.Struct, frozen=True, array_like=True, tag="stats_reply"):
    """Answer to ``ClientStats``."""

    call: int
    stats: CoreStats


class JsonReply(msgspec.Struct, frozen=True, array_like=True, tag="json_reply"):
    """Answer to ``ClientInfo`` and ``ClientFlush``: a JSON object."""

    call: int
    body: bytes


class ClientRefused(msgspec.Struct, frozen=True, array_like=True, tag="client_refused"):
    """What was not served, and why; ``rid`` or ``call`` name what it answers when known."""

    refused: Refused
    rid: str | None = None
    call: int | None = None


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """Answer to ``ClientPing``."""


FromGateway = Welcome | TextChunk | StatsReply | JsonReply | ClientRefused | Pong

_encoder = msgspec.msgpack.Encoder()
_to_gateway = msgspec.msgpack.Decoder(ToGateway)
_from_gateway = msgspec.msgpack.Decoder(FromGateway)


def encode(message: ToGateway | FromGateway) -> bytes:
    """Encode one message as one frame."""
    return _encoder.encode(message)


def decode_to_gateway(frame: bytes) -> ToGateway | Refused:
    """Decode a client's frame; what cannot be read is refused, never raised."""
    if len(frame) > MAX_SDK_FRAME_BYTES:
        return Refused(
            "frame", f"{len(frame)} bytes exceed the limit of {MAX_SDK_FRAME_BYTES}", 413
        )
    try:
        return _to_gateway.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        return Refused("frame", f"not a message of SDK protocol {SDK_VERSION}: {error}")


def decode_from_gateway(frame: bytes) -> FromGateway:
    """Decode a gateway's frame. Raises msgspec.MsgspecError on damage."""
    return _from_gateway.decode(frame)
