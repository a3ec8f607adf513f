"""``make run``: stream a completion of the embedded model with NGRAM, then compare with plain.

The prompt asks for an edit of code that it quotes, since n-gram drafts live on repetition: on
text that repeats nothing they are rarely proposed, and speed is that of plain decoding.
"""

import sys
import time
from collections.abc import Iterator

import msgspec

from ..engine_core.config import EngineConfig
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


def main() -> int:
    """Run the demonstration; returns the exit status."""
    plain = EngineConfig(model="pycoder", max_running_requests=4)
    with LLM.from_config(plain) as llm:
        # The same number of threads on both sides; it was measured at this start.
        speculative = msgspec.structs.replace(
            plain, speculative_algorithm="NGRAM", num_threads=llm.info.num_threads
        )
        baseline = [_timed(llm) for _ in range(ROUNDS + 1)][1:]
    with LLM.from_config(speculative) as llm:
        _timed(llm)  # warms up; the caches are emptied again
        llm.flush_cache()
        print("pycoder-11m edits the code of its prompt, NGRAM drafting (cyan: drafted tokens):\n")
        print(PROMPT, end="", flush=True)
        drafted = [_show(llm.stream(PROMPT, SAMPLING))]
        for _ in range(ROUNDS - 1):
            llm.flush_cache()
            drafted.append(_timed(llm))
    with_speed = sorted(speed for speed, _ in drafted)[ROUNDS // 2]
    without_speed = sorted(speed for speed, _ in baseline)[ROUNDS // 2]
    meta = drafted[0][1].meta_info or {}
    same = drafted[0][1].token_ids == baseline[0][1].token_ids
    print(f"\n\n{'':<24}{'tokens/s':>10}{'accept length':>16}")
    print(f"{'without speculation':<24}{without_speed:>10.1f}{'-':>16}")
    print(f"{'with NGRAM':<24}{with_speed:>10.1f}{meta.get('spec_accept_length', 0.0):>16.2f}")
    print(
        f"\n{with_speed / without_speed:.2f} x, batch 1, median of {ROUNDS} runs each; "
        f"the two outputs are {'the same' if same else 'DIFFERENT'}."
    )
    print("The prompt quotes the code it edits, which is what n-gram drafts are good at.")
    return 0 if same else 1


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
