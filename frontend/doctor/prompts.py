"""Prompts of ``outrider doctor``: its own twenty, or a user's."""

from pathlib import Path

import msgspec

from ..flags import UsageError

# Beginnings of text of several kinds, written for this purpose; no benchmark prompt is among them.
PROMPTS = (
    'def celsius_to_fahrenheit(degrees):\n    """Convert a temperature."""\n',
    "def is_palindrome(text):\n    cleaned = ",
    "class Queue:\n    def __init__(self):\n        self._items = []\n\n    def push(self,",
    "import json\n\n\ndef load_settings(path):\n    with open(path) as handle:\n",
    "def moving_average(values, window):\n    total = 0.0\n    for ",
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "def count_words(lines):\n    counts = {}\n    for line in lines:\n",
    "class Rectangle:\n    def __init__(self, width, height):\n",
    "def binary_search(items, wanted):\n    low, high = 0, len(items) - 1\n    while ",
    "import unittest\n\n\nclass StackTest(unittest.TestCase):\n    def test_pop_takes_last(",
    "try:\n    import simplejson as json\nexcept ImportError:\n",
    "@contextmanager\ndef working_directory(path):\n    previous = os.getcwd()\n",
    '{"name": "example", "version": "1.0.0", "scripts": {"build": "',
    "SELECT customers.name, COUNT(orders.id) AS total FROM customers JOIN orders ON ",
    "#!/bin/sh\nset -e\n\n# Back up every database to the archive folder.\nfor name in ",
    "The three states of matter that we meet every day are",
    "Dear team,\n\nthank you for the notes from yesterday's meeting. As agreed, I will",
    "A sorted list can be searched faster than one without order, because",
    "Question: Why does a boat float on water?\nAnswer:",
    "1. Wash the rice until the water runs clear.\n2.",
)


class _Line(msgspec.Struct, frozen=True):
    prompt: str | list[int]


def read_prompts(path: str) -> tuple[str | list[int], ...]:
    """Prompts of a file, as they are: of ``.jsonl`` the key ``prompt`` (text or token ids) of every
    line, of any other file one prompt a line, empty lines left out. Raises UsageError.
    """
    try:
        lines = Path(path).expanduser().read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"--prompts: cannot read {path!r}: {error.strerror}") from None
    found: list[str | list[int]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = line.decode()
            found.append(
                msgspec.json.decode(text, type=_Line).prompt if path.endswith(".jsonl") else text
            )
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"--prompts: {path!r}, line {number}: {error}") from None
    if not found:
        raise UsageError(f"--prompts: {path!r} holds no prompt")
    return tuple(found)
