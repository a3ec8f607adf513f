"""The requests in slots that use custom logits processors, and what a step asks of these."""

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ...engine_core.ids import I32, I64, RowKind, i32
from ...engine_core.plan import SlotInit, StepPlan
from ...engine_core.processor_calls import said
from ...engine_core.processor_loader import ProcessorSet
from ...engine_core.processor_names import FIELD
from ...engine_core.refusal import Refused, RefusedError
from ...kernels.logit_edits import MASKED
from ..logits_processor import LogitsProcessor, ProcessorNodes, RowText
from .slot_grammars import RowTokens

_NOTHING, _BROKEN = 1, 2  # verdicts on what a processor left of a row


class _Text:
    """Tokens int32 that grow at their end."""

    def __init__(self, *parts: bytes) -> None:
        self._room = i32(b"".join(parts)).copy()
        self._length = len(self._room)

    @property
    def tokens(self) -> I32:
        """int32[L], which nobody may write to."""
        view = self._room[: self._length]
        view.flags.writeable = False
        return view

    def extend(self, tokens: I32) -> None:
        """Add tokens; views of before stay as they are."""
        end = self._length + len(tokens)
        if end > len(self._room):
            more = np.empty(end + len(self._room) // 2, dtype=np.int32)
            more[: self._length] = self._room[: self._length]
            self._room = more
        self._room[self._length : end] = tokens
        self._length = end


@dataclass(slots=True)
class _Slot:
    """``requests``: by processor, what it made of the arguments. ``ends``: tokens behind which a
    request's text does not go on."""

    requests: dict[str, object]
    text: _Text
    prompt_length: int
    ends: frozenset[int]


class _Call(NamedTuple):
    """A processor's part in a step: its nodes, and their ``places`` int64[n] among the step's."""

    name: str
    processor: LogitsProcessor
    nodes: ProcessorNodes
    places: I64


class _Verdicts(NamedTuple):
    """What a call left of its rows: 0, or what is wrong, int32[n]; on a GPU on their way here."""

    name: str
    places: I64
    found: torch.Tensor


class ProcessorWork:
    """What processors do in one step of rows, and what went wrong with it."""

    def __init__(self, calls: Sequence[_Call], rows: RowTokens) -> None:
        self._calls = calls
        self._rows = rows
        self._raised: dict[int, tuple[Refused, str]] = {}
        self._verdicts: list[_Verdicts] = []

    def apply(self, logits: torch.Tensor, index: I64 | None = None) -> None:
        """Edit float32[M, V] in place: rows of the step's nodes ``index`` (rising), None for all.

        What was ruled out stays so. Rows in which a processor left nothing, or no numbers, become
        NaN, as do those on which it raised.
        """
        for call in self._calls:
            places = call.places if index is None else np.searchsorted(index, call.places)
            rows = _upload(places, logits.device)
            part = logits.index_select(0, rows)
            ruled = part <= MASKED
            best = part.amax(1)
            sound = best.isfinite() & (best > MASKED)
            self._run(call, part, logits, rows, 0, len(call.nodes))
            part.clamp_(min=MASKED).masked_fill_(ruled, MASKED)
            best = part.amax(1)
            verdict = torch.where(best.isfinite(), (best <= MASKED) * _NOTHING, _BROKEN)
            verdict = torch.where(sound, verdict, 0).int()
            part.masked_fill_((verdict > 0)[:, None], torch.nan)
            logits.index_copy_(0, rows, part)
            self._verdicts.append(_Verdicts(call.name, call.places, _download(verdict)))

    def refusal(self, row: int) -> Refused | None:
        """Why a row has no token, where processors are to blame. On a GPU once the step is over."""
        first, last = int(self._rows.node_begins[row]), int(self._rows.node_ends[row])
        for node in sorted(node for node in self._raised if first <= node < last):
            refused, trace = self._raised[node]
            sys.stderr.write(trace)
            return refused
        for name, places, found in self._verdicts:
            for wrong in found.numpy()[(first <= places) & (places < last)].tolist():
                if wrong == _BROKEN:
                    return Refused(f"{FIELD}.{name}", "the processor made NaN or +inf logits", 500)
                if wrong == _NOTHING:
                    return Refused(f"{FIELD}.{name}", "the processor left no token to choose from")
        return None

    def _run(
        self,
        call: _Call,
        part: torch.Tensor,
        logits: torch.Tensor,
        rows: torch.Tensor,
        begin: int,
        end: int,
    ) -> None:
        """Apply to the nodes from ``begin`` up to ``end``; whose fault an exception is shows when
        the others' part is done again without.
        """
        mine = part[begin:end]
        try:
            _apply(call, mine, call.nodes.part(begin, end))
        except (Exception, SystemExit) as error:  # a plug-in may raise anything
            if end - begin == 1:
                self._raised[int(call.places[begin])] = _blame(call, error)
                mine.fill_(torch.nan)
                return
            mine.copy_(logits.index_select(0, rows[begin:end]))
            middle = (begin + end) // 2
            self._run(call, part, logits, rows, begin, middle)
            self._run(call, part, logits, rows, middle, end)


class SlotProcessors:
    """The processors of an engine and the texts of the requests that use them, by slot.

    Texts are moved by what steps emit. Raises RefusedError for what is no processor.
    """

    def __init__(self, processors: ProcessorSet) -> None:
        self._processors = processors
        self._order: dict[str, LogitsProcessor] = {}
        for name, processor in processors.loaded:
            if not isinstance(processor, LogitsProcessor):
                raise RefusedError(Refused(FIELD, f"{name}: has no request or no apply"))
            self._order[name] = processor
        self._slots: dict[int, _Slot] = {}

    def concern(self, slots: I32) -> bool:
        """Whether any of these slots' requests uses one."""
        return bool(self._slots) and not self._slots.keys().isdisjoint(slots.tolist())

    def enter(self, plan: StepPlan) -> None:
        """Requests enter their slots, some with text from before a retraction."""
        for init in plan.inits:
            self._slots.pop(init.slot, None)
            if init.params.logits_processors:
                self._slots[init.slot] = self._slot(init)

    def reset(self) -> None:
        """Forget every slot."""
        self._slots.clear()

    def work(self, slots: I32, kinds: bytes, rows: RowTokens) -> ProcessorWork:
        """What there is to do in a step of these rows."""
        texts: dict[str, list[RowText]] = {name: [] for name in self._order}
        paths: dict[str, list[tuple[int, ...]]] = {name: [] for name in self._order}
        index: dict[str, list[int]] = {name: [] for name in self._order}
        for row, slot in enumerate(slots.tolist()):
            mine = self._slots.get(slot)
            first, last = int(rows.node_begins[row]), int(rows.node_ends[row])
            if mine is None or first == last:
                continue
            found = {first: ()} if kinds[row] != RowKind.VERIFY else _paths(rows, row, mine.ends)
            for name, request in mine.requests.items():
                text = RowText(request, mine.text.tokens, mine.prompt_length)
                texts[name] += [text] * len(found)
                paths[name] += found.values()
                index[name] += found.keys()
        return ProcessorWork(
            [
                _Call(
                    name,
                    processor,
                    ProcessorNodes(texts[name], paths[name]),
                    np.array(index[name], dtype=np.int64),
                )
                for name, processor in self._order.items()
                if index[name]
            ],
            rows,
        )

    def advance(self, slots: I32, accept_cu: I32, emitted: I32) -> None:
        """Move over what the step's rows emitted: ``emitted[accept_cu[r] : accept_cu[r + 1]]``."""
        for row, slot in enumerate(slots.tolist() if self._slots else ()):
            mine = self._slots.get(slot)
            if mine is not None:
                mine.text.extend(emitted[accept_cu[row] : accept_cu[row + 1]])

    def _slot(self, init: SlotInit) -> _Slot:
        calls = init.params.logits_processors
        return _Slot(
            {name: self._processors.request(name, calls[name]) for name in calls},
            _Text(init.prompt, init.output),
            len(init.prompt) // 4,
            frozenset(init.eos_ids),
        )


def _paths(rows: RowTokens, row: int, ends: frozenset[int]) -> dict[int, tuple[int, ...]]:
    """The drafts before each node of a verify row, by its number among the step's nodes.

    Behind a token that ends the text, and behind what hangs on nothing, nobody asks.
    """
    begin, end = int(rows.begins[row]), int(rows.ends[row])
    first = int(rows.node_begins[row])
    tokens = rows.tokens[begin:end].tolist()
    parents = range(-1, end - begin - 1)
    if rows.parents is not None:
        parents = rows.parents[begin:end].tolist()
    found: dict[int, tuple[int, ...]] = {first: ()}
    for node in range(1, len(tokens)):
        before = found.get(first + parents[node]) if parents[node] >= 0 else None
        if before is not None and tokens[node] not in ends:
            found[first + node] = (*before, tokens[node])
    return found


def _apply(call: _Call, logits: torch.Tensor, nodes: ProcessorNodes) -> None:
    for request in nodes.requests:
        if isinstance(request, Refused):  # it took the arguments before, and does not any more
            raise RefusedError(request)
    returned: object = call.processor.apply(logits, nodes)  # type: ignore[func-returns-value]
    if returned is not None:
        kind = type(returned).__name__
        raise TypeError(f"apply returned {kind}; it must edit the logits in place")


def _blame(call: _Call, error: BaseException) -> tuple[Refused, str]:
    """Why a request ends, and the traceback."""
    if isinstance(error, RefusedError):
        return error.refused, ""
    reason = f"the processor failed: {type(error).__name__}: {said(error)}"
    trace = "".join(traceback.format_exception(error))
    return Refused(f"{FIELD}.{call.name}", reason, 500), f"outrider: {call.name}: {trace}"


def _upload(places: I64, device: torch.device) -> torch.Tensor:
    """int64[n] on the device, without waiting for it, which pageable memory would."""
    host = torch.from_numpy(places)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _download(verdict: torch.Tensor) -> torch.Tensor:
    """int32[n] on the host, there once the device has passed this point."""
    if not verdict.is_cuda:
        return verdict
    host = torch.empty(len(verdict), dtype=verdict.dtype, pin_memory=True)
    return host.copy_(verdict, non_blocking=True)
