"""A step's rows on their way to a device: laid out, written to one block of int32, and answered."""

from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

class StepAnswer(NamedTuple):
    """A step's output by rows: bytes as a StepResult has them. ``silent``: rows that emitted
    nothing although they have nodes.
    """

    lens: bytes
    tokens: bytes
    proposed: bytes
    depths: bytes
    confidence: bytes
    trimmed: bytes
    silent: list[int]

@final
class PackedRows:
    """R rows of a StepPlan, and drafts for them, as the host knows them.

    ``slots`` .. ``tokens`` are the plan's bytes; ``counts`` .. ``device_caps`` those of its
    HostDrafts, None without any: then, if there is a drafter ``on_device``, it fills all verify
    rows. ``max_slots``: slots are below it. Raises ValueError for rows or drafts that break their
    contract, naming the row.

    ``tokens`` T, of which ``nodes`` N have logits that count. ``verify_rows`` leading rows are
    verify rows unless it is -1 (the kinds are mixed up). ``longest``: the most query tokens of
    another row. ``device_drafts``: what the device drafts for all rows, at most; until then they
    are padding.
    """

    def __init__(
        self,
        slots: bytes,
        kinds: bytes,
        q_caps: bytes,
        starts: bytes,
        tokens: bytes,
        max_slots: int,
        vocab_size: int,
        on_device: bool = False,
        counts: bytes | None = None,
        draft_tokens: bytes | None = None,
        draft_parents: bytes | None = None,
        device_caps: bytes | None = None,
    ) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def nodes(self) -> int: ...
    @property
    def verify_rows(self) -> int: ...
    @property
    def longest(self) -> int: ...
    @property
    def device_drafts(self) -> int: ...
    @property
    def decode_only(self) -> bool:
        """Whether every row is a verify row, so that every token is a node."""

    @property
    def prefill_tokens(self) -> int:
        """Query tokens behind the verify rows; only where the latter lead."""

    @property
    def slots(self) -> NDArray[np.int32]:
        """int32[R], read-only."""

    @property
    def kinds(self) -> NDArray[np.uint8]:
        """uint8[R], read-only."""

    @property
    def caps(self) -> NDArray[np.int32] | None:
        """int32[R]: drafts of each row that the device makes; None if there are none. A copy."""

    @property
    def q_lens(self) -> NDArray[np.int32]:
        """int32[R]: query tokens of each row, a copy."""

    @property
    def node_cu(self) -> NDArray[np.int32]:
        """int32[R + 1]: prefix sums of the rows' nodes, a copy."""

    @property
    def depths(self) -> NDArray[np.int32]:
        """int32[R]: depth of each row's given drafts, a copy."""

    def fill(
        self,
        block: NDArray[np.int32],
        edges: NDArray[np.int64],
        spare_slot: int,
        gap: int,
        page_slots: bytes,
        page_columns: bytes,
        page_ids: bytes,
        entries: NDArray[np.int32] | None,
        accept_caps: bytes,
        budget: int,
    ) -> None:
        """Write the rows and U page updates to ``block``, whose fields begin at ``edges`` int64[19]
        (the last: where they end); pad the rest.

        The rows behind the leading verify rows stand behind ``gap`` rows of padding. ``entries``
        int32[E, 3]: slot, length, outputs; None for none. ``accept_caps``: of leading rows, the
        others have 0. Rows of padding name ``spare_slot``, are of kind PREFILL and have no tokens;
        tokens of padding are 0 without a parent, nodes of padding the last token. Entries of
        padding are empty requests in the spare slot. Raises ValueError for what does not fit; the
        block is undefined then.
        """

    def read(
        self,
        out: NDArray[np.int32],
        room: int,
        width: int,
        gap: int,
        drafted: bool,
        gamma: int,
        trims: bool,
    ) -> StepAnswer:
        """A step's output (see DeviceStep) of ``room`` rows, in which these stand as in the block.

        ``drafted``: it says what the device drafted; ``gamma`` drafts a row have a confidence;
        ``trims``: it says what caps trimmed. Raises ValueError for an output that is too short or
        says that a row emits more than ``width`` tokens.
        """
