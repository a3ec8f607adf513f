"""Text to token ids and back with the Rust ``tokenizers`` library; no transformers import."""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from ..engine_core.refusal import Refused, RefusedError
from .chat_template import ChatTemplate, load_chat_template


class Tokenizer:
    """The tokenizer of a model folder (``tokenizer.json``, ``tokenizer_config.json``).

    Special tokens around a text (BOS, for example) are those that the post-processor of
    tokenizer.json adds. Raises RefusedError when the folder has no usable tokenizer.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._rust = _load_rust(self.folder / "tokenizer.json")
        config = _load_config(self.folder / "tokenizer_config.json")
        self.special_tokens = _special_tokens(config)
        templates = self.folder, config.get("chat_template"), self.special_tokens
        self.chat_template: ChatTemplate | None = load_chat_template(*templates)
        self._tool_template = load_chat_template(*templates, name="tool_use")
        added = self._rust.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._special_texts = frozenset(t.content for t in added.values() if t.special)
        self.max_id = max(self._rust.get_vocab(with_added_tokens=True).values(), default=-1)
        decoder = json.loads(self._rust.to_str())["decoder"]
        self._byte_level = "ByteLevel" in json.dumps(decoder)

    @property
    def has_text(self) -> bool:
        """Whether token ids have text here."""
        return True

    @property
    def bos_token(self) -> str | None:
        """Text of the beginning-of-sequence token, if the model has one."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the end-of-sequence token, if the model has one."""
        return self.special_tokens.get("eos_token")

    def is_special(self, text: str) -> bool:
        """Whether ``text`` is a special token, which answers leave out."""
        return text in self._special_texts

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Raises RefusedError for text that is not valid Unicode."""
        try:
            return self._rust.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError):
            raise RefusedError(
                Refused("prompt", "holds a lone surrogate; send valid Unicode text")
            ) from None

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of every text."""
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ``ids``; ids outside the vocabulary give nothing."""
        return self._rust.decode(ids, skip_special_tokens=skip_special)

    def token_text(self, token: int) -> str:
        """Text of one token alone, special tokens included (U+FFFD for parts of a character)."""
        return self._rust.decode([token], skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes of one token, also where they are only a part of a character."""
        piece = self._rust.id_to_token(token)
        if piece is None:
            return b""
        if token not in self.special_ids and self._byte_level:
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in piece)
            except KeyError:  # an added token is stored as plain text
                return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return self.token_text(token).encode()

    def render_chat(
        self,
        messages: Sequence[dict[str, object]],
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, object]] | None = None,
    ) -> str:
        """Prompt text of a conversation by the model's chat template; with ``tools`` by that for
        tools, where the model has one.

        Raises RefusedError when the model has no template or the template refuses the messages.
        """
        template = (self._tool_template if tools else None) or self.chat_template
        if template is None:
            raise RefusedError(
                Refused(
                    "messages",
                    f"{self.folder.name} is a base model without a chat template; use "
                    "/v1/completions, or add a chat_template to its tokenizer_config.json",
                )
            )
        return template.render(messages, add_generation_prompt, tools)


def _load_rust(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise RefusedError(
            Refused(
                "tokenizer_path",
                f"{path.parent} has no tokenizer.json; convert the tokenizer to the fast format, "
                "name a folder that has one, or use token ids alone with --skip-tokenizer-init",
            )
        )
    try:
        rust = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises bare Exception
        raise RefusedError(
            Refused("tokenizer_path", f"{path} cannot be read: {error}; download it again")
        ) from error
    rust.no_truncation()  # a stored truncation would cut prompts silently
    rust.no_padding()
    return rust


def _load_config(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise RefusedError(
            Refused("tokenizer_path", f"{path} is not valid JSON: {error}; download it again")
        ) from error
    if not isinstance(config, dict):
        raise RefusedError(Refused("tokenizer_path", f"{path} must hold a JSON object"))
    return config


def _special_tokens(config: dict[str, object]) -> dict[str, str]:
    """Named special tokens; each is stored as its text or as an object with ``content``."""
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _byte_of_char() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 stands for itself, the rest for U+0100 onward."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
