"""The matrix: every feature without drafts at batch 1, then with drafts at several batch sizes."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ...engine_core.config import EngineConfig
from ...engine_core.divergence import ENDED, TIE_GAP
from ...engine_core.refusal import RefusedError
from ..errors import RequestFailed
from ..expand import child_params
from ..llm import LLM
from ..logit_gap import logit_gap
from ..tokenizer import Tokenizer
from .cells import (
    VALUE_GAP,
    Cell,
    Failure,
    Limits,
    Row,
    judge_draws,
    judge_lossy,
    judge_outputs,
    lost,
    unserved,
)
from .draws import draws, shifts
from .features import FEATURES, Feature, Known, base
from .outputs import Answers, Parting, Request, accepted_drafts, answers, deviation, partings
from .trace_steps import Sought, find_steps

BATCH = 8
# Batch sizes of plain decoding that show how far half precision rounds: a verify step multiplies
# batch times width rows (docs/decisions/0009-how-far-rounding-goes.md), up to 48 of a chain of 5.
ROUNDING = (2, 4, 8, 16, 24, 32, 48)


class Reference(NamedTuple):
    """A feature's requests and what plain decoding answers, or the error of one of them.

    ``drawn``: the answers are draws, of which only the distribution can be compared.
    """

    feature: Feature
    requests: list[Request]
    plain: Answers
    drawn: bool
    error: RefusedError | RequestFailed | None = None


class Matrix:
    """All rows on one engine. ``prompts``: token ids; ``tokens``: the most that an output has;
    ``more``: rows behind those of every engine.

    Making it runs plain decoding. Raises RefusedError for prompts that do not fit, EngineDead.
    """

    def __init__(
        self,
        llm: LLM,
        tokenizer: Tokenizer,
        config: EngineConfig,
        prompts: Sequence[list[int]],
        tokens: int,
        more: Sequence[Feature] = (),
    ) -> None:
        self._llm = llm
        self._tokenizer = tokenizer
        self._by_law, self._lossy = config.draws_drafts, config.lossy
        most = llm.info.max_running_requests
        self.batches = [1, *([min(BATCH, most)] if most > 1 else [])]
        self._wide = min(max(ROUNDING), most)
        self._gaps: dict[tuple[object, ...], float] = {}
        self._steps: dict[tuple[str, int], int] = {}  # done before a feature's cell, by batch
        requests = [Request(i, prompt, base(tokens)) for i, prompt in enumerate(prompts)]
        greedy = [each[0].token_ids for each in answers(llm, requests, 1, False)]
        known = Known(greedy, tokens, tokenizer.decode, llm.info.eos_ids)
        features = (*FEATURES, *more)
        self._references = [self._reference(known, requests, feature) for feature in features]
        drawn = [one for one in self._references if one.drawn and one.error is None]
        tests = (len(list(shifts(one.requests, one.plain, one.plain))) for one in drawn)
        self._tests = len(self.batches) * sum(tests)
        self.limits = Limits()
        if llm.info.dtype != "float32":
            self.limits = self._rounding()

    @property
    def plain_tokens(self) -> int:
        """Tokens of all plain outputs that drafts are compared with."""
        return sum(
            len(sample.token_ids)
            for one in self._references
            for each in one.plain
            for sample in each
        )

    def rows(self) -> Iterator[Row]:
        """Each feature with drafts, compared as it comes.

        Caches are empty at the first batch size. Learned n-grams know the outputs at the next one:
        there are wrong drafts, and there are long runs of right ones.
        """
        for reference in self._references:
            self._llm.flush_cache()
            cells: list[Cell] = []
            accepted = proposed = 0
            for batch in self.batches:
                if reference.error is not None:
                    cells.append(unserved(batch, reference.error))
                    continue
                self._steps[reference.feature.name, batch] = self._llm.stats().steps
                try:
                    given = self._drafted(reference, batch)
                except (RefusedError, RequestFailed) as error:
                    cells.append(lost(batch, error))
                    continue
                some = accepted_drafts(given)
                accepted, proposed = accepted + some[0], proposed + some[1]
                cells.append(self._judge(reference, given, batch))
            yield Row(
                feature=reference.feature.name,
                cells=cells,
                accepted_drafts=accepted,
                proposed_drafts=proposed,
            )

    def located(self, rows: Sequence[Row], trace: str) -> list[Row]:
        """The rows with the steps of a finished trace in which they failed."""
        failed: list[tuple[int, int]] = []
        wanted: list[Sought] = []
        for i, (row, reference) in enumerate(zip(rows, self._references, strict=True)):
            for j, cell in enumerate(row.cells):
                if cell.failure is not None and cell.failure.output:
                    failed.append((i, j))
                    after = self._steps[reference.feature.name, cell.batch]
                    wanted.append(_sought(reference, cell.failure, after))
        steps = dict(zip(failed, find_steps(trace, wanted), strict=True))
        return [
            replace(row, cells=[_at_step(c, steps.get((i, j))) for j, c in enumerate(row.cells)])
            for i, row in enumerate(rows)
        ]

    def _reference(self, known: Known, prompts: Sequence[Request], feature: Feature) -> Reference:
        requests = [
            request._replace(params=feature.params(known, request.number)) for request in prompts
        ]
        drawn = self._by_law and not requests[0].params.greedy
        try:
            if drawn:
                plain = draws(self._llm, requests, self._wide, False)
            else:
                plain = answers(self._llm, requests, 1, False)
        except (RefusedError, RequestFailed) as error:
            return Reference(feature, requests, [], drawn, error)
        return Reference(feature, requests, plain, drawn)

    def _rounding(self) -> Limits:
        """How far plain decoding is from itself at other batch sizes, over all features."""
        gap, value = TIE_GAP, VALUE_GAP
        for i, reference in enumerate(self._references):
            if reference.drawn or reference.error is not None:
                continue
            try:
                more = self._rounding_of(reference)
            except (RefusedError, RequestFailed) as error:
                self._references[i] = reference._replace(plain=[], error=error)
                continue
            gap, value = max(gap, more.gap), max(value, more.value)
        # The largest of them still counts as rounding.
        return Limits(math.nextafter(gap, math.inf), value)

    def _rounding_of(self, reference: Reference) -> Limits:
        gap, value = TIE_GAP, VALUE_GAP
        requests, count = reference.requests, len(reference.requests)
        self._llm.flush_cache()  # as with drafts: a prompt computed as a whole rounds otherwise
        for batch in (size for size in ROUNDING if size <= self._wide):
            places = [i % count for i in range(max(count, batch))]
            some = [requests[i] for i in places]
            plain = [reference.plain[i] for i in places]
            others = answers(self._llm, some, batch, False)
            gaps = [self._gap(parting) for parting in partings(some, plain, others)]
            gap = max([gap, *filter(math.isfinite, gaps)])
            values = deviation(some, plain, others)
            if values is not None and math.isfinite(values.size):
                value = max(value, values.size)
        return Limits(gap, value)

    def _drafted(self, reference: Reference, batch: int) -> Answers:
        take = draws if reference.drawn else answers
        return take(self._llm, reference.requests, batch, True)

    def _judge(self, reference: Reference, given: Answers, batch: int) -> Cell:
        requests, plain = reference.requests, reference.plain
        if reference.drawn:
            found = list(shifts(requests, plain, given))
            return judge_draws(batch, found, self._tests, self._tokenizer.token_text)
        parted = list(partings(requests, plain, given))
        if self._lossy and not requests[0].params.greedy:
            return judge_lossy(batch, parted)
        return judge_outputs(
            batch,
            parted,
            deviation(requests, plain, given),
            self.limits,
            self._gap,
            self._tokenizer.token_text,
        )

    def _gap(self, parting: Parting) -> float:
        if ENDED in (parting.expected, parting.got):
            return math.inf
        request, sample = parting.request, parting.sample
        key = (id(request.params), sample, parting.before, parting.expected, parting.got)
        if key not in self._gaps:
            self._gaps[key] = logit_gap(
                self._llm,
                request.prompt,
                parting.before,
                child_params(request.params, sample),
                parting.expected,
                parting.got,
            )
        return self._gaps[key]


def _sought(reference: Reference, failure: Failure, after: int) -> Sought:
    request = reference.requests[failure.prompt]
    params = child_params(request.params, failure.sample)
    return Sought(request.prompt, params, failure.output, after)


def _at_step(cell: Cell, step: int | None) -> Cell:
    return cell if cell.failure is None else replace(cell, failure=replace(cell.failure, step=step))
