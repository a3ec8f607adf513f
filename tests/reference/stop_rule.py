"""Where a token sequence ends, by looking at the whole text of every prefix."""

from collections.abc import Callable, Sequence


def end_of_request(
    tokens: Sequence[int],
    *,
    cap: int,
    min_tokens: int,
    stop_ids: frozenset[int],
    stops: Sequence[str],
    text: Callable[[Sequence[int]], str],
) -> tuple[int, str | None, int | str | None]:
    """(tokens kept, "stop" | "length" | None, what matched). ``text``: whole text of tokens."""
    for count in range(1, len(tokens) + 1):
        if cap == 0:
            return 0, "length", None
        if count > min_tokens:
            before = len(text(tokens[: count - 1]))
            now = text(tokens[:count])
            found = [
                (at, stop)
                for stop in stops
                for at in range(len(now) - len(stop) + 1)
                if now[at : at + len(stop)] == stop and at + len(stop) > before
            ]
            if found:
                at = min(found)[0]
                return count, "stop", next(s for a, s in found if a == at)
            if tokens[count - 1] in stop_ids:
                return count, "stop", tokens[count - 1]
        if count == cap:
            return count, "length", None
    return len(tokens), None, None
