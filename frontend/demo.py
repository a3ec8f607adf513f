"""``make run``: one prompt decoded plainly, with NGRAM and with EAGLE3, side by side.

The prompt asks for an edit of code that it quotes, since n-gram drafts live on repetition: on
text that repeats nothing they are rarely proposed, and speed is that of plain decoding. A draft
model needs no repetition.
"""

import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from ..engine_core.config import EngineConfig
from ..engine_core.model_path import ModelNotFound, resolve_draft
from ..engine_core.sampling_params import SamplingParams
from .llm import LLM
from .results import Chunk

PROMPT = '''\
class Account:
    """A bank account."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("insufficient funds")
        self.balance -= amount
        return self.balance


# The same class once more, with type annotations.

class Account:
    """A bank account."""

    def __init__(self, owner'''
MAX_NEW_TOKENS = 192
ROUNDS = 3
SAMPLING = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=0.0)


class Side(NamedTuple):
    """One way to decode: the median of its runs' tokens/s, and the output of the first one."""

    name: str
    tokens_per_s: float
    output: Chunk

    @property
    def accept_length(self) -> float | None:
        """None where nothing was drafted."""
        value = (self.output.meta_info or {}).get("spec_accept_length")
        return value if isinstance(value, float) and value > 0.0 else None


def main(draft: str | None = None) -> int:
    """Run the demonstration; returns the exit status, 1 if outputs differ.

    ``draft``: the folder of EAGLE3's draft; by default the one that ships with the model.
    """
    plain = EngineConfig(model="pycoder", max_running_requests=4)
    with LLM.from_config(plain) as llm:
        # The same number of threads everywhere; it was measured at this start.
        plain = msgspec.structs.replace(plain, num_threads=llm.info.num_threads)
        sides = [_side("without speculation", llm)]
    ngram = msgspec.structs.replace(plain, speculative_algorithm="NGRAM")
    with LLM.from_config(ngram) as llm:
        _timed(llm)  # warms up; the caches are emptied again
        llm.flush_cache()
        print("pycoder-11m edits the code of its prompt, NGRAM drafting (cyan: drafted tokens):\n")
        print(PROMPT, end="", flush=True)
        first = _show(llm.stream(PROMPT, SAMPLING))
        print("\n")
        sides.append(_side("with NGRAM", llm, first))
    eagle3 = msgspec.structs.replace(
        plain, speculative_algorithm="EAGLE3", speculative_draft_model_path=draft
    )
    if _has_draft(eagle3):
        with LLM.from_config(eagle3) as llm:
            sides.append(_side("with EAGLE3", llm))
    else:
        print("EAGLE3 is left out: no draft of it ships with this installation.")
    return _compare(sides)


def _compare(sides: list[Side]) -> int:
    base = sides[0]
    print(f"\n{'':<24}{'tokens/s':>10}{'speed-up':>10}{'accept length':>16}{'output':>14}")
    different = 0
    for side in sides:
        same = side.output.token_ids == base.output.token_ids
        different += not same
        length = "-" if side.accept_length is None else f"{side.accept_length:.2f}"
        ratio = "-" if side is base else f"{side.tokens_per_s / base.tokens_per_s:.2f} x"
        word = "-" if side is base else "the same" if same else "DIFFERENT"
        print(f"{side.name:<24}{side.tokens_per_s:>10.1f}{ratio:>10}{length:>16}{word:>14}")
    print(f"\nBatch 1, median of {ROUNDS} runs each.", end=" ")
    print("The prompt quotes the code it edits, which is what n-gram drafts are good at.")
    if different:
        print("The outputs must not differ: please report it.")
    return 1 if different else 0


def _has_draft(config: EngineConfig) -> bool:
    try:
        resolve_draft("EAGLE3", config.model, config.speculative_draft_model_path, None)
    except ModelNotFound:
        return False
    return True


def _side(name: str, llm: LLM, first: tuple[float, Chunk] | None = None) -> Side:
    """Several runs, each from empty caches; ``first``: one that was made already."""
    if first is None:
        _timed(llm)  # warms up
    runs = [] if first is None else [first]
    while len(runs) < ROUNDS:
        llm.flush_cache()
        runs.append(_timed(llm))
    speeds = sorted(speed for speed, _ in runs)
    return Side(name, speeds[ROUNDS // 2], runs[0][1])


def _timed(llm: LLM) -> tuple[float, Chunk]:
    """Tokens/s after the first token, and the whole output as one chunk."""
    return _measure(llm.stream(PROMPT, SAMPLING), show=False)


def _show(chunks: Iterator[Chunk]) -> tuple[float, Chunk]:
    return _measure(chunks, show=True)


def _measure(chunks: Iterator[Chunk], show: bool) -> tuple[float, Chunk]:
    colour = show and sys.stdout.isatty()
    tokens: list[int] = []
    first = 0
    started = time.perf_counter()
    meta: dict[str, object] | None = None
    for chunk in chunks:
        if not tokens:
            started, first = time.perf_counter(), len(chunk.token_ids)
        tokens += chunk.token_ids
        meta = chunk.meta_info
        if show:
            drafted = colour and len(chunk.token_ids) > 1
            sys.stdout.write(f"\x1b[36m{chunk.text}\x1b[0m" if drafted else chunk.text)
            sys.stdout.flush()
    seconds = time.perf_counter() - started
    return (len(tokens) - first) / seconds, Chunk("", tuple(tokens), meta_info=meta)


if __name__ == "__main__":
    sys.exit(main())
