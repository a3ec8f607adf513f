"""The parts of an answer: content, and calls with their numbers and ids."""

from typing import Literal, NamedTuple

from ...engine_core.messages import FinishReason
from .reader import Arguments, CallStart, Piece, Text
from .request import ToolUse

Finish = Literal["stop", "length", "abort", "tool_calls"]


class CallPart(NamedTuple):
    """What is new of call ``number``; ``id`` and ``name`` come with its first part."""

    number: int
    id: str | None
    name: str | None
    arguments: str


class AnswerParts:
    """Takes one answer's text as it comes."""

    def __init__(self, use: ToolUse) -> None:
        self._parser = None if use.parse is None else use.parse()
        self._new_id = use.new_id
        self._named = use.named
        self._calls = 0

    def add(self, text: str, last: bool) -> tuple[str, list[CallPart]]:
        """New content, and one part for each call that has something new."""
        if self._parser is None:
            return text, []
        pieces = self._parser.push(text)
        return self._sorted(pieces + self._parser.finish() if last else pieces)

    def finish(self, reason: FinishReason | None) -> Finish | None:
        """OpenAI's finish reason: tool_calls where the model chose to call and was not cut.

        Once the last text was added: a stop may have come within a call, too.
        """
        if reason is None:
            return None
        cut = self._parser is not None and self._parser.cut
        called = reason.kind == "stop" and self._calls > 0 and not self._named and not cut
        return "tool_calls" if called else reason.kind

    def _sorted(self, pieces: list[Piece]) -> tuple[str, list[CallPart]]:
        content: list[str] = []
        calls: list[CallPart] = []
        for piece in pieces:
            match piece:
                case Text(text):
                    content.append(text)
                case CallStart(name):
                    calls.append(CallPart(self._calls, self._new_id(), name, ""))
                    self._calls += 1
                case Arguments(text):
                    if not calls:
                        calls.append(CallPart(self._calls - 1, None, None, ""))
                    calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + text)
        return "".join(content), calls
