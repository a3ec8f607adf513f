"""Outputs of a row's requests, and how two of the same request differ."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ...engine_core.divergence import ENDED, parting
from ...engine_core.ids import f32
from ...engine_core.plan import TokenLogprobs
from ...engine_core.sampling_params import SamplingParams
from ..llm import LLM
from ..results import Completion


class Request(NamedTuple):
    """A prompt, by its number, and what is asked of it."""

    number: int
    prompt: list[int]
    params: SamplingParams


class Parting(NamedTuple):
    """The first difference of a sample of a request from what plain decoding gives.

    ``before``: the tokens in front of it. Without a difference of tokens both are ``ENDED`` and
    ``words`` say what differs.
    """

    request: Request
    sample: int
    before: tuple[int, ...]
    expected: int
    got: int
    words: str

    @property
    def position(self) -> int:
        """Tokens of the output that are equal."""
        return len(self.before)


Answers = list[tuple[Completion, ...]]


def answers(llm: LLM, requests: Sequence[Request], batch: int, speculative: bool) -> Answers:
    """The completions of every request, ``batch`` requests at a time.

    Raises RefusedError for what cannot be served, RequestFailed, EngineDead.
    """
    found: Answers = []
    for first in range(0, len(requests), batch):
        some = requests[first : first + batch]
        results = llm.generate(
            [request.prompt for request in some],
            [request.params for request in some],
            speculative=speculative,
        )
        found += [result.outputs for result in results]
    return found


def partings(requests: Sequence[Request], plain: Answers, others: Answers) -> Iterator[Parting]:
    """Where ``others`` leave ``plain``: tokens, and where those are equal what was made of them."""
    for request, wanted, given in zip(requests, plain, others, strict=True):
        for sample, (want, got) in enumerate(zip(wanted, given, strict=True)):
            found = _parting(request, sample, want, got)
            if found is not None:
                yield found


def _parting(request: Request, sample: int, want: Completion, got: Completion) -> Parting | None:
    at = parting(want.token_ids, got.token_ids)
    if at is not None:
        expected, have = (
            tokens[at] if at < len(tokens) else ENDED for tokens in (want.token_ids, got.token_ids)
        )
        return Parting(request, sample, want.token_ids[:at], expected, have, "")
    checks: tuple[tuple[str, Callable[[Completion], object]], ...] = (
        ("finish reason", lambda one: (one.finish_reason, one.stop_reason)),
        ("text", lambda one: one.text),
        ("number of logprobs", lambda one: len(one.logprobs)),
        ("number of prompt_logprobs", lambda one: len(one.prompt_logprobs)),
    )
    for name, value in checks:
        if value(want) != value(got):
            words = f"the tokens are equal but not the {name}: {value(want)!r} and {value(got)!r}"
            return Parting(request, sample, want.token_ids, ENDED, ENDED, words)
    return None


class Deviation(NamedTuple):
    """The largest difference of log-probabilities: at the last token of an ``output``.

    Or at the ``prompt_token``, from 0, of a request; ``output`` is empty then.
    """

    size: float
    request: Request
    sample: int
    output: tuple[int, ...]
    prompt_token: int | None = None

    @property
    def position(self) -> int:
        """Of the last token of ``output``."""
        return max(0, len(self.output) - 1)


def deviation(requests: Sequence[Request], plain: Answers, others: Answers) -> Deviation | None:
    """Of prompts, and all positions before outputs part; None without any log-probabilities."""
    worst: Deviation | None = None
    for request, wanted, given in zip(requests, plain, others, strict=True):
        for sample, (want, got) in enumerate(zip(wanted, given, strict=True)):
            for one in _deviations(request, sample, want, got):
                if worst is None or one.size > worst.size:
                    worst = one
    return worst


def _deviations(
    request: Request, sample: int, want: Completion, got: Completion
) -> Iterator[Deviation]:
    pairs = zip(want.prompt_logprobs, got.prompt_logprobs, strict=False)
    first = max(1, request.params.logprob_start_len)
    for token, (a, b) in enumerate(pairs, first):
        yield Deviation(_apart(a, b), request, sample, (), token)
    end = parting(want.token_ids, got.token_ids)
    pairs = zip(want.logprobs[:end], got.logprobs[:end], strict=False)
    for at, (a, b) in enumerate(pairs):
        yield Deviation(_apart(a, b), request, sample, got.token_ids[: at + 1])


def _apart(a: TokenLogprobs, b: TokenLogprobs) -> float:
    """Best tokens are compared by rank: two that are equally likely may change places."""
    ours, theirs = ([one.value, *f32(one.top_values).tolist()] for one in (a, b))
    if len(ours) != len(theirs):
        return float("inf")
    return max(abs(x - y) if x != y else 0.0 for x, y in zip(ours, theirs, strict=True))


def accepted_drafts(given: Answers) -> tuple[int, int]:
    """Drafts that were accepted and proposed."""
    infos = [one.meta_info for each in given for one in each]
    accepted, proposed = (
        sum(int(str(info.get(key, 0))) for info in infos)
        for key in ("spec_num_correct_drafts", "spec_num_proposed_drafts")
    )
    return accepted, proposed
