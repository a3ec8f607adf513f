"""What a grammar allows behind each node of a draft tree, and which of its nodes it allows."""

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
) -> None:
    """Fill ``masks`` int32[n, W] with what may follow the n nodes.

    Node 0 is the matcher's own state, ``tokens[i]`` and ``parents[i]`` are those of node i > 0, in
    an order in which parents precede their children. Behind a node that is not allowed, or that
    ends the text, everything is: nobody asks. The matcher stays where it is.
    """
    _fill(matcher, masks[0])
    masks[1:] = _ALL
    for node in legal_nodes(matcher, tokens, parents, eos_ids):
        if tokens[node] not in eos_ids:
            _fill(matcher, masks[node])


def legal_nodes(
    matcher: LLMatcher, tokens: Sequence[int], parents: Sequence[int], eos_ids: frozenset[int]
) -> Iterator[int]:
    """The allowed nodes, each with the matcher behind it; afterwards it is where it was.

    Nothing is allowed behind an EOS, and the matcher does not go there.
    """
    path = [0]
    inside = {0}  # nodes that others may follow
    for node in _depth_first(parents):
        if parents[node] not in inside:
            continue
        back = len(path) - 1 - path.index(parents[node])
        if back:
            matcher.rollback(back)
            del path[-back:]
        if tokens[node] in eos_ids:
            if matcher.is_accepting():
                yield node
        elif matcher.validate_tokens([tokens[node]]):
            matcher.consume_token(tokens[node])
            path.append(node)
            inside.add(node)
            yield node
    if len(path) > 1:
        matcher.rollback(len(path) - 1)


def _depth_first(parents: Sequence[int]) -> Iterator[int]:
    """Nodes 1 and on, every subtree in one piece."""
    count = len(parents)
    if all(parents[node] == node - 1 for node in range(1, count)):
        yield from range(1, count)
        return
    children: list[list[int]] = [[] for _ in range(count)]
    for node in range(1, count):
        children[parents[node]].append(node)
    stack = children[0][::-1]
    while stack:
        node = stack.pop()
        yield node
        stack += children[node][::-1]


def _fill(matcher: LLMatcher, row: I32) -> None:
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
