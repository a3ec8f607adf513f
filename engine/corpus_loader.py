"""External corpora that are added while requests run: built in a thread, one at a time."""

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..cython_ext.suffix_automaton import SuffixAutomaton
from ..engine_core.corpora import CorpusError, build_corpus, count_tokens
from ..engine_core.ids import i32
from ..engine_core.messages import AddCorpus
from ..engine_core.ngram import NgramProposer
from ..engine_core.refusal import Refused

FIELD = "corpus"


class Loaded(NamedTuple):
    """A finished load: who asked (an opaque client identity), and what came of it."""

    client: bytes
    message: AddCorpus
    built: SuffixAutomaton | Refused


class CorpusLoader:
    """Builds corpora beside the engine's loop. ``wake`` is called from the thread at the end."""

    def __init__(self, proposer: NgramProposer, vocab_size: int, wake: Callable[[], None]) -> None:
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._wake = wake
        self._busy = False
        self._done: list[Loaded] = []

    def start(self, client: bytes, message: AddCorpus) -> Refused | None:
        """Begin to build a corpus, or say at once why it cannot be added."""
        if self._busy:
            return Refused(FIELD, "another corpus is loading; try again when it is done", 503)
        documents = []
        for number, content in enumerate(message.documents):
            if len(content) % 4:
                return Refused(FIELD, f"document {number} is not int32 tokens")
            tokens = i32(content)
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
                return Refused(
                    FIELD, f"document {number} has a token outside the {self._vocab_size} known"
                )
            documents.append(np.array(tokens))
        try:
            self._proposer.corpora.admit(message.name, count_tokens(documents))
        except CorpusError as error:
            return Refused(FIELD, str(error))

        def build() -> None:
            built: SuffixAutomaton | Refused
            try:
                built = build_corpus(documents)
            except (CorpusError, MemoryError) as error:
                built = Refused(FIELD, str(error) or "not enough memory")
            self._done.append(Loaded(client, message, built))
            self._wake()

        self._busy = True
        threading.Thread(target=build, name="outrider-corpus", daemon=True).start()
        return None

    def finished(self) -> Loaded | None:
        """The load that ended since the last call, if any."""
        if not self._done:
            return None
        self._busy = False
        return self._done.pop()
