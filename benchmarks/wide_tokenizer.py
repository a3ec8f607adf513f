"""A tokenizer.json of as many tokens as a model's vocabulary has, made of pycoder's.

Its tokens, pairs of them as further merges, and the EOS where the model has it: a byte-level BPE
tokenizer in every respect, for models of which no tokenizer is at hand.
"""

import json
import random
from pathlib import Path

from outrider.engine_core.model_path import resolve_model


def write_wide_tokenizer(folder: Path, size: int, eos: int) -> Path:
    """``folder``/tokenizer.json with ``size`` tokens, the EOS being number ``eos``."""
    made = json.loads((resolve_model("pycoder") / "tokenizer.json").read_text())
    vocabulary, merges = made["model"]["vocab"], made["model"]["merges"]
    if not len(vocabulary) <= eos < size:
        raise ValueError(f"an EOS between {len(vocabulary)} and {size} is needed, not {eos}")
    special = made["added_tokens"][0]
    plain = [word for word in vocabulary if not word.startswith("<|") and 2 <= len(word) <= 6]
    chosen = random.Random(0)
    while len(vocabulary) < size:
        number = len(vocabulary)
        if number == eos:
            vocabulary["<|the_end|>"] = eos
            made["added_tokens"].append({**special, "id": eos, "content": "<|the_end|>"})
            continue
        pair = [chosen.choice(plain), chosen.choice(plain)]
        if "".join(pair) not in vocabulary:
            vocabulary["".join(pair)] = number
            merges.append(pair)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(made))
    return path


def letter_tokens(tokenizer: Path, longest: int = 4) -> list[int]:
    """Its tokens of a few plain letters alone, which any JSON string may hold anywhere."""
    vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
    return [
        number
        for word, number in vocabulary.items()
        if word.isascii() and word.isalpha() and len(word) <= longest
    ]
