"""Text that comes in parts, read as if all of it were there.

A parser is a generator over a :class:`Reader`: it takes characters one after the other and yields
where the next one has not come yet. So no split of the text can change what it does.
"""

import re
from collections.abc import Generator
from typing import Final, NamedTuple, TypeVar

from ..detokenizer import begun_length

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where it needs more text

SPACES: Final = " \t\r\n"
_SPACES: Final = re.compile(r"[ \t\r\n]*")


class Text(NamedTuple):
    """Text of the answer that belongs to no call."""

    text: str


class CallStart(NamedTuple):
    """The next call; its arguments follow."""

    name: str


class Arguments(NamedTuple):
    """The next characters of the latest call's arguments."""

    text: str


Piece = Text | CallStart | Arguments


class Reader:
    """The text so far, read up to a point; what was read is *pending* until it is given out.

    Pending text becomes content, arguments, or syntax that is dropped. A parser that finds no call
    leaves it pending and goes on with :meth:`text_until`, which gives it out as content. White
    space before a call is dropped with it, behind one it is kept only if text follows.
    """

    def __init__(self, limit: int | None = None) -> None:
        """``limit``: so many calls are found, what follows them is text."""
        self._text = ""  # pending from _given to _read
        self._given = 0
        self._read = 0
        self._room = limit
        self._ended = False
        self._streams = False  # what is pending belongs to arguments
        self._behind_call = False  # nothing but white space was pending since a call
        self.cut = False  # the text ended within the arguments of a call
        self._closing = False  # what a call still needs may be missing at the end
        self._pieces: list[Piece] = []

    def add(self, text: str) -> None:
        """More text has come."""
        self._text = self._text[self._given :] + text
        self._read -= self._given
        self._given = 0

    def end(self) -> None:
        """All text has come."""
        self._ended = True

    def pieces(self) -> list[Piece]:
        """What became certain since the last call."""
        if self._streams:
            self._flow()
        pieces, self._pieces = self._pieces, []
        return pieces

    @property
    def full(self) -> bool:
        """Whether no further call may begin."""
        return self._room == 0

    @property
    def exhausted(self) -> bool:
        """Whether all of the text has come and was read."""
        return self._ended and self._read == len(self._text)

    @property
    def held(self) -> int:
        """How many characters are pending."""
        return self._read - self._given

    def pending(self, start: int = 0) -> str:
        """What is pending, from its character ``start`` on."""
        return self._text[self._given + start : self._read]

    def peek(self) -> Steps[str]:
        """The next character, empty at the end of the text."""
        while self._read == len(self._text) and not self._ended:
            yield
        return self._text[self._read : self._read + 1]

    def skip(self) -> None:
        """Read the character that was peeked."""
        self._read += 1

    def accept(self, characters: str) -> Steps[str]:
        """Read the next character if it is one of these; empty if not."""
        found = yield from self.peek()
        if not found or found not in characters:
            return ""
        self._read += 1
        return found

    def run(self, pattern: re.Pattern[str]) -> Steps[None]:
        """Read all that ``pattern``, a repeated class of characters, matches."""
        while True:
            found = pattern.match(self._text, self._read)
            self._read = found.end() if found is not None else self._read
            if self._read < len(self._text) or self._ended:
                return
            yield

    def spaces(self) -> Steps[None]:
        """Read white space."""
        yield from self.run(_SPACES)

    def literal(self, text: str) -> Steps[bool]:
        """Read exactly ``text``; False at the first character that differs, which is not read."""
        for character in text:
            if not (yield from self.accept(character)):
                return False
        return True

    def text_until(self, marker: str) -> Steps[bool]:
        """Give out text up to ``marker`` and read that; False if the text ends without it."""
        if self._closing and self.exhausted:
            self.drop()
        self._closing = False
        while True:
            found = self._text.find(marker, self._read)
            if found >= 0:
                self._give_text(found)
                self._read += len(marker)
                return True
            if self._ended:
                self._read = len(self._text)
                if not self._behind_call or self.pending().strip(SPACES):
                    self._give(Text(self.pending()))
                self.drop()
                return False
            self._give_text(len(self._text) - begun_length(self._text[self._read :], marker))
            yield

    def begin(self, name: str) -> None:
        """A call was found; what is pending is its syntax."""
        self.drop()
        self._pieces.append(CallStart(name))
        if self._room is not None:
            self._room -= 1
        self._behind_call = self._closing = True

    def give_arguments(self, text: str) -> None:
        """Give out arguments that are known as a whole."""
        self._give(Arguments(text))

    def stream_arguments(self, on: bool) -> None:
        """What is read from now on, until this is switched off, is the call's arguments."""
        if self._streams:
            self._flow()
        self._streams = on

    def drop(self) -> None:
        """What is pending is syntax."""
        self._given = self._read

    def _flow(self) -> None:
        self._give(Arguments(self.pending()))
        self.drop()

    def _give_text(self, end: int) -> None:
        """Give out the text before ``end`` but the white space at its end; read up to there."""
        self._read = end
        text = self.pending().rstrip(SPACES)
        if text:
            self._give(Text(text))
            self._behind_call = False
        self._given += len(text)

    def _give(self, piece: Text | Arguments) -> None:
        if piece.text:
            self._pieces.append(piece)
