"""``outrider capabilities``: what works with which drafter, and what is refused."""

import argparse
import sys

import msgspec

from ...engine_core.capabilities import to_json, to_markdown
from ...engine_core.drafter_list import drafters_markdown, list_drafters


def main(args: list[str]) -> int:
    """Print the capability table as Markdown or JSON."""
    parser = argparse.ArgumentParser(
        prog="outrider capabilities",
        description="Show which request features work, and why others are refused.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    parser.add_argument(
        "--drafters",
        action="store_true",
        help="list the drafters of this installation instead, those of other packages too",
    )
    namespace = parser.parse_args(args)
    if namespace.drafters:
        data = msgspec.json.encode(list_drafters()).decode() + "\n"
        sys.stdout.write(data if namespace.json else drafters_markdown())
        return 0
    sys.stdout.write(to_json().decode() + "\n" if namespace.json else to_markdown())
    return 0
