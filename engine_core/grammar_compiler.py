"""Grammars compiled for one vocabulary by llguidance, kept for the next request that has the same.

llguidance makes its automata lazily, over the bytes of the vocabulary's tokens, and has no need of
torch (docs/decisions/0013-grammars.md).
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import final

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from .config import CoreConfig
from .grammar_spec import GrammarSpec
from .grammar_text import grammar_refusal, llguidance_grammar
from .model_path import ModelNotFound
from .refusal import Refused, RefusedError
from .tokenizer_file import tokenizer_file

_KEPT = 256  # compiled grammars; a schema takes some hundred kilobytes
# Of one mask: an ambiguous grammar's grows with the text, and all requests wait for it.
_LIMITS = LLParserLimits(step_max_items=10_000, step_lexer_fuel=100_000, verbose_errors=False)
_WORD = 32


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Added(msgspec.Struct):
    """Of a tokenizer.json, the tokens beside the vocabulary that was learnt."""

    added_tokens: list[_AddedToken] = []


@final
class GrammarCompiler:
    """Matchers for a ``tokenizer.json`` and logits of ``vocab_size``; usable from any thread."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._path = tokenizer
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], LLMatcher | Refused] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def mask_words(self) -> int:
        """W: int32 words of a mask over the vocabulary."""
        return -(-self.vocab_size // _WORD)

    def knows(self, spec: GrammarSpec) -> bool:
        """Whether ``refuse`` and ``matcher`` answer at once."""
        return (spec.kind, spec.text) in self._compiled

    def refuse(self, spec: GrammarSpec) -> Refused | None:
        """Why there is no matcher for ``spec``, if there is none."""
        found = self._found(spec)
        if not isinstance(found, Refused):
            return None
        return Refused(spec.field, found.reason, found.status)  # another request's field may differ

    def matcher(self, spec: GrammarSpec) -> LLMatcher:
        """A matcher at the beginning. Raises RefusedError for a grammar that ``refuse`` refuses."""
        found = self._found(spec)
        if isinstance(found, Refused):
            raise RefusedError(found)
        return found.deep_copy()

    def renewed(self, spec: GrammarSpec) -> LLMatcher:
        """A matcher with an automaton of its own, which later ones share instead of that before.

        Raises RefusedError.
        """
        with self._lock:
            self._compiled.pop((spec.kind, spec.text), None)
        return self.matcher(spec)

    def _found(self, spec: GrammarSpec) -> LLMatcher | Refused:
        """The kept matcher, which nobody moves, or what is wrong with the grammar."""
        key = spec.kind, spec.text
        found = self._compiled.get(key)
        if found is None:
            found = self._compile(spec)  # which others need not wait for
        with self._lock:
            self._compiled[key] = found
            self._compiled.move_to_end(key)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return found

    def _compile(self, spec: GrammarSpec) -> LLMatcher | Refused:
        grammar = llguidance_grammar(spec)
        if isinstance(grammar, Refused):
            return grammar
        try:
            tokenizer = self._load_tokenizer()
        except ValueError as error:
            reason = f"structured output does not know this tokenizer ({error}); leave it out"
            return Refused(spec.field, reason, 501)
        if spec.kind == "structural_tag":
            grammar = llguidance_grammar(spec, self._special_tokens(tokenizer))
            if isinstance(grammar, Refused):
                return grammar
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar that nothing matches shows itself here
        if matcher.is_error():
            return grammar_refusal(spec, matcher.get_error())
        return matcher

    def _special_tokens(self, tokenizer: LLTokenizer) -> dict[str, int]:
        """Ids of the tokens that llguidance makes no text of, but for those that end the output."""
        added = msgspec.json.decode(self._path.read_bytes(), type=_Added).added_tokens
        return {
            token.content: token.id
            for token in added
            if token.id < self.vocab_size
            and token.id not in self.eos_ids
            and tokenizer.is_special_token(token.id)
        }

    def _load_tokenizer(self) -> LLTokenizer:
        """Raises ValueError for one that llguidance cannot read."""
        with self._lock:
            if self._tokenizer is None:
                eos = sorted(self.eos_ids)
                path = str(self._path)
                self._tokenizer = LLTokenizer(path, n_vocab=self.vocab_size, eos_token=eos)
            return self._tokenizer


def compiler_of(config: CoreConfig) -> GrammarCompiler | None:
    """This process's compiler for the model: the core refuses by it what the worker then runs.

    None where requests may have no grammar, see ``refuse_grammar``.
    """
    if config.engine.tp_size > 1:
        return None
    try:
        path = tokenizer_file(config.engine)
    except (ModelNotFound, ValueError):  # whoever needs one says so
        return None
    return None if path is None else _shared(path, config.worker.vocab_size, config.worker.eos_ids)


def refuse_grammar(
    spec: GrammarSpec | None, config: CoreConfig, compiler: GrammarCompiler | None
) -> Refused | None:
    """Why a request with this grammar is not served, or None."""
    if spec is None:
        return None
    if compiler is not None:
        return compiler.refuse(spec)
    if config.engine.tp_size > 1:
        reason = "structured output does not work over several ranks yet; serve with --tp-size 1"
        return Refused(spec.field, reason, 501)
    reason = "structured output needs the model's tokenizer.json; serve the model with one"
    return Refused(spec.field, reason, 501)


@cache
def _shared(tokenizer: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size, eos_ids)
