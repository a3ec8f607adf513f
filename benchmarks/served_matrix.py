"""Every feature of the capability table with every drafter, through a served API, on the CPU.

One server a drafter and one without. Each row's requests go to all of them at once and must be
answered alike, tokens and texts equal and log-probabilities within 1e-4; then once more in one
crowd, all rows mixed. Each field of a row must change an answer of plain decoding (those that may
change none, none), and the servers' counters say how many drafts each row verified and accepted.

    python benchmarks/served_matrix.py --json benchmarks/results/served-matrix.json
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from served_answers import (
    Answer,
    Ask,
    Counts,
    Difference,
    ask_all,
    counts,
    difference,
    tokens_of,
)
from served_asks import TOKENS
from served_cells import ROWS, Row, greedy_asks, refused_asks
from served_servers import DRAFTERS, MODEL, ROOT, chat_tokenizer, server
from tokenizers import Tokenizer

from outrider.engine_core.capability import Capability
from outrider.engine_core.capability_table import REFUSED, SUPPORTED
from outrider.frontend.lossless.features import Known

TOLERANCE = 1e-4
AT_ONCE = 12  # of a crowd: some wait, and higher priorities retract others


class Cell(NamedTuple):
    """A row with a drafter. ``alone``: the row's requests by themselves; ``crowd``: among all.

    ``wrong``: what differs, empty if nothing does; ``gap``: of log-probabilities, the largest.
    """

    feature: str
    drafter: str
    status: str
    requests: int
    tokens: int
    alone: Counts
    gap: float
    wrong: list[str]

    def record(self) -> dict[str, object]:
        """For JSON."""
        return self._asdict() | {"alone": self.alone._asdict()}


class Plain(NamedTuple):
    """What the server without drafts says: of each row the requests and answers."""

    rows: Sequence[Row]
    asks: list[list[Ask]]
    answers: list[list[Answer]]


def ask(url: str, asks: Sequence[Ask], at_once: int = 64) -> list[Answer]:
    """The answers to requests that are all sent at once, as far as ``at_once`` allows."""
    return asyncio.run(ask_all(url, asks, at_once))


def known_of(url: str) -> Known:
    """What rows choose stops, biases and lengths by: greedy outputs of the server."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    greedy = [tuple(answer.whole["output_ids"]) for answer in ask(url, greedy_asks())]

    def text(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens)))

    return Known(greedy, TOKENS, text, (0,))


def plain(url: str, rows: Sequence[Row]) -> Plain:
    """All rows without drafts. Raises RuntimeError for one that is not answered."""
    known = known_of(url)
    asks = [row.asks(known) for row in rows]
    answers = [ask(url, some) for some in asks]
    for row, some in zip(rows, answers, strict=True):
        for answer in some:
            if answer.status != 200:
                raise RuntimeError(f"{row.feature}: {answer.status} {answer.whole}")
    return Plain(rows, asks, answers)


def idle_fields(url: str, reference: Plain, features: Sequence[Capability]) -> list[str]:
    """Fields that change no answer though they should, or one though they may not."""
    fields = {row.feature: row.fields for row in features}
    found = []
    for row, asks, answers in zip(*reference, strict=True):
        for field in fields.get(row.feature, ()):
            some = [(one, was) for one, was in zip(asks, answers, strict=True)
                    if field in one.fields]  # fmt: skip
            same = field in row.same
            if field not in row.free and _changes(url, field, some, same) == same:
                found.append(f"{row.feature}: {field}")
    return found


def _changes(url: str, field: str, some: Sequence[tuple[Ask, Answer]], same: bool) -> bool:
    """Whether any of the answers is another one without the field; asked until one is."""
    for first in range(0, len(some), 3):
        part = some[first : first + 3]
        others = ask(url, [one.without(field) for one, _ in part])
        for (_, was), now in zip(part, others, strict=True):
            if now.status == 200 and _differ(was, now, usage=not same):
                return True
    return False


def _differ(was: Answer, now: Answer, usage: bool) -> bool:
    """Whether answers differ; without ``usage``, which a stream need not give, in all else."""
    wholes = [one.whole for one in (was, now)]
    if not usage:
        wholes = [{k: v for k, v in one.items() if k != "usage"} if isinstance(one, dict) else one
                  for one in wholes]  # fmt: skip
    first, gap = difference(*(Answer(200, whole) for whole in wholes))
    return first is not None or gap > TOLERANCE


def drafted(url: str, drafter: str, reference: Plain, crowd: bool = True) -> list[Cell]:
    """All rows with drafts, held against the plain answers; with ``crowd`` once more, mixed."""
    cells = []
    for row, asks, answers in zip(*reference, strict=True):
        before = counts(url)
        given = ask(url, asks)
        cells.append(_cell(row, drafter, answers, given, counts(url).since(before)))
    if not crowd:
        return cells
    order = [(i, j) for i, asks in enumerate(reference.asks) for j in range(len(asks))]
    random.Random(1).shuffle(order)
    mixed = ask(url, [reference.asks[i][j] for i, j in order], AT_ONCE)
    by_place = dict(zip(order, mixed, strict=True))
    for i, (row, answers) in enumerate(zip(reference.rows, reference.answers, strict=True)):
        given = [by_place[i, j] for j in range(len(answers))]
        cells[i] = _worse(cells[i], _cell(row, drafter, answers, given, None))
    return cells


def _cell(
    row: Row,
    drafter: str,
    expected: Sequence[Answer],
    given: Sequence[Answer],
    alone: Counts | None,
) -> Cell:
    """``alone``: what the server counted, None where other rows' requests ran meanwhile."""
    wrong, largest = [], 0.0
    for number, (one, other) in enumerate(zip(expected, given, strict=True)):
        first, gap = difference(one, other)
        largest = max(largest, gap)
        if first is not None or gap > TOLERANCE:
            wrong.append(_words(number, first, gap))
    if alone is not None and drafter != "none":
        wrong += _vacuous(row, alone)
    status = "FAILED" if wrong else "exact"
    tokens = sum(tokens_of(answer.whole) for answer in given)
    return Cell(row.feature, drafter, status, len(given), tokens, alone or Counts(), largest, wrong)


def _vacuous(row: Row, alone: Counts) -> list[str]:
    """What the counters should not say: equal answers without drafts show nothing."""
    if row.drafts:
        return [] if alone.accepted else ["no draft was accepted"]
    return [f"{alone.drafts} rows had drafts"] if alone.drafts else []


def _words(number: int, first: Difference | None, gap: float) -> str:
    if first is None:
        return f"request {number}: log-probabilities {gap:.3g} apart"
    return f"request {number}{first.place}: expected {first.expected!r}, got {first.got!r}"


def _worse(alone: Cell, crowd: Cell) -> Cell:
    return alone._replace(
        status="exact" if alone.status == crowd.status == "exact" else "FAILED",
        requests=alone.requests + crowd.requests,
        tokens=alone.tokens + crowd.tokens,
        gap=max(alone.gap, crowd.gap),
        wrong=alone.wrong + [f"in the crowd, {words}" for words in crowd.wrong],
    )


def refusals(url: str, drafter: str) -> list[Cell]:
    """The rows that are refused: each field must be, by its name."""
    cells = []
    for row in REFUSED:
        asks = refused_asks(row.fields)
        wrong = []
        for one, answer in zip(asks, ask(url, asks), strict=True):
            named = str(answer.whole.get("error", {}).get("param", "")).split(".")[-1]
            if answer.status != 400 or named not in row.fields or named not in one.fields:
                wrong.append(f"{sorted(one.fields)}: {answer.status}, {named!r}")
        status = "FAILED" if wrong else "refused"
        cells.append(Cell(row.feature, drafter, status, len(asks), 0, Counts(), 0.0, wrong))
    return cells


def _dumped(report: dict[str, object], cells: Sequence[dict[str, object]]) -> str:
    """JSON with a line for each cell."""
    lines = ",\n".join("  " + json.dumps(cell) for cell in cells)
    head = json.dumps(report, indent=1).removesuffix("\n}")
    return f'{head},\n "cells": [\n{lines}\n ]\n}}\n'


def main() -> int:
    """Run the matrix; exit status 1 when a cell failed, or a field is idle."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    args = parser.parse_args()
    began = time.perf_counter()
    cells: list[Cell] = []
    totals: dict[str, object] = {}
    with chat_tokenizer() as template:
        with server(None, template) as url:
            reference = plain(url, ROWS)
            cells += drafted(url, "none", reference) + refusals(url, "none")
            idle = idle_fields(url, reference, SUPPORTED)
        for name in args.only:
            with server(name, template) as url:
                some = drafted(url, name, reference) + refusals(url, name)
                total = counts(url)
            cells += some
            flags = " ".join(DRAFTERS[name][1]).replace(f"{ROOT}/", "")
            totals[name] = {"flags": flags, **total._asdict()}
            bad = [cell for cell in some if cell.status == "FAILED"]
            print(f"{name}: {len(some)} cells, {len(bad)} failed, {total}", flush=True)
            for cell in bad:
                print(f"  {cell.feature}: {cell.wrong}", flush=True)
    statuses = Counter(cell.status for cell in cells)
    report = {
        "command": "python benchmarks/served_matrix.py " + " ".join(sys.argv[1:]),
        "seconds": round(time.perf_counter() - began, 1),
        "statuses": statuses,
        "idle_fields": idle,
        "tokens": sum(cell.tokens for cell in cells),
        "drafters": totals,
    }
    args.json.write_text(_dumped(report, [cell.record() for cell in cells]))
    print(f"{len(cells)} cells: {dict(statuses)}; idle fields: {idle}")
    return 1 if statuses["FAILED"] or idle else 0


if __name__ == "__main__":
    sys.exit(main())
