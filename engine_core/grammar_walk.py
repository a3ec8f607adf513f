"""What a grammar allows behind each node of a draft tree, and which of its nodes it allows.

A tree is walked as chains, each by a copy, which takes a microsecond: what goes wrong behind a
draft, such as a limit of the matcher's, is no trouble of those who do not go there. Along a chain
llguidance makes a mask and takes a token in turns, as it does fastest: inside a string the next
mask is mostly the one before. Chains of one automaton wait for each other, those of several do not.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

from llguidance import LLExecutor, LLMatcher

from .ids import I32

ALL = -1  # every bit of an int32
_FEW = 4  # nodes whose masks are made before a thread has woken


class MaskChain(NamedTuple):
    """Nodes behind each other, whose masks go to a block's rows from ``row`` on.

    ``matcher`` stands at the first and stays there; the others follow by ``tokens``.
    """

    matcher: LLMatcher
    row: int
    tokens: list[int]


class MaskTree(NamedTuple):
    """A draft tree's chains, and the row of each of its nodes in a block."""

    chains: list[MaskChain]
    rows: list[int]


def plan_masks(
    matcher: LLMatcher,
    tokens: Sequence[int],
    parents: Sequence[int],
    eos_ids: frozenset[int],
    first_row: int,
) -> MaskTree:
    """How to make the masks of n nodes, in as many rows of a block from ``first_row`` on.

    Node 0 is the matcher's own state, ``tokens[i]`` and ``parents[i]`` are those of node i > 0,
    parents before their children. Rows behind a node that is not allowed, or that ends the text,
    are left as they are: nobody asks.
    """
    if len(parents) == 1:  # it stays where it is, and may know its next mask by this one
        return MaskTree([MaskChain(matcher, first_row, [])], [first_row])
    chains: list[list[int]] = []
    tails: dict[int, list[int]] = {}  # chains by their last node
    for node, parent in enumerate(parents):
        chain = tails.pop(parent, None)
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(node)
        tails[node] = chain
    rows = [0] * len(parents)
    made: list[MaskChain] = []
    row = first_row
    for chain in chains:
        for place, node in enumerate(chain, row):
            rows[node] = place
        begin = matcher.deep_copy()
        path = path_to(chain[0], tokens, parents)
        if eos_ids.isdisjoint(path) and (not path or begin.try_consume_tokens(path) == len(path)):
            rest = [tokens[node] for node in chain[1:]]
            end = next((i for i, token in enumerate(rest) if token in eos_ids), len(rest))
            made.append(MaskChain(begin, row, rest[:end]))
        row += len(chain)
    return MaskTree(made, rows)


def path_to(node: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The tokens from behind node 0 to ``node``, its own included."""
    path: list[int] = []
    while node > 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


@final
class MaskThreads:
    """Makes masks in up to ``count`` threads at a time, and without the GIL."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._executor: LLExecutor | None = None

    def fill(self, chains: Sequence[MaskChain], block: I32) -> None:
        """Write the masks of ``chains`` into rows of ``block`` int32[n, W], which is contiguous.

        Those of one automaton should stand together. A matcher that could not make its masks says
        so afterwards, and what its rows hold means nothing.
        """
        if not block.flags.c_contiguous:
            raise ValueError("masks need a contiguous block")
        begin, stride = block.ctypes.data, block.shape[1] * 4
        nodes = sum(1 + len(chain.tokens) for chain in chains)
        if self._executor is None:
            self._executor = LLExecutor(self.count)
        fill, fill_chains = (
            self._executor.unsafe_compute_mask_ptr,
            self._executor.unsafe_compute_mask_ptr_with_draft_token,
        )
        long = [(matcher, row, tokens) for matcher, row, tokens in chains if tokens]
        short = [(matcher, row) for matcher, row, tokens in chains if not tokens]
        if self.count > 1 and nodes > _FEW:
            if long:
                fill_chains(long, begin, stride, len(block))
            if short:
                fill(short, begin, stride, len(block))
            return
        for one in long:  # what is alone stays in this thread
            fill_chains([one], begin, stride, len(block))
        for other in short:
            fill([other], begin, stride, len(block))


def legal_drafts(
    matcher: LLMatcher, tokens: list[int], parents: list[int], eos_ids: frozenset[int]
) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree's allowed nodes; parents count from 1, 0 being the matcher."""
    if parents == list(range(len(parents))) and eos_ids.isdisjoint(tokens):
        count = matcher.deep_copy().validate_tokens(tokens)  # a chain: one call
        return tokens[:count], parents[:count]
    legal = [node for node, _ in legal_nodes(matcher, [0, *tokens], [-1, *parents], eos_ids)]
    place = {0: 0} | {node: index + 1 for index, node in enumerate(legal)}
    kept = [tokens[node - 1] for node in legal]
    return kept, [place[parents[node - 1]] for node in legal]


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
