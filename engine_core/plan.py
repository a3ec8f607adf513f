"""What crosses between the scheduler and a worker: step plans, late drafts and step results.

Arrays travel as typed byte buffers (``ids.i32`` and friends view them), so a plan is immutable,
has one encoding in a process, on the wire and in a trace, and costs no per-element objects.
"""

import msgspec

from .ids import RowKind
from .sampling_params import SamplingParams


class SlotInit(msgspec.Struct, frozen=True, array_like=True):
    """A request that enters a slot with this step; the worker resets the slot's state.

    ``prompt``: int32 bytes of the prompt, ``output``: int32 bytes of tokens generated before a
    retraction (empty at first). ``cached_len`` tokens have their KV in place through the radix
    cache, once each (source, destination) page of ``page_copies`` is copied, which comes before
    anything else that the step does with them. ``seed`` is the resolved 64-bit seed of the coupled
    rule. ``eos_ids`` are the tokens that ``min_new_tokens`` masks (EOS unless ignored, and the
    request's stop tokens). ``prompt_scores``: the first prompt position whose log-probability is
    wanted; -1: none is.
    """

    slot: int
    serial: int
    params: SamplingParams
    seed: int
    prompt: bytes
    output: bytes
    cached_len: int
    eos_ids: tuple[int, ...]
    page_copies: tuple[tuple[int, int], ...] = ()
    prompt_scores: int = -1


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag="step_plan"):
    """One ragged batch: prefill chunks and verify rows together (docs/architecture.md, "One step").

    Row r is (slots[r], kinds[r], q_caps[r], starts[r]). ``q_caps``: query tokens of the row, a
    chunk's length for prefill rows, 1 + the draft cap for verify rows. ``starts``: position of a
    chunk's first token; -1 for verify rows, whose position and first token (the bonus token of
    the slot's previous step) the worker resolves from its FutureMap. ``tokens``: the prefill
    rows' tokens, joined in row order. ``page_*``: changes to the page table, applied before the
    step. With ``late_bound`` a :class:`HostDrafts` follows before the step can run; without it
    verify rows carry the drafts of a drafter on the device, ``device_caps`` at most, or, where
    that is empty, q_cap - 1; none without one. What is left of q_cap is room for what grammars
    force.
    ``budget``: drafts that all verify rows together have verified, shared out by the drafter's
    confidence; -1: all. ``accept_caps``: most drafts that a verify row accepts, where that is less
    than it verifies (mode cap-accept without confidence); empty: no such caps.

    Of a draft with a window's pool: ``window_pages``, each once, have draft pages
    ``window_drafts`` from this step on, 0 for none. ``window_lows``: the first position of a row's
    sequence that has draft KV. Where the next whole page begins beyond the row's committed tokens,
    it has no drafts.
    """

    step: int
    late_bound: bool
    slots: bytes  # int32[R]
    kinds: bytes  # uint8[R], RowKind
    q_caps: bytes  # int32[R]
    starts: bytes  # int32[R]
    tokens: bytes  # int32[sum of q_caps over prefill rows]
    inits: tuple[SlotInit, ...]
    page_slots: bytes  # int32[U]
    page_indexes: bytes  # int32[U], column of the slot's page-table row
    page_ids: bytes  # int32[U]
    budget: int = -1
    accept_caps: bytes = b""  # int32[V], V verify rows, which come first
    window_pages: bytes = b""  # int32[D], pages of the target's pool
    window_drafts: bytes = b""  # int32[D], pages of the draft's pool
    window_lows: bytes = b""  # int32[R]
    device_caps: bytes = b""  # int32[V]

    @property
    def num_rows(self) -> int:
        """R, the number of rows."""
        return len(self.kinds)

    @property
    def verify_rows(self) -> int:
        """V, how many of them verify; they come first."""
        return self.kinds.count(RowKind.VERIFY)


class HostDrafts(msgspec.Struct, frozen=True, array_like=True, tag="host_drafts"):
    """Draft trees proposed on the host for a late-bound step, aligned with the plan's rows.

    ``counts`` int32[R]: draft nodes of a row (0 for prefill rows; at most q_cap - 1). ``tokens``
    int32[sum counts]. ``parents`` int32[sum counts]: row-local, 0 = the bonus token, node i of
    the row is i + 1; parents precede their children. ``device_caps`` int32[R]: drafts that the
    drafter on the device adds to rows without any of these; empty where there is none.
    """

    step: int
    counts: bytes
    tokens: bytes
    parents: bytes
    device_caps: bytes = b""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities (natural log, raw model distribution) at one token.

    ``top_ids`` int32[k] and ``top_values`` float32[k], best first. ``rank``: 1 and the number of
    tokens that are likelier than ``token``.
    """

    token: int
    value: float
    top_ids: bytes
    top_values: bytes
    rank: int = 0


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of row ``row``, in order: of what it emitted, or of prompt tokens."""

    row: int
    tokens: tuple[TokenLogprobs, ...]


class RowError(msgspec.Struct, frozen=True, array_like=True):
    """A row that has no token (NaN logits); its request ends with this message and status."""

    row: int
    message: str
    status: int = 500


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag="step_result"):
    """What a step decided, aligned with the plan's rows.

    ``accept_lens`` int32[R]: emitted tokens (0 for PREFILL, 1 for PREFILL_LAST, 1..q for VERIFY;
    0 for rows in ``errors``). ``tokens`` int32[sum accept_lens]: the accepted drafts and then the
    bonus token of each row. ``proposed`` int32[R]: draft nodes that might be accepted: without the
    padding of a row for which the device had less to propose, and without what a budget or a cap
    leaves out. ``depths`` int32[R]: depth of the row's draft tree, so cut. ``busy_ns``: time the
    worker spent on the step, without ``mask_wait_ns``, for which its device waited for grammars'
    masks. ``wait_ns``: time a step waited for its drafts with nothing else to run (of a late-bound
    one, the controller's cost of late binding; of others that waited for what a grammar forces
    behind the step before; else 0).
    ``confidence`` float32[D, G]: of each verify row with room for drafts, the chance that draft k
    is accepted if all before it are; empty unless it plans verify lengths. ``trimmed`` int32[R]:
    drafts that held and lie beyond a row's cap (mode cap-accept); empty elsewhere. ``illegal``:
    drafts of the host that grammars forbid, left out; ``forced`` int32[R]: drafts that grammars
    made; empty where none were.
    ``prompt_logprobs``: what chunks gave of the prompt positions that ``SlotInit`` asks for.
    """

    step: int
    accept_lens: bytes
    tokens: bytes
    proposed: bytes
    depths: bytes
    logprobs: tuple[RowLogprobs, ...] = ()
    errors: tuple[RowError, ...] = ()
    busy_ns: int = 0
    batch_tokens: int = 0
    wait_ns: int = 0
    confidence: bytes = b""
    trimmed: bytes = b""
    illegal: int = 0
    forced: bytes = b""
    prompt_logprobs: tuple[RowLogprobs, ...] = ()
    mask_wait_ns: int = 0
