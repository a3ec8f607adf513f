"""Servers of the embedded model, one a drafter, whose answers are held against each other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from outrider import Client

from ..frontend.server_process import real_server

DRAFTERS = ("none", "NGRAM", "STANDALONE")
# Repeats itself, so that drafts are accepted.
PROMPT = "def total(values):\n    result = 0\n    for value in values:\n        result +="


class Served(NamedTuple):
    """A server's two doors. ``same``: hold what ``name`` gives against the other drafters'."""

    drafter: str
    http: httpx.Client
    sdk: Client
    same: Callable[[str, object], None]

    def post(self, path: str, **body: object) -> Any:
        """The answer to a JSON body, which must be 200."""
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, **body: object) -> str:
        """The message of a 400."""
        answer = self.http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"]["message"])

    def generate(self, prompt: str | list[int] = PROMPT, **sampling: object) -> Any:
        """/generate, greedy unless said otherwise."""
        name = "text" if isinstance(prompt, str) else "input_ids"
        params = {"temperature": 0, "max_new_tokens": 40, **sampling}
        return self.post("/generate", **{name: prompt, "sampling_params": params})


@contextmanager
def served(drafter: str, known: dict[str, object]) -> Iterator[Served]:
    """A server with this drafter; ``known`` keeps what the servers before it answered."""
    flags = ["--max-running-requests", "4", "--chunked-prefill-size", "32"]
    if drafter != "none":
        flags += ["--speculative-algorithm", drafter, "--speculative-length-policy", "fixed"]

    def same(name: str, answer: object) -> None:
        assert known.setdefault(name, answer) == answer, name

    with (
        real_server(*flags) as server,
        Client(server.endpoint) as sdk,
        httpx.Client(base_url=server.url, timeout=60, verify=False) as http,
    ):
        yield Served(drafter, http, sdk, same)
