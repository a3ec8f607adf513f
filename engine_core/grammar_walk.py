"""What a grammar allows behind each node of a draft tree, and which of its nodes it allows.

Every node is walked by a copy, which takes a microsecond: what goes wrong behind a draft, such as a
limit of the matcher's, is no trouble of those who do not go there.
"""

from collections.abc import Iterator, Sequence

from llguidance import LLMatcher

from .ids import I32

_ALL = -1  # every bit of an int32


def walk_masks(
    matcher: LLMatcher,
    tokens: Sequence[int],
    parents: Sequence[int],
    eos_ids: frozenset[int],
    masks: I32,
) -> str | None:
    """Fill ``masks`` int32[n, W] with what may follow the n nodes; what went wrong, if anything.

    Node 0 is the matcher's own state, ``tokens[i]`` and ``parents[i]`` are those of node i > 0,
    parents before their children. Behind a node that is not allowed, or that ends the text,
    everything is: nobody asks. Where something went wrong nothing is.
    """
    wrong = _fill(matcher, masks[0])
    masks[1:] = _ALL
    for node, behind in legal_nodes(matcher, tokens, parents, eos_ids):
        if behind is not None:
            wrong = _fill(behind, masks[node]) or wrong
    return wrong


def legal_nodes(
    matcher: LLMatcher, tokens: Sequence[int], parents: Sequence[int], eos_ids: frozenset[int]
) -> Iterator[tuple[int, LLMatcher | None]]:
    """The allowed nodes, each with a matcher behind it; None behind an EOS: nothing follows."""
    behind: list[LLMatcher | None] = [matcher, *[None] * (len(parents) - 1)]
    for node in range(1, len(parents)):
        before = behind[parents[node]]
        if before is None:
            continue
        if tokens[node] in eos_ids:
            if before.is_accepting():
                yield node, None
            continue
        after = before.deep_copy()
        if after.validate_tokens([tokens[node]]) and after.consume_token(tokens[node]):
            behind[node] = after
            yield node, after


def _fill(matcher: LLMatcher, row: I32) -> str | None:
    """One node's mask; empty, with a reason, where there is none."""
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    if not matcher.is_error():
        return None
    row[:] = 0
    return matcher.get_error()
