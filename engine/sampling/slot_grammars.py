"""The grammars of the requests in slots: where each stands, and what it allows next."""

from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher

from ...engine_core.grammar_compiler import GrammarCompiler
from ...engine_core.grammar_walk import legal_nodes, walk_masks
from ...engine_core.ids import I32, I64, RowKind, i32, u8
from ...engine_core.plan import HostDrafts, StepPlan
from ..row_errors import BAD_GRAMMAR


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
    ``kernels/logit_masks`` has them.
    """

    nodes: I64
    bits: I32


class SiftedDrafts(NamedTuple):
    """Drafts without what grammars forbid, ``illegal`` of them, and with what they force."""

    drafts: HostDrafts
    illegal: int
    forced: int


class SlotGrammars:
    """Matchers by slot, moved by what steps emit alone: once a step, at its end."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._matchers: dict[int, LLMatcher] = {}

    def concern(self, slots: I32) -> bool:
        """Whether any of these slots has a grammar."""
        return bool(self._matchers) and not self._matchers.keys().isdisjoint(slots.tolist())

    def enter(self, plan: StepPlan) -> None:
        """Requests enter their slots, some with text from before a retraction."""
        for init in plan.inits:
            self._matchers.pop(init.slot, None)
            if init.params.grammar is None:
                continue
            matcher = self._compiler.matcher(init.params.grammar)
            self._consume(matcher, i32(init.output).tolist())
            self._matchers[init.slot] = matcher

    def reset(self) -> None:
        """Forget every slot."""
        self._matchers.clear()

    def sift(self, plan: StepPlan, drafts: HostDrafts) -> SiftedDrafts:
        """For rows with a grammar without the forbidden drafts and what hangs on them or, where the
        grammar leaves no choice, those that it forces. The device adds none to a row with drafts.
        """
        counts, caps, slots = i32(drafts.counts), i32(plan.q_caps) - 1, i32(plan.slots)
        if not self.concern(slots):
            return SiftedDrafts(drafts, 0, 0)
        verifies = u8(plan.kinds) == RowKind.VERIFY
        cu = np.concatenate(([0], np.cumsum(counts)))
        tokens, parents = i32(drafts.tokens).tolist(), i32(drafts.parents).tolist()
        new_tokens: list[int] = []
        new_parents: list[int] = []
        new_counts = counts.copy()
        illegal = forced = 0
        for row, slot in enumerate(slots.tolist()):
            begin, end = int(cu[row]), int(cu[row + 1])
            ours, theirs = tokens[begin:end], parents[begin:end]
            matcher = self._matchers.get(slot) if verifies[row] else None
            if matcher is not None:
                run = matcher.compute_ff_tokens()[: int(caps[row])]
                if run:
                    ours, theirs = run, list(range(len(run)))
                    forced += len(run)
                elif ours:
                    ours, theirs = _legal(matcher, ours, theirs, self._compiler.eos_ids)
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
        return SiftedDrafts(made, illegal, forced)

    def masks(self, slots: I32, kinds: bytes, rows: RowTokens) -> NodeMasks:
        """What is allowed at the nodes of the step's rows that have a grammar."""
        chosen: list[int] = []
        parts: list[I32] = []
        words = self._compiler.mask_words
        for row, slot in enumerate(slots.tolist()):
            matcher = self._matchers.get(slot)
            first, last = int(rows.node_begins[row]), int(rows.node_ends[row])
            if matcher is None or first == last:
                continue
            bits = np.zeros((last - first, words + 1), dtype=np.int32)
            tokens = parents = [-1]
            if kinds[row] == RowKind.VERIFY:
                begin, end = int(rows.begins[row]), int(rows.ends[row])
                tokens = rows.tokens[begin:end].tolist()
                parents = list(range(-1, end - begin - 1))
                if rows.parents is not None:
                    parents = rows.parents[begin:end].tolist()
            walk_masks(matcher, tokens, parents, self._compiler.eos_ids, bits[:, :words])
            if matcher.is_error():
                bits[:, words] = 1
            chosen.extend(range(first, last))
            parts.append(bits)
        made = np.concatenate(parts) if parts else np.empty((0, words + 1), dtype=np.int32)
        return NodeMasks(np.array(chosen, dtype=np.int64), made)

    def advance(self, slots: I32, accept_cu: I32, emitted: I32) -> None:
        """Move over what the step's rows emitted: ``emitted[accept_cu[r] : accept_cu[r + 1]]``."""
        for row, slot in enumerate(slots.tolist()):
            matcher = self._matchers.get(slot)
            if matcher is not None:
                run = emitted[accept_cu[row] : accept_cu[row + 1]].tolist()
                self._consume(matcher, run)

    def error(self, slot: int) -> str | None:
        """Why the slot's grammar can go on with nothing; None if it can, or if there is none."""
        matcher = self._matchers.get(slot)
        if matcher is None or not matcher.is_error():
            return None
        return BAD_GRAMMAR.format(matcher.get_error())

    def _consume(self, matcher: LLMatcher, tokens: list[int]) -> None:
        """Up to the end of the text: what a run holds beyond is not the request's."""
        for token in tokens:
            if token in self._compiler.eos_ids:
                return
            matcher.consume_token(token)


def _legal(
    matcher: LLMatcher, tokens: list[int], parents: list[int], eos_ids: frozenset[int]
) -> tuple[list[int], list[int]]:
    """The allowed nodes of a tree whose parents count from 1, 0 being the bonus token."""
    legal = sorted(legal_nodes(matcher, [0, *tokens], [-1, *parents], eos_ids))
    place = {0: 0} | {node: index + 1 for index, node in enumerate(legal)}
    kept = [tokens[node - 1] for node in legal]
    return kept, [place[parents[node - 1]] for node in legal]
