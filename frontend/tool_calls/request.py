"""What the tools of a request mean for its prompt, its output and its answer."""

import re
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import msgspec

from ...engine_core.grammar_spec import GrammarSpec
from ...engine_core.refusal import Refused, RefusedError
from ...engine_core.sampling_params import SamplingParams
from ..grammars import one_grammar
from ..tokenizer import Tokenizer
from .declared import Function, NamedTool, Tool, ToolChoice
from .forced import named_call, required_calls
from .parser import FORMATS, CallFormat, Parse, ToolParser, call_id
from .schema import arguments_schema, blamed, calls_schema, strict_tags

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FLAG: Final = "--tool-call-parser"


class ToolUse(NamedTuple):
    """What the tools of a request mean. ``parse``: None where the answer is all text.

    ``shown``: the tools as chat templates get them. ``named``: a function was chosen by the client,
    which answers with the finish reason stop, as OpenAI does. ``blame``: says of a refused grammar
    which function's parameters it was.
    """

    shown: list[dict[str, object]] | None = None
    grammar: GrammarSpec | None = None
    parse: Callable[[], ToolParser] | None = None
    new_id: Callable[[], str] = call_id
    named: bool = False
    markers: tuple[str, ...] = ()
    blame: Callable[[Refused], Refused] | None = None


def tool_use(
    tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None, parser: str | None
) -> ToolUse:
    """What a request's fields ask for; ``parser``: the server's. Raises RefusedError."""
    if not tools:
        if choice not in (None, "none"):
            raise RefusedError(Refused("tool_choice", "needs tools; send them, or leave it out"))
        return ToolUse()
    functions = _functions(tools)
    shown = [_shown(tool) for tool in tools]
    if choice == "none":
        return ToolUse(shown)
    limit = 1 if parallel is False else None
    style = None if parser is None else FORMATS[parser]
    new_id = call_id if style is None else style.new_id
    grammar: GrammarSpec | None
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in functions:
            reason = f"names {name[:64]!r}, which is none of tools; name one of them"
            raise RefusedError(Refused("tool_choice", reason))
        schema = arguments_schema(functions[name], list(functions).index(name))
        grammar = GrammarSpec("json_schema", schema, "tools")
        blame = partial(blamed, functions=functions, names=[name])
        machine = _machine(named_call, [name])
        return ToolUse(shown, grammar, machine, new_id, named=True, blame=blame)
    if choice == "required":
        grammar = GrammarSpec("json_schema", calls_schema(functions, limit), "tools")
        blame = partial(blamed, functions=functions, names=list(functions))
        return ToolUse(shown, grammar, _machine(required_calls, functions), new_id, blame=blame)
    if style is None:
        reason = (
            f"auto needs the server's {_FLAG} ({', '.join(sorted(FORMATS))}): it says how the "
            "model writes calls; required, none and a named function work without"
        )
        raise RefusedError(Refused("tool_choice", reason))
    grammar = _strict(functions, style, limit)
    machine = _machine(style.parse, functions, limit)
    strict = [function.name for function in functions.values() if function.strict]
    blame = partial(blamed, functions=functions, names=strict)
    return ToolUse(shown, grammar, machine, new_id, markers=style.markers, blame=blame)


def with_tools(params: SamplingParams, use: ToolUse, tokenizer: Tokenizer) -> SamplingParams:
    """``params`` with what a request's tools need. Raises RefusedError for a second grammar."""
    if use.parse is None:
        return params
    if params.grammar is not None:
        reason = (
            f"cannot hold together with {params.grammar.field}, which decides the whole output; "
            "leave one of the two out, or say none"
        )
        raise RefusedError(Refused("tool_choice", reason))
    if use.grammar is not None:
        try:
            grammar = one_grammar([use.grammar])
        except RefusedError as error:
            assert use.blame is not None
            raise RefusedError(use.blame(error.refused)) from None
        params = msgspec.structs.replace(params, grammar=grammar)
    if params.skip_special_tokens and any(map(tokenizer.is_special, use.markers)):
        return msgspec.structs.replace(params, skip_special_tokens=False)
    return params


def _machine(
    parse: Parse, names: list[str] | dict[str, Function], limit: int | None = None
) -> Callable[[], ToolParser]:
    return partial(ToolParser, parse, frozenset(names), limit)


def _functions(tools: list[Tool]) -> dict[str, Function]:
    """The functions by name. Raises RefusedError for names that no call could mean."""
    found: dict[str, Function] = {}
    for position, tool in enumerate(tools):
        name = tool.function.name
        where = f"tools[{position}].function.name"
        if not _NAME.fullmatch(name):
            reason = "must be 1 to 64 letters, digits, underscores, dots and dashes"
            raise RefusedError(Refused(where, f"{reason}, got {name[:80]!r}"))
        if name in found:
            raise RefusedError(Refused(where, f"{name} stands twice; give each tool its own name"))
        found[name] = tool.function
    return found


def _shown(tool: Tool) -> dict[str, object]:
    """A tool as templates expect it; what only this server reads is left out."""
    function = msgspec.structs.replace(tool.function, strict=None)
    return {"type": tool.type, "function": msgspec.to_builtins(function)}


def _strict(
    functions: dict[str, Function], style: CallFormat, limit: int | None
) -> GrammarSpec | None:
    """What holds calls to their schemas if any function asks for that. Raises RefusedError."""
    if not any(function.strict for function in functions.values()):
        return None
    if style.tag is None:
        reason = (
            "strict functions with tool_choice auto need --tool-call-parser hermes or mistral; "
            "leave strict out, or set tool_choice to required or a function"
        )
        raise RefusedError(Refused("tools", reason))
    return GrammarSpec("structural_tag", strict_tags(functions, style, limit), "tools")
