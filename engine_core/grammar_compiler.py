"""Grammars compiled for one vocabulary by llguidance, kept for the next request that has the same.

llguidance makes its automata lazily, over the bytes of the vocabulary's tokens, and has no need of
torch (docs/decisions/0013-grammars.md).
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, final

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from .available_cores import available_cores
from .config import CoreConfig
from .grammar_spec import GrammarSpec
from .grammar_text import grammar_refusal, llguidance_grammar
from .grammar_walk import MaskThreads
from .model_path import ModelNotFound
from .refusal import Refused, RefusedError
from .tokenizer_file import tokenizer_file

_log = logging.getLogger(__name__)
_KEPT = 256  # compiled grammars; an automaton of a schema takes some hundred kilobytes
_MOST_THREADS = 8
# Of one mask: an ambiguous grammar's grows with the text, and all requests wait for it.
_LIMITS = LLParserLimits(step_max_items=10_000, step_lexer_fuel=100_000, verbose_errors=False)
_WORD = 32


class Begun(NamedTuple):
    """A matcher at the beginning of its text, and a number of the automaton that it shares."""

    matcher: LLMatcher
    automaton: int


@dataclass(slots=True)
class _Kept:
    """What became of a grammar: automata, as matchers that nobody moves, or why there are none.

    Requests take automata in ``turn``. ``open``: requests that may still ask for it.
    """

    automata: list[LLMatcher]
    refused: Refused | None
    turn: int = 0
    open: int = 0


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Added(msgspec.Struct):
    """Of a tokenizer.json, the tokens beside the vocabulary that was learnt."""

    added_tokens: list[_AddedToken] = []


@final
class GrammarCompiler:
    """Matchers for a ``tokenizer.json`` and logits of ``vocab_size``; usable from any thread.

    The grammars of open requests are kept, and the latest others. One that several of them have
    gets more automata, up to one for each of the ``threads`` that make masks, for those of one
    automaton are made one after the other; they are compiled in a thread of their own.
    """

    def __init__(
        self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int], threads: int = 1
    ) -> None:
        self._path = tokenizer
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_ids)
        self.mask_threads = MaskThreads(threads)
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._lock = threading.Lock()
        self._more: SimpleQueue[GrammarSpec] | None = None  # that want another automaton

    @property
    def mask_words(self) -> int:
        """W: int32 words of a mask over the vocabulary."""
        return -(-self.vocab_size // _WORD)

    def knows(self, spec: GrammarSpec) -> bool:
        """Whether ``refuse`` and ``matcher`` answer at once."""
        return (spec.kind, spec.text) in self._kept

    def refuse(self, spec: GrammarSpec) -> Refused | None:
        """Why there is no matcher for ``spec``, if there is none."""
        found = self._found(spec).refused
        if found is None:
            return None
        return Refused(spec.field, found.reason, found.status)  # another request's field may differ

    def hold(self, spec: GrammarSpec) -> None:
        """Keep the grammar until as many ``release`` it: a request that has it is open."""
        found = self._found(spec, opens=1)
        if self._wants_more(found):
            self._ask_for_more(spec)

    def release(self, spec: GrammarSpec) -> None:
        """A request that held the grammar has ended."""
        with self._lock:
            found = self._kept.get((spec.kind, spec.text))
            if found is not None:
                found.open = max(0, found.open - 1)
            self._drop_oldest()

    def begin(self, spec: GrammarSpec) -> Begun:
        """A matcher at the beginning. Raises RefusedError for a grammar that ``refuse`` refuses."""
        found = self._found(spec)
        if found.refused is not None:
            raise RefusedError(found.refused)
        with self._lock:
            found.turn = (found.turn + 1) % len(found.automata)
            chosen = found.automata[found.turn]
        return Begun(chosen.deep_copy(), id(chosen))

    def matcher(self, spec: GrammarSpec) -> LLMatcher:
        """Its matcher alone. Raises RefusedError."""
        return self.begin(spec).matcher

    def renewed(self, spec: GrammarSpec) -> Begun:
        """A matcher with an automaton of its own, which later ones share instead of those before.

        Raises RefusedError.
        """
        made = self._compile(spec)
        if isinstance(made, Refused):
            raise RefusedError(made)
        with self._lock:
            self._kept.setdefault((spec.kind, spec.text), _Kept([], None)).automata[:] = [made]
        return Begun(made.deep_copy(), id(made))

    def _found(self, spec: GrammarSpec, opens: int = 0) -> _Kept:
        """What is kept of a grammar, which is compiled if nothing is."""
        key = spec.kind, spec.text
        found = self._kept.get(key)
        if found is None:
            made = self._compile(spec)  # which others need not wait for
            found = _Kept([], made) if isinstance(made, Refused) else _Kept([made], None)
        with self._lock:
            found = self._kept.setdefault(key, found)
            found.open += opens
            self._kept.move_to_end(key)
            self._drop_oldest(key)
        return found

    def _drop_oldest(self, but: tuple[str, str] | None = None) -> None:
        """Forget grammars beyond ``_KEPT`` that no open request has, the oldest first."""
        beyond = len(self._kept) - _KEPT
        if beyond > 0:
            idle = [key for key, kept in self._kept.items() if not kept.open and key != but]
            for key in idle[:beyond]:
                del self._kept[key]

    def _wants_more(self, found: _Kept) -> bool:
        return len(found.automata) < min(found.open, self.mask_threads.count)

    def _ask_for_more(self, spec: GrammarSpec) -> None:
        if self._more is None:
            self._more = SimpleQueue()
            loop = threading.Thread(
                target=self._make_more, args=(self._more,), name="automata", daemon=True
            )
            loop.start()
        self._more.put(spec)

    def _make_more(self, asked: "SimpleQueue[GrammarSpec]") -> None:
        while True:
            spec = asked.get()
            found = self._kept.get((spec.kind, spec.text))
            if found is None or not self._wants_more(found):
                continue
            try:
                made = self._compile(spec)
            except Exception:  # requests share those there are, and others may get more
                _log.exception("no further automaton of a %s was made", spec.kind)
                continue
            if isinstance(made, LLMatcher):
                found.automata.append(made)

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
    if path is None:
        return None
    worker, asked = config.worker, config.engine.grammar_threads
    cores = available_cores()
    threads = max(1, min(cores // 2, _MOST_THREADS)) if asked is None else min(asked, cores)
    return _shared(path, worker.vocab_size, worker.eos_ids, threads)


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
def _shared(
    tokenizer: Path, vocab_size: int, eos_ids: tuple[int, ...], threads: int
) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size, eos_ids, threads)
