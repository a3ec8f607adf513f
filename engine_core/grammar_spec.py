"""What a request's output must look like: a grammar in one of the notations that clients send."""

from typing import Literal

import msgspec

# json_schema: a JSON Schema; json_object: any JSON object, no text; regex: a regular expression
# that the whole output matches; ebnf: GBNF or Lark; choice: a JSON list of strings;
# structural_tag: a StructuralTag of structural_tag.py as JSON.
GrammarKind = Literal["json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag"]


class GrammarSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``text`` in the notation ``kind``. ``field``: the request's own name for it, for errors."""

    kind: GrammarKind
    text: str
    field: str = "grammar"
