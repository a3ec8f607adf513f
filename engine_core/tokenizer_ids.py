"""A folder's tokens by id, from tokenizer.json and the files beside it."""

from pathlib import Path
from typing import NamedTuple

import msgspec

_MASK = "<|MASK|>"  # where nothing names another


class AddedToken(msgspec.Struct, frozen=True):
    """A token beside the vocabulary that was learned."""

    id: int
    content: str


class TokenModel(msgspec.Struct, frozen=True):
    """The vocabulary that was learned, by text or as a list of texts and scores."""

    vocab: dict[str, int] | tuple[tuple[str, float], ...] = msgspec.field(default_factory=dict)
    merges: tuple[str | tuple[str, ...], ...] = ()


class TokenizerFile(msgspec.Struct, frozen=True):
    """tokenizer.json."""

    model: TokenModel
    added_tokens: tuple[AddedToken, ...] = ()

    def ids(self) -> dict[str, int]:
        """Every token's id by its text."""
        vocab = self.model.vocab
        if not isinstance(vocab, dict):
            vocab = {text: i for i, (text, _) in enumerate(vocab)}
        return vocab | {token.content: token.id for token in self.added_tokens}

    def next_id(self) -> int:
        """The id that a token added now would get."""
        highest = max((token.id for token in self.added_tokens), default=-1)
        return max(len(self.model.vocab), highest + 1)


class _Text(msgspec.Struct, frozen=True):
    content: str


class _Named(msgspec.Struct, frozen=True):
    mask_token: str | _Text | None = None


class MaskToken(NamedTuple):
    """``text``, and its ``id`` if it is a token of the tokenizer that was asked."""

    text: str
    id: int | None


def read_tokenizer(folder: Path) -> TokenizerFile:
    """The folder's tokenizer.json. Raises OSError, msgspec.MsgspecError."""
    return msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=TokenizerFile)


def find_mask(tokenizer: TokenizerFile, text: str | None) -> MaskToken:
    """The mask token called ``text``, or what all call theirs."""
    text = _MASK if text is None else text
    return MaskToken(text, tokenizer.ids().get(text))


def own_mask(folder: Path) -> MaskToken | None:
    """The mask token that the settings of the folder's tokenizer name, if they do.

    Raises OSError, msgspec.MsgspecError.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if not path.is_file():
            continue
        found = msgspec.json.decode(path.read_bytes(), type=_Named).mask_token
        text = found.content if isinstance(found, _Text) else found
        if text:
            return find_mask(read_tokenizer(folder), text)
    return None
