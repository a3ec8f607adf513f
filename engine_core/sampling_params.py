"""Sampling parameters of one request, under SGLang's names, and their validation."""

import math

import msgspec

from .grammar_spec import GrammarSpec
from .processor_calls import refuse_calls
from .refusal import Refused
from .token_bans import refuse_bans

GREEDY_BELOW = 1e-6  # temperatures under this are greedy
# Beyond these, values leave the int32 and float32 columns that samplers read.
MAX_COUNT = 2**31 - 1
MAX_TEMPERATURE = 1e6
MIN_REPETITION_PENALTY = 0.01
MAX_STOPS = 32
MAX_TOP_LOGPROBS = 128


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one request is sampled and where it ends.

    ``top_k`` -1 means the whole vocabulary. ``seed`` None draws one when the request is
    accepted. ``logprobs`` None returns none, k >= 0 the sampled token's and the k best ones, of
    the raw model distribution (before temperature, penalties and filters). ``prompt_logprobs``:
    the same of prompt tokens from position ``logprob_start_len`` on. ``logit_bias`` maps a
    token id to an additive bias. Stop strings are matched on generated text only; the text ends
    before them, with ``include_stop_str_in_output`` behind them, with ``no_stop_trim`` behind the
    token that completed one. With a ``grammar`` the output is one of its texts, cut where
    ``max_new_tokens`` or a stop ends it. No sequence of ``bad_words_ids`` occurs in the output;
    frontends turn ``bad_words`` into such sequences. ``allowed_token_ids``: the only tokens of the
    output, EOS included; None for all. ``logits_processors``: those that the engine has loaded and
    that edit this request's logits, each with its arguments (:mod:`.processor_loader`).
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    include_stop_str_in_output: bool = False
    n: int = 1
    logit_bias: dict[int, float] = {}
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_start_len: int = 0
    grammar: GrammarSpec | None = None
    logits_processors: dict[str, dict[str, object]] = {}

    @property
    def greedy(self) -> bool:
        """Whether the argmax is taken (temperature 0, or top_k 1)."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def penalized(self) -> bool:
        """Whether any of the three penalties changes logits."""
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def bans(self) -> bool:
        """Whether tokens are ruled out, in general or after others."""
        return bool(self.bad_words_ids) or self.allowed_token_ids is not None

    def refuse(self, vocab_size: int) -> Refused | None:
        """Return why these parameters cannot be served, or None."""
        bans = self.bad_words, self.bad_words_ids, self.allowed_token_ids
        return (
            _refuse_numbers(self)
            or _refuse_stops(self, vocab_size)
            or refuse_bans(*bans, vocab_size)
            or _refuse_grammar(self)
            or refuse_calls(self.logits_processors)
        )


def _refuse_grammar(p: SamplingParams) -> Refused | None:
    """A text that is complete may only be followed by EOS."""
    if p.grammar is None:
        return None
    if p.ignore_eos:
        return Refused("ignore_eos", f"{p.grammar.field} ends the output with EOS; leave it out")
    if p.min_new_tokens:
        reason = f"{p.grammar.field} decides where the output may end; leave it out"
        return Refused("min_new_tokens", reason)
    for field in ("bad_words", "bad_words_ids", "allowed_token_ids"):
        if getattr(p, field):
            reason = f"{p.grammar.field} may leave no other token; leave one of the two out"
            return Refused(field, reason)
    return None


def _refuse_numbers(p: SamplingParams) -> Refused | None:
    checks: tuple[tuple[str, bool, str], ...] = (
        (
            "max_new_tokens",
            0 <= p.max_new_tokens <= MAX_COUNT,
            f"must be between 0 and {MAX_COUNT}",
        ),
        (
            "min_new_tokens",
            0 <= p.min_new_tokens <= p.max_new_tokens,
            "must be between 0 and max_new_tokens",
        ),
        (
            "temperature",
            0.0 <= p.temperature <= MAX_TEMPERATURE,
            f"must be between 0 and {MAX_TEMPERATURE:g}; 0 is greedy",
        ),
        ("top_p", 0.0 < p.top_p <= 1.0, "must be in (0, 1]; 1 switches it off"),
        (
            "top_k",
            p.top_k == -1 or 1 <= p.top_k <= MAX_COUNT,
            f"must be -1 (all) or between 1 and {MAX_COUNT}",
        ),
        ("min_p", 0.0 <= p.min_p <= 1.0, "must be in [0, 1]; 0 switches it off"),
        ("frequency_penalty", -2.0 <= p.frequency_penalty <= 2.0, "must be in [-2, 2]"),
        ("presence_penalty", -2.0 <= p.presence_penalty <= 2.0, "must be in [-2, 2]"),
        (
            "repetition_penalty",
            MIN_REPETITION_PENALTY <= p.repetition_penalty <= 2.0,
            f"must be in [{MIN_REPETITION_PENALTY}, 2]; 1 switches it off",
        ),
        ("n", 1 <= p.n <= 128, "must be between 1 and 128"),
        (
            "logprobs",
            p.logprobs is None or 0 <= p.logprobs <= MAX_TOP_LOGPROBS,
            f"must be between 0 and {MAX_TOP_LOGPROBS}",
        ),
        (
            "prompt_logprobs",
            p.prompt_logprobs is None or 0 <= p.prompt_logprobs <= MAX_TOP_LOGPROBS,
            f"must be between 0 and {MAX_TOP_LOGPROBS}",
        ),
        (
            "logprob_start_len",
            0 <= p.logprob_start_len <= MAX_COUNT * (p.prompt_logprobs is not None),
            f"must be between 0 and {MAX_COUNT}, and 0 without prompt_logprobs",
        ),
        (
            "seed",
            p.seed is None or -(2**63) <= p.seed < 2**63,
            "must fit into 64 bits, signed",
        ),
    )
    for field, ok, reason in checks:
        if not ok:
            return Refused(field, f"{reason}, got {getattr(p, field)}")
    return None


def _refuse_stops(p: SamplingParams, vocab_size: int) -> Refused | None:
    if len(p.stop) > MAX_STOPS:
        return Refused("stop", f"at most {MAX_STOPS} stop strings, got {len(p.stop)}")
    if any(not s for s in p.stop):
        return Refused("stop", "a stop string must not be empty; leave it out instead")
    for token in p.stop_token_ids:
        if not 0 <= token < vocab_size:
            return Refused(
                "stop_token_ids", f"{token} is outside the vocabulary of {vocab_size} tokens"
            )
    for token, bias in p.logit_bias.items():
        if not 0 <= token < vocab_size:
            return Refused(
                "logit_bias", f"{token} is outside the vocabulary of {vocab_size} tokens"
            )
        if not (math.isfinite(bias) and -100.0 <= bias <= 100.0):
            return Refused("logit_bias", f"a bias must be in [-100, 100], got {bias}")
    return None
