"""The flags that ask for a grammar on a command line; at most one of them is given."""

import argparse
import re
from pathlib import Path

from ..engine_core.grammar_spec import GrammarKind, GrammarSpec
from .flags import UsageError
from .grammars import grammar_spec

_GRAMMAR_TEXT = re.compile(r"::=|\n|start\s*:")


def add_grammar_flags(group: argparse._ArgumentGroup) -> None:
    """Add ``--json-schema``, ``--regex``, ``--ebnf`` and ``--choice``."""
    one = group.add_mutually_exclusive_group()
    one.add_argument(
        "--json-schema", metavar="FILE_OR_JSON", help="the output is JSON of this JSON Schema"
    )
    one.add_argument("--regex", metavar="REGEX", help="the whole output matches it")
    one.add_argument(
        "--ebnf", metavar="FILE_OR_TEXT", help="the output is of this GBNF or Lark grammar"
    )
    one.add_argument(
        "--choice",
        metavar="TEXT",
        action="append",
        help="the output is this text; given several times, one of them",
    )


def grammar_from_flags(namespace: argparse.Namespace) -> GrammarSpec | None:
    """The grammar of a parsed command line, under its flag's name. Raises UsageError, or
    RefusedError.
    """
    schema, ebnf = namespace.json_schema, namespace.ebnf
    if schema is not None and not schema.lstrip().startswith("{"):
        schema = _read("--json-schema", schema, 'a schema in place starts with "{"')
    if ebnf is not None and not _GRAMMAR_TEXT.search(ebnf):
        ebnf = _read("--ebnf", ebnf, "a grammar in place has rules: root ::= ... or start: ...")
    asked: tuple[tuple[GrammarKind, str, object], ...] = (
        ("json_schema", "json_schema", schema),
        ("regex", "regex", namespace.regex),
        ("ebnf", "ebnf", ebnf),
        ("choice", "choice", namespace.choice),
    )
    specs = [grammar_spec(kind, value, field) for kind, field, value in asked]
    return next((spec for spec in specs if spec is not None), None)


def _read(flag: str, path: str, in_place: str) -> str:
    try:
        return Path(path).read_bytes().decode()
    except (OSError, ValueError) as error:  # ValueError: no path at all, or no UTF-8
        raise UsageError(f"{flag}: cannot read {path[:80]!r}: {error}; {in_place}") from None
