"""The commit transaction: accepted runs applied token by token to one deciding function.

Nothing else may append to a request. Order of the decisions at a token:

1. stop string, 2. stop token id or EOS (EOS unless ``ignore_eos``), 3. length cap, which is the
smaller of ``max_new_tokens`` and what the context leaves after the prompt.

Because they are asked at every token, a stop inside a run ends the request there even if the run
also crosses the cap, EOS as the very last allowed token is "stop", and a stop beyond the cap is
"length". ``tokens`` include the token that stopped. No stop ends a request before token number
``min_new_tokens`` + 1: the sampler masks the ids until then, and a stop *string* completed
earlier is text like any other and stays so (vLLM's rule; SGLang would end the request).

Counters: a verify row with at least one proposed draft adds 1 to
``verify_ct`` and its kept tokens to ``verify_tokens``. Its correct drafts are the kept tokens
without the bonus token; a run that was cut lost its bonus token, so all that is kept is drafts,
the stopping token among them. Verify rows without drafts add to ``plain_ct`` alone, the prefill's
token nowhere.
"""

from array import array
from collections.abc import Sequence
from typing import final

from .ids import RowKind
from .messages import FinishReason, RequestStats
from .plan import TokenLogprobs
from .prompt_scores import PromptScores
from .sampling_params import SamplingParams
from .tail_decoder import StopTail, TailDecoder

LENGTH = FinishReason("length")
VERIFY = RowKind.VERIFY  # an enum member costs a look-up each time it is named


@final
class Progress:
    """What one request has generated so far, over retractions.

    ``tokens``: int32 array of output ids. ``sent``: how many of them outputs have carried.
    ``stop_ids``: the tokens that end the request, which ``min_new_tokens`` masks in the sampler.
    ``cap``: most output tokens. ``fast``: without stop strings and logprobs, so that a run that
    neither holds a stop id nor reaches the cap is appended at once. ``prompt_scores``: where the
    prompt's log-probabilities are asked for. The counters are those of
    :class:`RequestStats`; the scheduler sets ``spec_off_reason``, ``cached_tokens`` and
    ``retractions``.
    Raises ValueError if stop strings are asked for without a ``tail``.
    """

    __slots__ = (
        "_stops",
        "cached_tokens",
        "cap",
        "correct_drafts",
        "fast",
        "finish",
        "histogram",
        "logprobs",
        "min_new_tokens",
        "plain_ct",
        "prompt_len",
        "prompt_scores",
        "proposed_drafts",
        "retractions",
        "sent",
        "spec_off_reason",
        "stop_ids",
        "tokens",
        "verify_ct",
        "verify_tokens",
        "wants_logprobs",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt_len: int,
        max_total: int,
        eos_ids: frozenset[int],
        tail: TailDecoder | None,
    ) -> None:
        self.prompt_len = prompt_len
        self.cap = max(0, min(params.max_new_tokens, max_total - prompt_len))
        self.min_new_tokens = params.min_new_tokens
        eos = frozenset[int]() if params.ignore_eos else eos_ids
        self.stop_ids = eos.union(params.stop_token_ids)
        self.wants_logprobs = params.logprobs is not None
        self._stops: StopTail | None = None
        if params.stop:
            if tail is None:
                raise ValueError("stop strings need the model's tokenizer in the core")
            self._stops = StopTail(tail, params.stop, params.skip_special_tokens)
        self.prompt_scores: PromptScores | None = None
        if params.prompt_logprobs is not None:
            self.prompt_scores = PromptScores(params.logprob_start_len, prompt_len)
        self.fast = self._stops is None and not self.wants_logprobs and self.prompt_scores is None
        self.tokens = array("i")
        self.sent = 0
        self.logprobs: list[TokenLogprobs] = []
        self.finish: FinishReason | None = None
        self.verify_ct = 0
        self.verify_tokens = 0
        self.correct_drafts = 0
        self.proposed_drafts = 0
        self.plain_ct = 0
        self.histogram: list[int] = []
        self.spec_off_reason: str | None = None
        self.cached_tokens = 0
        self.retractions = 0

    @property
    def total_len(self) -> int:
        """Prompt and output tokens together."""
        return self.prompt_len + len(self.tokens)

    @property
    def room(self) -> int:
        """Output tokens until the cap."""
        return self.cap - len(self.tokens)

    def end(self, reason: FinishReason) -> None:
        """End the request from outside (abort, row error); the first reason stays."""
        if self.finish is None:
            self.finish = reason

    def take_new(self) -> tuple[bytes, tuple[TokenLogprobs, ...]]:
        """The tokens (int32 bytes) and logprobs since the last call."""
        tokens = self.tokens[self.sent :].tobytes()
        logprobs = tuple(self.logprobs)
        self.sent = len(self.tokens)
        self.logprobs.clear()
        return tokens, logprobs

    def stats(self) -> RequestStats:
        """The counters as a message."""
        return RequestStats(
            prompt_tokens=self.prompt_len,
            completion_tokens=len(self.tokens),
            cached_tokens=self.cached_tokens,
            retractions=self.retractions,
            verify_ct=self.verify_ct,
            verify_tokens=self.verify_tokens,
            correct_drafts=self.correct_drafts,
            proposed_drafts=self.proposed_drafts,
            plain_ct=self.plain_ct,
            histogram=tuple(self.histogram),
            spec_off_reason=self.spec_off_reason,
        )

    def matched_stop(self, token: int) -> FinishReason | None:
        """Decide on the newest token, already in ``tokens``: does it complete a stop?"""
        may_stop = len(self.tokens) > self.min_new_tokens
        if self._stops is not None:
            text = self._stops.push(token, may_stop)
            if text is not None:
                return FinishReason("stop", matched=text)
        if may_stop and token in self.stop_ids:
            return FinishReason("stop", matched=token)
        return None


def commit_token(
    progress: Progress, token: int, logprob: TokenLogprobs | None
) -> FinishReason | None:
    """Append one token and decide whether the request ends with it.

    With a cap of 0 (``max_new_tokens`` 0: fill the cache only) nothing is kept. Raises
    ValueError when logprobs were asked for and are missing or of another token.
    """
    if progress.finish is not None:
        return progress.finish
    if progress.cap == 0:
        progress.finish = LENGTH
        return LENGTH
    if progress.wants_logprobs:
        if logprob is None or logprob.token != token:
            raise ValueError(f"the result lacks the log-probability of token {token}")
        progress.logprobs.append(logprob)
    progress.tokens.append(token)
    finish = progress.matched_stop(token)
    if finish is None and len(progress.tokens) >= progress.cap:
        finish = LENGTH
    progress.finish = finish
    return finish


def kept_drafts(kept: int, run_length: int) -> int:
    """Correct drafts of a verify run of which ``kept`` tokens stay (see the module's text)."""
    return min(kept, run_length - 1)


def commit_row(
    progress: Progress,
    run: Sequence[int],
    kind: RowKind,
    proposed: int,
    logprobs: Sequence[TokenLogprobs],
) -> int:
    """Apply what one row of a step emitted; return how many tokens the request kept.

    ``run``: the accepted drafts, then the bonus token (plain ints, for speed a list).
    ``proposed``: draft nodes verified. ``logprobs``: one a token, or empty. A finished request
    keeps nothing and counts nothing. Raises ValueError if the result breaks its contract.
    """
    if progress.finish is not None:
        return 0
    length = len(run)
    if not (1 <= length <= proposed + 1 if kind is VERIFY else _fits(length, kind, proposed)):
        raise ValueError(f"a {kind.name} row with {proposed} drafts cannot emit {length} tokens")
    tokens = progress.tokens
    if progress.fast and len(tokens) + length < progress.cap and progress.stop_ids.isdisjoint(run):
        tokens.extend(run)
        kept = length
    else:
        kept = _commit_each(progress, run, logprobs)
    if kind is VERIFY:
        if proposed == 0:
            progress.plain_ct += 1
        else:
            _count_verify(progress, kept, kept_drafts(kept, length), proposed)
    return kept


def _fits(length: int, kind: RowKind, proposed: int) -> bool:
    return proposed == 0 and length == (1 if kind is RowKind.PREFILL_LAST else 0)


def _commit_each(progress: Progress, run: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> int:
    before = len(progress.tokens)
    for i, token in enumerate(run):
        if commit_token(progress, token, logprobs[i] if i < len(logprobs) else None) is not None:
            break
    return len(progress.tokens) - before


def _count_verify(progress: Progress, kept: int, correct: int, proposed: int) -> None:
    progress.verify_ct += 1
    progress.verify_tokens += kept
    progress.correct_drafts += correct
    progress.proposed_drafts += proposed
    histogram = progress.histogram
    if len(histogram) <= correct:
        histogram.extend([0] * (correct + 1 - len(histogram)))
    histogram[correct] += 1
