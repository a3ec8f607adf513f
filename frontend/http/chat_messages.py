"""The messages of a conversation, and what chat templates get for them."""

from typing import Final, Literal

import msgspec

from .errors import HttpError

_NO_CALL: Final = "must be a JSON object as text; leave a call out that was cut"


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a message; only text is supported."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The function of an earlier call; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str = ""


class EarlierCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call of an assistant's message. ``index``: clients that join deltas leave it there."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message. The last four are null in an answer that a client sends back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, object]]:
    """The messages as templates expect them: text content, the arguments of calls as objects.

    Raises HttpError for what no message of its role has.
    """
    return [_plain(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _plain(where: str, message: ChatMessage) -> dict[str, object]:
    if message.content is None and not message.tool_calls:
        raise _refused(f"{where}.content", "is required")
    if message.tool_calls and message.role != "assistant":
        raise _refused(f"{where}.tool_calls", "are an assistant's alone; leave them out")
    if message.tool_call_id is not None and message.role != "tool":
        raise _refused(f"{where}.tool_call_id", "belongs to the role tool; leave it out")
    plain: dict[str, object] = {
        "role": message.role,
        "content": _content(f"{where}.content", message.content),
    }
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            _call(f"{where}.tool_calls[{number}]", call)
            for number, call in enumerate(message.tool_calls)
        ]
    return plain


def _content(where: str, content: str | list[TextPart] | None) -> str:
    """Text; of parts, which may be text alone, one a line."""
    if not isinstance(content, list):
        return content or ""
    for number, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise HttpError(
                400 if part.type == "text" else 501,
                f"{where}[{number}]: only parts of type text with a text are supported, "
                f"got type {part.type!r}",
                param=f"{where}[{number}]",
            )
    return "\n".join(part.text for part in content if part.text is not None)


def _call(where: str, call: EarlierCall) -> dict[str, object]:
    """A call as templates expect it, its arguments as an object."""
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, object])
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise _refused(f"{where}.function.arguments", _NO_CALL) from None
    function = {"name": call.function.name, "arguments": arguments}
    plain: dict[str, object] = {"type": call.type, "function": function}
    return plain if call.id is None else plain | {"id": call.id}


def _refused(where: str, reason: str) -> HttpError:
    return HttpError(400, f"{where}: {reason}", param=where)
