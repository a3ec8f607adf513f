"""The answers to a conversation in OpenAI's shape, whole and in chunks."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from ..tool_calls.answer import CallPart, Finish
from .answers import Usage
from .logprobs import ChatLogprobs
from .prompt_part import PromptLogprobs


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """``arguments``: JSON as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the model asks for."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of a call's function."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of a call; ``id``, ``type`` and the name come with its first delta."""

    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET
    function: FunctionDelta


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message; ``content`` is null where there are calls and nothing else."""

    role: str
    content: str | None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is new of a message in a stream."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer; ``token_ids`` only where they were asked for."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    matched_stop: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of one answer."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    matched_stop: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer that is not streamed. ``simulated``: its accept lengths were forced.

    ``prompt_logprobs`` and ``prompt_token_ids``, of the rendered prompt, only if asked for.
    """

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    simulated: bool = False


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One chunk of a streamed answer; ``prompt_token_ids`` come with the first one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    simulated: bool = False


def answer_message(content: str, calls: Sequence[CallPart]) -> AnswerMessage:
    """The whole message; each call is one part."""
    if not calls:
        return AnswerMessage(role="assistant", content=content)
    return AnswerMessage(
        role="assistant",
        content=content or None,
        tool_calls=[
            ToolCall(
                id=call.id or "",
                function=FunctionCall(name=call.name or "", arguments=call.arguments),
            )
            for call in calls
        ],
    )


def message_delta(content: str, calls: Sequence[CallPart]) -> MessageDelta:
    """What is new."""
    return MessageDelta(
        content=content or msgspec.UNSET,
        tool_calls=[_call_delta(call) for call in calls] or msgspec.UNSET,
    )


def _call_delta(call: CallPart) -> ToolCallDelta:
    if call.id is None or call.name is None:
        return ToolCallDelta(index=call.number, function=FunctionDelta(arguments=call.arguments))
    return ToolCallDelta(
        index=call.number,
        id=call.id,
        type="function",
        function=FunctionDelta(name=call.name, arguments=call.arguments),
    )
