"""A request's grammar as llguidance's own text, or why it cannot be one. Knows no tokenizer.

llguidance walks rules and references by recursion and ends the process when its stack does, so
what could nest too deep is refused before it is looked at.
"""

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from .grammar_depth import MAX_DEPTH, schema_depth
from .grammar_keywords import check_keywords
from .grammar_spec import GrammarSpec
from .refusal import Refused
from .structural_tag import StructuralTag, tag_grammar

MAX_GRAMMAR_BYTES: Final = 64 * 1024
_MAX_REASON: Final = 300
_MAX_SHOWN: Final = 60
# JSON comes compact: white space that a grammar allows without end, small models write without
# end, and where it allows none, most of an object's punctuation is forced. A schema's own
# "x-guidance" is stronger.
_ANY_OBJECT: Final = '{"type": "object"}'
_GBNF_RULE: Final = re.compile(r"(?m)^\s*[\w-]+\s*::=")
_LARK_START: Final = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:(?!:=))")
_UNICODE_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_NAMES: Final = {
    "json_schema": "JSON Schema",
    "json_object": "JSON Schema",
    "regex": "regular expression",
    "ebnf": "GBNF or Lark grammar",
    "choice": "list of strings",
    "structural_tag": "structural tag",
}
_POSITION: Final = re.compile(r"^(at )?\d+\(\d+\): ")
_NO_TOKENS: Final[Mapping[str, int]] = {}


def llguidance_grammar(spec: GrammarSpec, special: Mapping[str, int] = _NO_TOKENS) -> str | Refused:
    """The grammar that ``LLMatcher`` takes, its syntax checked; else a refusal of ``spec.field``.

    ``special``: the vocabulary's special tokens and their ids, which structural tags may hold.

    What only a tokenizer can tell (a special token's name in a Lark grammar, limits of the
    parser) is left to the matcher. Takes microseconds to about a second: run it off the loop for
    a text of more than a few KiB.
    """
    try:
        size = len(spec.text.encode())
    except UnicodeEncodeError:
        return Refused(spec.field, "has half a surrogate pair, which no text can hold; remove it")
    if size > MAX_GRAMMAR_BYTES:
        return Refused(
            spec.field, f"has {size} bytes, the limit is {MAX_GRAMMAR_BYTES}; send a smaller one"
        )
    try:
        grammar = _written(spec, special)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        return grammar_refusal(spec, str(error))
    from llguidance import LLMatcher  # not for those that send no grammar

    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return grammar_refusal(spec, messages[0]) if wrong else grammar


def grammar_refusal(spec: GrammarSpec, message: str) -> Refused:
    """The refusal for ``message``, what llguidance (its matcher, too) says of ``spec``.

    That may be a listing of the grammar or of the parser's state; the refusal is one sentence.
    """
    lines = message.strip().splitlines() or ["the grammar is wrong"]
    told = next((line for line in lines if line.startswith("error: ")), lines[0])
    if spec.kind != "ebnf" or _GBNF_RULE.search(spec.text):
        told = _POSITION.sub("", told)  # of a text that the client did not write
    told = told.removeprefix("error: ")[:_MAX_REASON]
    if told.startswith("NoExtension"):
        return Refused(spec.field, "no text is of this grammar; change it")
    part = _part(spec, lines)
    told += part + (_remedy(told) or ("" if part else "; correct it"))
    return Refused(spec.field, f"is no {_NAMES[spec.kind]} that works here: {told}")


def _written(spec: GrammarSpec, special: Mapping[str, int]) -> str:
    """``spec`` in llguidance's notation. Raises ValueError or MsgspecError."""
    from llguidance import LLMatcher

    match spec.kind:
        case "json_object":
            return _schema(_ANY_OBJECT)
        case "json_schema":
            return _schema(spec.text)
        case "regex":
            return LLMatcher.grammar_from_regex(spec.text)
        case "ebnf":
            return LLMatcher.grammar_from_lark(_lark(spec.text))
        case "choice":
            choices = msgspec.json.decode(spec.text, type=list[str])
            if not choices:
                raise ValueError("the list is empty; give at least one string")
            # A literal in Lark is a JSON string.
            literals = " | ".join(msgspec.json.encode(choice).decode() for choice in choices)
            return LLMatcher.grammar_from_lark(f"start: {literals}")
        case "structural_tag":
            tag = msgspec.json.decode(spec.text, type=StructuralTag)
            for structure in tag.structures:
                _check_schema(structure.schema)
            return LLMatcher.grammar_from_lark(tag_grammar(tag, special))


def _schema(text: str) -> str:
    from llguidance import LLMatcher

    schema = msgspec.json.decode(text)
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON object; {} allows any JSON value")
    _check_schema(schema)
    return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})


def _check_schema(schema: dict[str, object]) -> None:
    _check_depth(schema_depth(schema))
    check_keywords(schema)


def _lark(text: str) -> str:
    """GBNF (llama.cpp's EBNF, its first rule called ``root``) in Lark's syntax; Lark as it is."""
    if _LARK_START.search(text) or not _GBNF_RULE.search(text):
        _check_depth(text.count(":") + text.count("("))
        return text
    _check_depth(text.count("::=") + text.count("("))
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(_UNICODE_ESCAPE.sub(_unescaped, text))
    except Exception as error:  # what it raises it does not say
        raise ValueError(str(error)) from None


def _unescaped(found: re.Match[str]) -> str:
    r"""``\u00e9`` and ``\U000000e9`` as the character itself, other escapes as they are."""
    digits = found[1] or found[2]
    if digits is None:
        return found[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{found[0]} is no character; write the character itself")
    character = chr(code)
    if character in '"\\[]^-/':
        return "\\" + character if character in '"\\[]' else f"\\x{code:02x}"
    return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}.get(character, character)


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(
            f"may nest {depth} rules, references and groups or more, the limit is {MAX_DEPTH}; "
            "use fewer"
        )


def _part(spec: GrammarSpec, lines: list[str]) -> str:
    """Which regular expression of a JSON Schema the parser speaks of; it shows it, indented."""
    if spec.kind != "json_schema" or lines[0] != "regex parse error:" or len(lines) < 2:
        return ""
    guidance = msgspec.json.decode(spec.text).get("x-guidance", {})
    wrong = lines[1].removeprefix("    ")
    names = [f'"x-guidance" {name}' for name, value in guidance.items() if value == wrong]
    place = names[0] if names else '"pattern" or "patternProperties"'
    return f" in the regular expression {wrong[:_MAX_SHOWN]} of {place}; correct it"


def _remedy(told: str) -> str:
    """What to do about what llguidance does not know."""
    if told.startswith(("Unimplemented keys", "Unknown format")):
        return '; leave it out, or say "x-guidance": {"lenient": true} in the schema to ignore it'
    if told.startswith("oneOf constraints"):
        return ': say "x-guidance": {"coerce_one_of": true} in the schema'
    if told.startswith("unknown field `"):  # llguidance lists those it knows
        return '; these are the fields of "x-guidance"'
    if told.startswith("invalid type: "):
        return ' in "x-guidance"; correct it'
    if "lookarounds not supported" in told:
        return r"; leave out \b and \B, and ^ and $ within the expression"
    return ""
