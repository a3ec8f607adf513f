"""A tokenizer of 16 tokens, letters and a few runs of them, for the tiny targets' grammars."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

LETTERS = "abcdefghijkl"
_JOINED = (("a", "b"), ("c", "d"), ("ab", "cd"))


def write_tokenizer(folder: Path) -> Path:
    """The folder with the tokenizer's file; token 0 is EOS."""
    tokens = ["<eos>", *LETTERS, *("".join(pair) for pair in _JOINED)]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, list(_JOINED)))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<eos>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
