"""The n-gram match within one text, by trying every suffix against every place."""

from collections.abc import Sequence


def best_match(text: Sequence[int], least: int, most: int) -> tuple[int, int] | None:
    """Length and end of the longest earlier copy of a suffix, the latest among equals."""
    for length in range(min(most, len(text) - 1), least - 1, -1):
        suffix = list(text[len(text) - length :])
        ends = [e for e in range(length, len(text)) if list(text[e - length : e]) == suffix]
        if ends:
            return length, ends[-1]
    return None


def draft(text: Sequence[int], cap: int, least: int, most: int) -> list[int]:
    """``cap`` tokens that continue the text as it went on after the match, or none."""
    match = best_match(text, least, most)
    if match is None:
        return []
    longer = list(text)
    source = match[1]
    for _ in range(cap):
        longer.append(longer[source])
        source += 1
    return longer[len(text) :]
