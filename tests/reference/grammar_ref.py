"""Which tokens may come next when the output must be one of a few strings, by trying them all."""

import json
from pathlib import Path


def token_bytes(tokenizer: Path) -> dict[bytes, list[int]]:
    """Ids by the bytes of a byte-level tokenizer.json's ordinary tokens."""
    found: dict[bytes, list[int]] = {}
    data = json.loads(tokenizer.read_text())
    special = {added["id"] for added in data["added_tokens"] if added["special"]}
    byte_of = _bytes_of_characters()
    for token, index in data["model"]["vocab"].items():
        if index not in special:
            found.setdefault(bytes(byte_of[c] for c in token), []).append(index)
    return found


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    made = {chr(byte): byte for byte in plain}
    return made | {chr(256 + index): byte for index, byte in enumerate(rest)}


def allowed(
    language: list[bytes], text: bytes, vocabulary: dict[bytes, list[int]], eos: int
) -> set[int]:
    """Tokens that leave ``text`` the beginning of a string of ``language``, EOS where it is one."""
    found: set[int] = set()
    for string in language:
        if not string.startswith(text):
            continue
        if string == text:
            found.add(eos)
        for end in range(len(text) + 1, len(string) + 1):
            found.update(vocabulary.get(string[len(text) : end], ()))
    return found
