"""stand-in until the frontend's part is merged"""

from llguidance import LLMatcher, grammar_from

from .grammar_spec import GrammarSpec
from .refusal import Refused


def llguidance_grammar(spec: GrammarSpec) -> str | Refused:
    """x"""
    try:
        if spec.kind == "json_object":
            return LLMatcher.grammar_from_json_schema(
                '{"type": "object"}',
                {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
            )
        if spec.kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(
                spec.text,
                {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
            )
        return grammar_from(spec.kind, spec.text)
    except ValueError as error:
        return Refused(spec.field, str(error))
