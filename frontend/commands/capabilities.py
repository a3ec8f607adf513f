"""``outrider capabilities``: what works with which drafter, and what is refused."""

import argparse
import sys

from ...engine_core.capabilities import plugins_text, to_json, to_markdown


def main(args: list[str]) -> int:
    """Print the capability table as Markdown or JSON."""
    parser = argparse.ArgumentParser(
        prog="outrider capabilities",
        description="Show which request features work, and why others are refused.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    namespace = parser.parse_args(args)
    markdown = to_markdown() + plugins_text()
    sys.stdout.write(to_json().decode() + "\n" if namespace.json else markdown)
    return 0
