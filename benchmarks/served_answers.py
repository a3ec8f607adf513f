"""Requests to a server and its answers, put into a form in which two servers' can be compared."""

import asyncio
import json
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
# What two answers to one request may differ in: times, ids, the cache's share, speculation.
_OWN = {"id", "rid", "created", "object", "e2e_latency", "cached_tokens", "num_retractions",
        "prompt_tokens_details"}  # fmt: skip
_GROWING = ("text", "content", "arguments")
_METRICS = {
    "drafts": "spec_decode_num_drafts_total",
    "draft_tokens": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
    "retracted": "num_retracted_reqs",
}


class Ask(NamedTuple):
    """A request: an endpoint and a JSON body."""

    path: str
    body: dict[str, Any]

    @property
    def fields(self) -> set[str]:
        """The names of everything that it asks for."""
        sampling = self.body.get("sampling_params", {})
        every = sampling if isinstance(sampling, list) else [sampling]
        return set(self.body).union(*every)

    def without(self, field: str) -> "Ask":
        """The same request, less one field wherever it is."""
        body = {name: value for name, value in self.body.items() if name != field}
        sampling = body.get("sampling_params")
        if isinstance(sampling, dict):
            body["sampling_params"] = {k: v for k, v in sampling.items() if k != field}
        elif isinstance(sampling, list):
            body["sampling_params"] = [
                {k: v for k, v in each.items() if k != field} for each in sampling
            ]
        return Ask(self.path, body)


class Answer(NamedTuple):
    """``whole``: the JSON of an answer, of a stream put together. ``chunks``: of a stream."""

    status: int
    whole: Any
    chunks: int = 0


class Counts(NamedTuple):
    """What a server counted: rows verified with drafts, their draft tokens, those accepted, and
    running requests that had to wait again.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    retracted: int = 0

    def since(self, before: "Counts") -> "Counts":
        """What was counted since."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


class Difference(NamedTuple):
    """Where two answers differ first: a path into the JSON, and both values."""

    place: str
    expected: object
    got: object


async def ask_all(url: str, asks: Sequence[Ask], at_once: int) -> list[Answer]:
    """The answers to all requests, of which up to ``at_once`` are open at a time."""
    gate = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, verify=False) as client:

        async def one(ask: Ask) -> Answer:
            async with gate:
                return await _answer(client, ask)

        return list(await asyncio.gather(*map(one, asks)))


async def _answer(client: httpx.AsyncClient, ask: Ask) -> Answer:
    response = await client.post(ask.path, json=ask.body)
    if response.status_code != 200 or not ask.body.get("stream"):
        return Answer(response.status_code, response.json())
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    if lines[-1] != "[DONE]":
        raise RuntimeError(f"a stream without an end: {lines[-1]}")
    chunks = [json.loads(line) for line in lines[:-1]]
    for chunk in chunks:
        if "error" in chunk:
            return Answer(500, chunk)
    return Answer(200, joined(ask.path, chunks), len(chunks))


def joined(path: str, chunks: Sequence[dict[str, Any]]) -> Any:
    """What the same request without ``stream`` answers (in OpenAI's forms all but the usage)."""
    if path == GENERATE:  # each chunk has everything so far
        last = {chunk.pop("index", 0): chunk for chunk in chunks}
        return last[0] if len(last) == 1 else [last[i] for i in sorted(last)]
    whole: dict[str, Any] = {"choices": {}}
    for chunk in chunks:
        choices = chunk.pop("choices")
        whole.update({name: value for name, value in chunk.items() if value is not None})
        for choice in choices:
            known = whole["choices"].setdefault(choice["index"], {})
            _add(known, choice)
    whole["choices"] = [whole["choices"][i] for i in sorted(whole["choices"])]
    for choice in whole["choices"]:
        if path == CHAT:
            choice["message"] = choice.pop("delta")
            choice["message"].setdefault("content", "")
    return whole


def _add(known: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a part of a choice: texts and lists grow, objects part by part, others are replaced."""
    for name, value in part.items():
        old = known.get(name)
        if name == "tool_calls":
            calls = known.setdefault(name, [])
            for call in value:
                if call["index"] == len(calls):
                    calls.append({})
                _add(calls[call["index"]], call)
        elif isinstance(value, dict):
            if old is None:
                known[name] = {}
            _add(known[name], value)
        elif isinstance(old, list) or (isinstance(old, str) and name in _GROWING):
            known[name] = old + value
        elif value is not None or name not in known:
            known[name] = value


def difference(expected: Answer, got: Answer) -> tuple[Difference | None, float]:
    """Where two answers differ first, and by how much numbers of equal places differ at most.

    Numbers are log-probabilities, so they may: how far is the caller's to judge.
    """
    if expected.status != got.status:
        return Difference("status", expected.status, got.status), 0.0
    walk = _Walk()
    walk.compare("", expected.whole, got.whole)
    return walk.first, walk.largest


class _Walk:
    """Through two JSON values at once."""

    def __init__(self) -> None:
        self.first: Difference | None = None
        self.largest = 0.0

    def compare(self, place: str, a: Any, b: Any) -> None:
        if isinstance(a, dict) and isinstance(b, dict):
            mine, theirs = _common(a), _common(b)
            if mine.keys() != theirs.keys():
                self._differ(place, sorted(mine), sorted(theirs))
            for name in sorted(mine.keys() & theirs.keys()):
                self.compare(f"{place}.{name}", mine[name], theirs[name])
        elif isinstance(a, list) and isinstance(b, list):
            for i, (x, y) in enumerate(zip(a, b, strict=False)):
                self.compare(f"{place}[{i}]", x, y)
            if len(a) != len(b):
                self._differ(f"{place}: length", len(a), len(b))
        elif isinstance(a, float) and isinstance(b, float) and math.isfinite(a - b):
            self.largest = max(self.largest, abs(a - b))
        elif a != b or type(a) is not type(b):
            self._differ(place, a, b)

    def _differ(self, place: str, a: object, b: object) -> None:
        if self.first is None:
            self.first = Difference(place, a, b)


def _common(some: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in some.items()
        if name not in _OWN and not name.startswith("spec_")
    }


def tokens_of(answer: Any) -> int:
    """Tokens that an answer holds."""
    if isinstance(answer, list):
        return sum(map(tokens_of, answer))
    if isinstance(answer, dict):
        own = sum(len(answer.get(name, ())) for name in ("output_ids", "token_ids"))
        return own + sum(map(tokens_of, answer.get("choices", ())))
    return 0


def counts(url: str) -> Counts:
    """A server's counters now."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    found = {}
    for name, metric in _METRICS.items():
        match = re.search(rf"^outrider:{metric} (\S+)$", text, re.MULTILINE)
        if match is None:
            raise RuntimeError(f"/metrics has no {metric}")
        found[name] = int(float(match[1]))
    return Counts(**found)
