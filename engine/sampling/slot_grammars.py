"""The grammars of the requests in slots: where each stands, and what it allows next."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from ...engine_core.draft_caps import draft_room
from ...engine_core.grammar_compiler import GrammarCompiler
from ...engine_core.grammar_spec import GrammarSpec
from ...engine_core.grammar_text import grammar_refusal
from ...engine_core.grammar_walk import ALL, MaskChain, legal_drafts, path_to, plan_masks
from ...engine_core.ids import I32, I64, RowKind, i32, u8
from ...engine_core.plan import HostDrafts, StepPlan
from ...engine_core.refusal import Refused


class RowTokens(NamedTuple):
    """The query tokens of a step's R rows, and which nodes are theirs.

    Row r has the tokens ``begins[r]`` to ``ends[r]`` and the nodes ``node_begins[r]`` to
    ``node_ends[r]``, int32[R]. ``tokens`` and ``parents`` [T]: of verify rows the bonus token and
    drafts, whose parents count within the row; None: all are chains.
    """

    begins: I32
    ends: I32
    node_begins: I32
    node_ends: I32
    tokens: I32 | I64
    parents: I32 | None


class NodeMasks(NamedTuple):
    """The tokens allowed at the step's nodes ``nodes`` int64[M]: ``bits`` int32[M, W] as
    ``kernels/logit_masks`` has them. Where ``dead`` bool[M] nothing is.
    """

    nodes: I64
    bits: I32
    dead: npt.NDArray[np.bool_]


class SiftedDrafts(NamedTuple):
    """Drafts without what grammars forbid, ``illegal`` of them, and with what they force.

    ``forced``: see StepResult.
    """

    drafts: HostDrafts
    illegal: int
    forced: bytes


# Of a slot: how many of the tokens that its grammar forces are on their way with certainty.
TokensAhead = Callable[[int], int | None]


@dataclass(slots=True)
class _Slot:
    """A request's grammar: a matcher behind ``text``, what the request has said so far.

    ``automaton``: a number of the one that the matcher shares. ``wrong``: why a node of its latest
    step may have nothing. ``run``: what the grammar forces behind ``text``; None until it is asked.
    """

    spec: GrammarSpec
    matcher: LLMatcher
    automaton: int
    text: list[int]
    wrong: str | None = None
    run: list[int] | None = None


_MOVED_TEXT = 128  # tokens that a step has time to walk again


class _Asked(NamedTuple):
    """A row whose nodes need masks: ``tokens`` and ``parents`` as in ``plan_masks``."""

    slot: _Slot
    first_node: int
    tokens: list[int]
    parents: list[int]


def _fresh_block(rows: int, words: int) -> I32:
    return np.empty((rows, words), dtype=np.int32)


class SlotGrammars:
    """Matchers by slot, moved by what steps emit alone: once a step, at its end.

    Matchers of one grammar share an automaton, which has limits: what one of them cannot hold, be
    it behind a draft only, spoils the others. Who notices begins anew, with one of its own.
    """

    def __init__(self, compiler: GrammarCompiler, forced: int | None = None) -> None:
        """``forced``: drafts that all rows of a step may be forced to have; None: any."""
        self._compiler = compiler
        self._forced = forced
        self._slots: dict[int, _Slot] = {}

    def concern(self, slots: I32) -> bool:
        """Whether any of these slots has a grammar."""
        return bool(self._slots) and not self._slots.keys().isdisjoint(slots.tolist())

    def enter(self, plan: StepPlan) -> None:
        """Requests enter their slots, some with text from before a retraction."""
        for init in plan.inits:
            self._slots.pop(init.slot, None)
            spec = init.params.grammar
            if spec is not None:
                entered = _Slot(spec, *self._compiler.begin(spec), [])
                self._move(entered, i32(init.output).tolist())
                self._slots[init.slot] = entered

    def reset(self) -> None:
        """Forget every slot."""
        self._slots.clear()

    def run(self, slot: int) -> list[int] | None:
        """The tokens that a slot's grammar forces next, not to be changed; None without one."""
        mine = self._slots.get(slot)
        if mine is None:
            return None
        if mine.run is None:
            mine.run = mine.matcher.deep_copy().compute_ff_tokens()
        return mine.run

    def sift(
        self, plan: StepPlan, drafts: HostDrafts, ahead: TokensAhead = lambda _: 0
    ) -> SiftedDrafts:
        """For rows with a grammar without the forbidden drafts and what hangs on them or, where the
        grammar leaves no choice, those that it forces. The device adds none to a row with drafts.

        ``ahead``: what steps in flight bring; of a slot of which that is not known nothing is
        forced.
        """
        counts, caps, slots = i32(drafts.counts), draft_room(plan), i32(plan.slots)
        if not self.concern(slots):
            return SiftedDrafts(drafts, 0, b"")
        verifies = u8(plan.kinds) == RowKind.VERIFY
        cu = np.concatenate(([0], np.cumsum(counts)))
        tokens, parents = i32(drafts.tokens).tolist(), i32(drafts.parents).tolist()
        new_tokens: list[int] = []
        new_parents: list[int] = []
        new_counts, forced = counts.copy(), np.zeros_like(counts)
        illegal, left = 0, self._forced
        for row, slot in enumerate(slots.tolist()):
            begin, end = int(cu[row]), int(cu[row + 1])
            ours, theirs = tokens[begin:end], parents[begin:end]
            mine = self._slots.get(slot) if verifies[row] else None
            if mine is not None:
                run, known = self.run(slot), ahead(slot)
                if run and known is not None:
                    room = int(caps[row]) if left is None else min(int(caps[row]), left)
                    run = run[known : known + room]
                if run and known is not None:
                    ours, theirs = run, list(range(len(run)))
                    forced[row] = len(run)
                    left = None if left is None else left - len(run)
                elif ours:
                    ours, theirs = legal_drafts(mine.matcher, ours, theirs, self._compiler.eos_ids)
                    illegal += end - begin - len(ours)
                new_counts[row] = len(ours)
            new_tokens += ours
            new_parents += theirs
        device_caps = i32(drafts.device_caps).copy()
        if len(device_caps):
            device_caps[new_counts > 0] = 0
        made = HostDrafts(
            drafts.step,
            new_counts.tobytes(),
            np.array(new_tokens, dtype=np.int32).tobytes(),
            np.array(new_parents, dtype=np.int32).tobytes(),
            device_caps.tobytes(),
        )
        return SiftedDrafts(made, illegal, forced.tobytes() if forced.any() else b"")

    def masks(
        self,
        slots: I32,
        kinds: bytes,
        rows: RowTokens,
        new_block: Callable[[int, int], I32] = _fresh_block,
    ) -> NodeMasks:
        """What is allowed at the nodes of the step's rows that have a grammar.

        ``new_block`` gives the memory of int32[M, W] for the masks.
        """
        if self._compiler.mask_threads.count > 1:
            self._spread()
        asked = self._asked(slots, kinds, rows)
        # Chains of one automaton stand together: they would wait for each other in two threads.
        asked.sort(key=lambda one: one.slot.automaton)
        total = sum(len(one.parents) for one in asked)
        block = new_block(total, self._compiler.mask_words)
        nodes = np.empty(total, dtype=np.int64)
        chains: list[MaskChain] = []
        planned: list[tuple[_Asked, list[MaskChain], list[int]]] = []
        row, eos = 0, self._compiler.eos_ids
        for one in asked:
            count = len(one.parents)
            if count > 1:
                block[row : row + count] = ALL
            tree = plan_masks(one.slot.matcher, one.tokens, one.parents, eos, row)
            nodes[tree.rows] = range(one.first_node, one.first_node + count)
            chains += tree.chains
            planned.append((one, *tree))
            row += count
        self._compiler.mask_threads.fill(chains, block)
        for one, made, places in planned:
            one.slot.wrong = None
            if any(chain.matcher.is_error() for chain in made):
                self._walk_anew(one.slot, one.tokens, one.parents, block, places)
        return NodeMasks(nodes, block, np.bitwise_or.reduce(block, axis=1) == 0)

    def _spread(self) -> None:
        """Move one slot of the most crowded automaton to another that its grammar has by now.

        What is asked of one automaton is done by one thread at a time.
        """
        crowds = Counter(mine.automaton for mine in self._slots.values())
        if not crowds:
            return
        automaton, crowd = crowds.most_common(1)[0]
        theirs = (mine for mine in self._slots.values() if mine.automaton == automaton)
        mine = next((mine for mine in theirs if len(mine.text) <= _MOVED_TEXT), None)
        if crowd < 2 or mine is None:
            return
        matcher, other = self._compiler.begin(mine.spec)
        if crowds[other] + 1 < crowd and matcher.consume_tokens(mine.text):
            mine.matcher, mine.automaton = matcher, other

    def _asked(self, slots: I32, kinds: bytes, rows: RowTokens) -> list[_Asked]:
        asked: list[_Asked] = []
        for row, slot in enumerate(slots.tolist()):
            mine = self._slots.get(slot)
            first, last = int(rows.node_begins[row]), int(rows.node_ends[row])
            if mine is None or first == last:
                continue
            tokens = parents = [-1]
            if kinds[row] == RowKind.VERIFY:
                begin, end = int(rows.begins[row]), int(rows.ends[row])
                tokens = rows.tokens[begin:end].tolist()
                parents = list(range(-1, end - begin - 1))
                if rows.parents is not None:
                    parents = rows.parents[begin:end].tolist()
            asked.append(_Asked(mine, first, tokens, parents))
        return asked

    def advance(self, slots: I32, accept_cu: I32, emitted: I32) -> None:
        """Move over what the step's rows emitted: ``emitted[accept_cu[r] : accept_cu[r + 1]]``."""
        if not self._slots:
            return
        for row, slot in enumerate(slots.tolist()):
            mine = self._slots.get(slot)
            if mine is not None:
                self._move(mine, emitted[accept_cu[row] : accept_cu[row + 1]].tolist())

    def refusal(self, slot: int) -> Refused | None:
        """Why the slot's request cannot go on, where its grammar is to blame."""
        mine = self._slots.get(slot)
        if mine is None or mine.wrong is None:
            return None
        return grammar_refusal(mine.spec, mine.wrong)

    def _move(self, mine: _Slot, tokens: list[int]) -> None:
        """Up to the end of the text: what a run holds beyond is not the request's."""
        mine.run = None
        for token in tokens:
            if token in self._compiler.eos_ids:
                return
            mine.matcher.consume_token(token)
            mine.text.append(token)

    def _walk_anew(
        self, mine: _Slot, tokens: list[int], parents: list[int], block: I32, places: list[int]
    ) -> None:
        """The row's masks, at ``block[places]``, with an automaton for each node, as plain
        decoding would have it there. Where even that one fails nothing is allowed.
        """
        eos = self._compiler.eos_ids
        for node, place in enumerate(places):
            path = path_to(node, tokens, parents)
            matcher, automaton = self._compiler.renewed(mine.spec)
            matcher.consume_tokens(mine.text)
            if not node:
                mine.matcher, mine.automaton, mine.run = matcher, automaton, None
            elif not eos.isdisjoint(path) or matcher.try_consume_tokens(path) < len(path):
                block[place] = ALL  # not allowed, or the end: nobody asks
                continue
            matcher = matcher.deep_copy()
            self._compiler.mask_threads.fill([MaskChain(matcher, place, [])], block)
            if matcher.is_error():
                block[place] = 0
                mine.wrong = matcher.get_error()
