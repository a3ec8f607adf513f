"""What grammar libraries cost on this CPU: compiling a schema, and a mask at every token.

    python benchmarks/bench_grammar.py --json grammar-cpu.json

The schemas are those of benchmarks/prompts/schema_prompts.jsonl, JSON without free white space.
Texts are random walks that llguidance allows; xgrammar, where it is installed, walks the same
tokens. Two vocabularies: pycoder's, and one of 151,936 tokens, as many as Qwen3's, made of
pycoder's tokens and of pairs of them. ``mask_us`` is one mask, ``accept_us`` the step behind a
token, ``tree_us`` masks of a chain of 7 drafts and the way back (llguidance). One thread.
"""

import argparse
import importlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from outrider.engine_core.grammar_spec import GrammarSpec
from outrider.engine_core.grammar_text import llguidance_grammar
from outrider.engine_core.grammar_walk import MaskThreads, plan_masks
from outrider.engine_core.ids import I32
from outrider.engine_core.model_path import resolve_model

PROMPTS = Path(__file__).resolve().parent / "prompts" / "schema_prompts.jsonl"
EOS, WIDE, DRAFTS, MOST = 0, 151_936, 7, 120
ONE_THREAD = MaskThreads(1)
Numbers = dict[str, list[float]]


class Vocabulary:
    """The bytes of every token, as llguidance asks for them."""

    eos_token_id = EOS
    bos_token_id = None

    def __init__(self, size: int, tokenizer: Tokenizer) -> None:
        stand_ins = _stand_ins()
        words = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]
        special = {added.content for added in tokenizer.get_added_tokens_decoder().values()}
        self.special_token_ids = [i for i, word in enumerate(words) if word in special]
        self.tokens = [
            word.encode() if word in special else bytes(stand_ins[c] for c in word)
            for word in words
        ]
        self.tokens += list(self._pairs(size - len(words)))
        self._ids = {token: index for index, token in enumerate(self.tokens)}
        self._longest = max(map(len, self.tokens))

    def _pairs(self, count: int) -> Iterator[bytes]:
        known, plain = set(self.tokens), [t for t in self.tokens if 2 <= len(t) <= 6]
        chosen = random.Random(0)
        while count > 0:
            made = chosen.choice(plain) + chosen.choice(plain)
            if made not in known:
                known.add(made)
                count -= 1
                yield made

    def __call__(self, text: bytes) -> list[int]:
        """The longest token at each place."""
        made: list[int] = []
        while text:
            longest = min(len(text), self._longest)
            size = next(n for n in range(longest, 0, -1) if text[:n] in self._ids)
            made.append(self._ids[text[:size]])
            text = text[size:]
        return made


def _stand_ins() -> dict[str, int]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


def timed(into: list[float], work: Callable[[], object]) -> object:
    """What ``work`` gives; its microseconds are added."""
    began = time.perf_counter()
    found = work()
    into.append((time.perf_counter() - began) * 1e6)
    return found


def walk(tokenizer: LLTokenizer, schema: str, size: int, numbers: Numbers, seed: int) -> list[int]:
    """A random text of the schema, and what its steps took."""
    chosen, row = random.Random(seed), np.zeros((DRAFTS + 1, -(-size // 32)), dtype=np.int32)
    grammar = llguidance_grammar(GrammarSpec("json_schema", schema))
    assert isinstance(grammar, str)

    def compiled() -> LLMatcher:
        made = LLMatcher(tokenizer, grammar, log_level=0)
        made.compute_bitmask()
        return made

    matcher = timed(numbers["compile_us"], compiled)
    assert isinstance(matcher, LLMatcher)
    text: list[int] = []
    while not matcher.is_stopped() and len(text) < MOST:
        mask = row[0].ctypes.data, row[0].nbytes
        timed(numbers["mask_us"], partial(matcher.unsafe_compute_mask_ptr, *mask))
        allowed = np.flatnonzero(np.unpackbits(row[0].view(np.uint8), bitorder="little")[:size])
        token = int(chosen.choice(allowed.tolist()))
        if token == EOS:
            break
        timed(numbers["accept_us"], partial(matcher.consume_token, token))
        text.append(token)
    again = timed(numbers["compile_again_us"], compiled)
    assert isinstance(again, LLMatcher)
    for begin in range(0, len(text) - DRAFTS, DRAFTS):
        chain = [-1, *text[begin : begin + DRAFTS]]
        parents = list(range(-1, DRAFTS))
        timed(numbers["tree_us"], partial(masks_of, again, chain, parents, row))
        again.consume_tokens(chain[1:])
    return text


def masks_of(matcher: LLMatcher, tokens: list[int], parents: list[int], rows: I32) -> None:
    """Those of a chain."""
    tree = plan_masks(matcher, tokens, parents, frozenset((EOS,)), 0)
    ONE_THREAD.fill(tree.chains, rows)


def walk_again(compiler: Any, schema: str, size: int, numbers: Numbers, text: list[int]) -> bool:
    """xgrammar over the same tokens; whether it allows them."""
    xgrammar = importlib.import_module("xgrammar")
    made = timed(
        numbers["compile_us"],
        lambda: compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":")),
    )
    matcher = xgrammar.GrammarMatcher(made)
    mask = xgrammar.allocate_token_bitmask(1, size)
    for token in text:
        timed(numbers["mask_us"], lambda: matcher.fill_next_token_bitmask(mask))
        if not timed(numbers["accept_us"], partial(matcher.accept_token, token)):
            return False
    return True


def measure(size: int, tokenizer: Tokenizer, schemas: list[str]) -> dict[str, object]:
    """Both libraries over one vocabulary."""
    vocabulary = Vocabulary(size, tokenizer)
    names = "compile_us", "compile_again_us", "mask_us", "accept_us", "tree_us"
    ours: Numbers = {name: [] for name in names}
    load: list[float] = []
    made = timed(load, lambda: LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=size))
    assert isinstance(made, LLTokenizer)
    texts = [walk(made, schema, size, ours, seed) for seed, schema in enumerate(schemas)]
    found: dict[str, object] = {
        "vocabulary": size,
        "tokens": sum(map(len, texts)),
        "llguidance": {"load_ms": load[0] / 1e3, **summary(ours)},
    }
    try:
        xgrammar = importlib.import_module("xgrammar")
    except ImportError:
        return found
    theirs: Numbers = {name: [] for name in names[:1] + names[2:4]}
    load = []
    info = timed(
        load, lambda: xgrammar.TokenizerInfo(vocabulary.tokens, vocab_size=size, stop_token_ids=EOS)
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    allowed = [
        walk_again(compiler, schema, size, theirs, text)
        for schema, text in zip(schemas, texts, strict=True)
    ]
    found["xgrammar"] = {
        "load_ms": load[0] / 1e3, "texts_allowed": sum(allowed), **summary(theirs),
    }  # fmt: skip
    return found


def summary(numbers: Numbers) -> dict[str, dict[str, float]]:
    """Median, 99th percentile and maximum."""
    return {
        name: {
            "p50": round(statistics.median(values), 2),
            "p99": round(sorted(values)[int(0.99 * len(values))], 2),
            "max": round(max(values), 2),
        }
        for name, values in numbers.items()
        if values
    }


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    schemas = [
        json.dumps(json.loads(line)["json_schema"]) for line in PROMPTS.read_text().splitlines()
    ][::2]
    tokenizer = Tokenizer.from_file(str(resolve_model("pycoder") / "tokenizer.json"))
    sizes = (tokenizer.get_vocab_size(), WIDE)
    report = {
        "command": "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "schemas": len(schemas),
        "vocabularies": [measure(size, tokenizer, schemas) for size in sizes],
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["vocabularies"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
