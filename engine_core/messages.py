"""Wire messages between frontends and the engine core: msgpack, tagged, versioned, no pickle.

Every frame is one tagged struct. A core answers a frame that it cannot read with ``CoreError``.
"""

from typing import Literal

import msgspec

from .draft_config import SpecShape
from .plan import TokenLogprobs
from .refusal import Refused
from .sampling_params import SamplingParams

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 64 * 1024 * 1024


class FinishReason(msgspec.Struct, frozen=True, array_like=True):
    """Why a request ended. ``matched``: the stop token id or stop string, if one ended it."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str | None = None
    status: int = 200


class RequestStats(msgspec.Struct, frozen=True, array_like=True):
    """Counters of one request up to this output (SGLang's ``meta_info`` meanings).

    ``verify_ct``: steps that verified at least one draft; ``verify_tokens``: tokens those steps
    emitted, cut at a stop or the cap; ``correct_drafts`` / ``proposed_drafts`` belong to the same
    steps; ``plain_ct``: decode steps with draft length 0. ``histogram[j]``: steps with j correct
    drafts. ``spec_off_reason`` says why drafts were left out in the latest such step; "no
    room" before the length cap and "no proposal yet", which the last and the first step of most
    requests have, stand there only if no step had another reason.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    retractions: int
    verify_ct: int
    verify_tokens: int
    correct_drafts: int
    proposed_drafts: int
    plain_ct: int
    histogram: tuple[int, ...]
    spec_off_reason: str | None


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request. ``tokens``: int32 bytes, those after the last output only.

    ``stats`` comes with ``finish`` and only then. ``prompt_logprobs``: of the prompt's tokens from
    position max(1, ``logprob_start_len``) on, with the first output if they were asked for.
    """

    rid: str
    tokens: bytes
    logprobs: tuple[TokenLogprobs, ...]
    finish: FinishReason | None = None
    stats: RequestStats | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


# --- frontend to core ---------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="hello"):
    """First message of a client; answered by ``Ready`` or ``CoreError``."""

    version: int
    token: str = ""


class GenerateRequest(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="generate"
):
    """One sequence to generate; ``params.n`` is 1 here (frontends expand n).

    ``prompt``: int32 bytes, at least one token. ``cache_salt`` separates tenants in the radix
    cache and in the n-gram trie. ``speculative`` False switches drafting off for this request.
    """

    rid: str
    prompt: bytes
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    stream: bool = True
    speculative: bool = True


class AbortRequest(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="abort"
):
    """End a request by its exact id, or all of this client's with ``all_requests``."""

    rid: str
    all_requests: bool = False


class FlushCache(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="flush_cache"
):
    """Empty the radix cache and the learned n-grams; refused unless idle."""

    call: int


class GetStats(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="get_stats"
):
    """Ask for ``CoreStats``."""

    call: int


class AddCorpus(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="add_corpus"
):
    """Add a tokenized external corpus; ``documents``: int32 bytes each. Private to ``tenant``
    (a cache salt) unless it is None.
    """

    call: int
    name: str
    documents: tuple[bytes, ...]
    tenant: str | None = None


class RemoveCorpus(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="remove_corpus"
):
    """Remove an external corpus; an unknown name succeeds."""

    call: int
    name: str


class ListCorpora(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="list_corpora"
):
    """Ask for the token counts of the external corpora."""

    call: int


class Shutdown(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="shutdown"
):
    """Stop the core; with ``drain_s`` > 0 running requests may finish within that many seconds."""

    drain_s: float = 0.0


ToCore = (
    Hello
    | GenerateRequest
    | AbortRequest
    | FlushCache
    | GetStats
    | AddCorpus
    | RemoveCorpus
    | ListCorpora
    | Shutdown
)

# --- core to frontend ---------------------------------------------------------------------------


class CoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a frontend needs to know of the core it talks to.

    ``draft_shape``: how much a draft model drafts a round, by flag or by itself; None without one.
    ``simulated``: accept lengths are forced, so that times mean something and texts do not.
    ``processors``: the custom logits processors that are loaded.
    """

    model: str
    vocab_size: int
    context_length: int
    eos_ids: tuple[int, ...]
    max_total_tokens: int
    page_size: int
    max_running_requests: int
    drafter: str | None
    num_draft_tokens: int
    num_threads: int
    device: str
    dtype: str
    weight_bytes: int
    pid: int
    draft_shape: SpecShape | None = None
    simulated: bool = False
    processors: tuple[str, ...] = ()


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Answer to ``Hello``."""

    version: int
    info: CoreInfo


class Outputs(msgspec.Struct, frozen=True, array_like=True, tag="outputs"):
    """New tokens of some of this client's requests, one message a step."""

    outputs: tuple[RequestOutput, ...]


class CallReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """Answer to a numbered call: ``refused`` or a message and token counts by name."""

    call: int
    refused: Refused | None = None
    message: str = ""
    counts: dict[str, int] = {}


class CoreStats(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """Gauges and monotonic counters of the core. Times are seconds, ``*_cpu`` thread CPU time."""

    call: int
    running: int
    waiting: int
    free_pages: int
    total_pages: int
    cached_pages: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    retractions: int
    aborts: int
    finished: int
    spec_drafts: int
    spec_draft_tokens: int
    spec_accepted_tokens: int
    spec_accepted_per_pos: tuple[int, ...]
    spec_drafted_per_pos: tuple[int, ...]
    spec_verify_tokens: int
    plain_rows: int
    draft_invalid: int
    plan_cpu: float
    commit_cpu: float
    propose_cpu: float
    worker_busy: float
    wait_for_drafts: float
    ngram_nodes: int
    evicted_pages: int
    verify_budget_steps: int = 0
    verify_budget_drafts: int = 0
    verify_trimmed_drafts: int = 0
    window_drafts: int = 0
    window_short_drafts: int = 0
    window_page_failures: int = 0
    window_peak_pages: int = 0
    illegal_drafts: int = 0
    forced_drafts: int = 0
    wait_for_masks: float = 0.0


class CoreError(msgspec.Struct, frozen=True, array_like=True, tag="core_error"):
    """A frame that could not be served; ``rid`` names the request when it is known."""

    refused: Refused
    rid: str | None = None


FromCore = Ready | Outputs | CallReply | CoreStats | CoreError

_encoder = msgspec.msgpack.Encoder()
_to_core = msgspec.msgpack.Decoder(ToCore)
_from_core = msgspec.msgpack.Decoder(FromCore)


def encode(message: ToCore | FromCore) -> bytes:
    """Encode one message as one frame."""
    return _encoder.encode(message)


def decode_to_core(frame: bytes) -> ToCore | Refused:
    """Decode a frame that reached the core; what cannot be read is refused, never raised."""
    if len(frame) > MAX_FRAME_BYTES:
        return Refused("frame", f"{len(frame)} bytes exceed the limit of {MAX_FRAME_BYTES}", 413)
    try:
        return _to_core.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        return Refused("frame", f"not a message of protocol {PROTOCOL_VERSION}: {error}")


def decode_from_core(frame: bytes) -> FromCore:
    """Decode a frame that a core sent. Raises msgspec.MsgspecError on damage."""
    return _from_core.decode(frame)
