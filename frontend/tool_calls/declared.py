"""The fields of a chat request that declare tools and say which to call."""

from typing import Literal

import msgspec


class Function(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call. ``parameters``: a JSON Schema of an object."""

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's object; functions are the only tools."""

    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The function that ``tool_choice`` names."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A ``tool_choice`` that is one function."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool
