"""Masks of whole batches, in one thread and in several, against a matcher for each node."""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from llguidance import LLMatcher

from outrider.engine.sampling.slot_grammars import NodeMasks, RowTokens, SlotGrammars
from outrider.engine_core.config import EngineConfig, refuse_config
from outrider.engine_core.grammar_compiler import GrammarCompiler
from outrider.engine_core.grammar_spec import GrammarSpec
from outrider.engine_core.grammar_walk import MaskThreads, path_to
from outrider.engine_core.ids import I32, RowKind
from outrider.engine_core.model_path import resolve_model
from outrider.engine_core.plan import SlotInit, StepPlan
from outrider.engine_core.refusal import Refused
from outrider.engine_core.sampling_params import SamplingParams

EOS, VOCAB = 0, 8192
TOKENIZER = resolve_model("pycoder") / "tokenizer.json"
ONE = GrammarCompiler(TOKENIZER, VOCAB, (EOS,))
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
SPECS = (
    GrammarSpec("json_schema", json.dumps({"type": "array", "items": ITEM})),
    GrammarSpec("regex", "[a-f]{1,3}(-[0-9]{2})*"),
    GrammarSpec("ebnf", 'root ::= "def " [a-z]{1,8} "(" [a-z]{0,8} "):"'),
)
AMBIGUOUS = GrammarSpec("ebnf", 'start: e\ne: e e | e e e | /[a-z ]/ | ""')
LIMITED = GrammarSpec("regex", "q(x[b-d]{2}|(a{1000}){901})")
SEEN: Counter[str] = Counter()
Row = tuple[GrammarSpec | None, list[int], list[int], list[int]]  # text, tokens, parents


def init_of(slot: int, spec: GrammarSpec | None, text: list[int]) -> SlotInit:
    output = np.array(text, dtype=np.int32).tobytes()
    params = SamplingParams(max_new_tokens=99, grammar=spec)
    return SlotInit(slot, slot, params, 0, b"\0\0\0\0", output, 0, (EOS,))


def grammars_of(compiler: GrammarCompiler, rows: list[Row]) -> SlotGrammars:
    """Row r in slot r + 1, with its text from before."""
    made = SlotGrammars(compiler)
    inits = tuple(init_of(r + 1, spec, text) for r, (spec, text, _, _) in enumerate(rows))
    made.enter(StepPlan(1, False, b"", b"", b"", b"", b"", inits, b"", b"", b""))
    return made


def masks_of(grammars: SlotGrammars, rows: list[Row]) -> NodeMasks:
    """Of a step of verify rows, every query token being a node."""
    sizes = np.array([len(tokens) for _, _, tokens, _ in rows])
    cu = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    tokens = np.concatenate([np.array(row[2], dtype=np.int32) for row in rows])
    parents = np.concatenate([np.array(row[3], dtype=np.int32) for row in rows])
    slots = np.arange(1, 1 + len(rows), dtype=np.int32)
    kinds = bytes([RowKind.VERIFY]) * len(rows)
    given = RowTokens(cu[:-1], cu[1:], cu[:-1], cu[1:], tokens, parents)
    return grammars.masks(slots, kinds, given)


def by_node(masks: NodeMasks) -> dict[int, I32]:
    return dict(zip(masks.nodes.tolist(), masks.bits, strict=True))


def allowed(row: I32) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB]).tolist()


def mask_after(spec: GrammarSpec, tokens: list[int]) -> I32 | None:
    """None where the grammar does not allow them."""
    matcher = (ONE.renewed(spec) if spec is LIMITED else ONE.begin(spec)).matcher
    if matcher.try_consume_tokens(tokens) < len(tokens):
        return None
    mask = np.empty(ONE.mask_words, dtype=np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return mask


def random_row(chosen: random.Random, spec: GrammarSpec) -> Row:
    """A text of the grammar so far, and drafts of which most are allowed."""

    def go_on(text: list[int]) -> int:
        mask = mask_after(spec, text)
        tokens = [] if mask is None else allowed(mask)
        return chosen.choice(tokens) if tokens and chosen.random() < 0.85 else chosen.randrange(9)

    text: list[int] = []
    for _ in range(chosen.randrange(12)):
        token = go_on(text)
        if token != EOS and mask_after(spec, [*text, token]) is not None:
            text.append(token)
    tokens, parents = [-1], [-1]
    for node in range(1, chosen.choice((1, 1, 4, 8))):
        parent = node - 1 if chosen.random() < 0.7 else chosen.randrange(node)
        path = path_to(parent, tokens, parents)
        tokens.append(go_on([*text, *path]) if EOS not in path else 17)
        parents.append(parent)
        SEEN["branch"] += parent != node - 1
    return spec, text, tokens, parents


def check(rows: list[Row], masks: NodeMasks) -> None:
    found, first = by_node(masks), 0
    assert not masks.dead.any()
    for spec, text, tokens, parents in rows:
        for node in range(len(tokens) if spec is not None else 0):
            assert spec is not None
            path = path_to(node, tokens, parents)
            wanted = None if EOS in path else mask_after(spec, [*text, *path])
            SEEN["masked" if wanted is not None else "free"] += 1
            SEEN["end"] += EOS in path
            if wanted is None:
                wanted = np.full(ONE.mask_words, -1, dtype=np.int32)
            assert (found.pop(first + node) == wanted).all()
        first += len(tokens)
    assert not found


def test_threads_change_no_bit() -> None:
    """Batches of mixed grammars, chains, trees and plain rows, several of each grammar."""
    SEEN.clear()
    chosen = random.Random(3)
    for case in range(12):
        rows: list[Row] = [random_row(chosen, chosen.choice(SPECS)) for _ in range(9)]
        rows.insert(4, (None, [], [-1, 5], [-1, 0]))
        made: list[NodeMasks] = []
        for threads in (1, 2, 3):
            compiler = GrammarCompiler(TOKENIZER, VOCAB, (EOS,), threads) if case < 2 else ONE
            if compiler is ONE:
                compiler.mask_threads = MaskThreads(threads)
            made.append(masks_of(grammars_of(compiler, rows), rows))
        ONE.mask_threads = MaskThreads(1)
        check(rows, made[0])
        for other in made[1:]:
            assert by_node(other).keys() == by_node(made[0]).keys()
            for node, bits in by_node(made[0]).items():
                assert (by_node(other)[node] == bits).all()
    assert min(SEEN[kind] for kind in ("branch", "masked", "free", "end")) > 10, SEEN


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_that_goes_wrong_is_alone(threads: int) -> None:
    """One that is wrong where it stands, and one that is behind a draft alone, among others."""
    compiler = GrammarCompiler(TOKENIZER, VOCAB, (EOS,), threads)
    chosen = random.Random(8)
    (letter,) = (token for token in allowed(mask_after(SPECS[1], []))[:1])  # type: ignore[arg-type]
    rows: list[Row] = [random_row(chosen, spec) for spec in SPECS]
    rows.insert(1, (AMBIGUOUS, [letter] * 90, [-1, letter], [-1, 0]))
    rows.insert(3, (LIMITED, [88], [-1, 6008, 6008, 6008], [-1, 0, 1, 2]))
    rows.append((AMBIGUOUS, [], [-1], [-1]))
    grammars = grammars_of(compiler, rows)
    for _ in range(2):  # whoever was spoilt has been mended
        masks = masks_of(grammars, rows)
        begin = len(rows[0][2])
        assert set(masks.nodes[masks.dead].tolist()) <= {begin, begin + 1}
        assert begin in masks.nodes[masks.dead]
        refused = grammars.refusal(2)
        assert refused is not None
        assert refused.status == 400
        assert all(grammars.refusal(slot) is None for slot in (1, 3, 4, 5, 6))
        others = [row if r != 1 else (None, *row[1:]) for r, row in enumerate(rows)]
        keep = ~np.isin(masks.nodes, (begin, begin + 1))
        check(others, NodeMasks(masks.nodes[keep], masks.bits[keep], masks.dead[keep]))


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_requests_of_one_grammar_get_automata_for_the_threads() -> None:
    compiler, spec = GrammarCompiler(TOKENIZER, VOCAB, (EOS,), 3), SPECS[0]
    compiler.hold(spec)
    assert len({compiler.begin(spec).automaton for _ in range(6)}) == 1
    for _ in range(4):
        compiler.hold(spec)
    wait_until(lambda: len({compiler.begin(spec).automaton for _ in range(6)}) == 3)
    rows: list[Row] = [random_row(random.Random(seed), spec) for seed in range(8)]
    check(rows, masks_of(grammars_of(compiler, rows), rows))
    assert compiler.renewed(spec).automaton == compiler.begin(spec).automaton


def test_an_automaton_that_fails_keeps_no_other_from_being_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler, (broken, spec) = GrammarCompiler(TOKENIZER, VOCAB, (EOS,), 2), SPECS[:2]
    compiler.hold(broken)  # its first is made here, without the thread
    compile_one = compiler._compile

    def compile_or_fail(one: GrammarSpec) -> LLMatcher | Refused:
        if one == broken:
            raise RuntimeError("out of threads")
        return compile_one(one)

    monkeypatch.setattr(compiler, "_compile", compile_or_fail)
    compiler.hold(broken)
    wait_until(lambda: "out of threads" in caplog.text)
    for _ in range(2):
        compiler.hold(spec)
    wait_until(lambda: len({compiler.begin(spec).automaton for _ in range(4)}) == 2)
    assert len({compiler.begin(broken).automaton for _ in range(4)}) == 1
    monkeypatch.undo()
    compiler.hold(broken)
    wait_until(lambda: len({compiler.begin(broken).automaton for _ in range(4)}) == 2)


def test_requests_that_entered_before_move_to_them() -> None:
    compiler, spec = GrammarCompiler(TOKENIZER, VOCAB, (EOS,), 3), SPECS[0]
    rows: list[Row] = [random_row(random.Random(seed), spec) for seed in range(8)]
    rows.append((SPECS[1], [], [-1], [-1]))
    grammars = grammars_of(compiler, rows)
    for _ in range(8):
        compiler.hold(spec)
    wait_until(lambda: len({compiler.begin(spec).automaton for _ in range(6)}) == 3)
    for _ in range(24):
        check(rows, masks_of(grammars, rows))
    crowds = Counter(mine.automaton for mine in grammars._slots.values())
    assert sorted(crowds.values()) == [1, 2, 3, 3]


def test_grammars_of_open_requests_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others come, so that none is compiled within a step."""
    monkeypatch.setattr(f"{GrammarCompiler.__module__}._KEPT", 3)
    compiler = GrammarCompiler(TOKENIZER, VOCAB, (EOS,))
    specs = [GrammarSpec("regex", "a" * (1 + i)) for i in range(9)]
    for spec in specs[:2]:
        compiler.hold(spec)
    compiler.hold(specs[0])
    for spec in specs[2:]:
        assert compiler.refuse(spec) is None
        assert compiler.knows(spec)
    assert [compiler.knows(spec) for spec in specs] == [True] * 2 + [False] * 6 + [True]
    for spec in specs[4:8]:
        compiler.hold(spec)
    assert all(compiler.knows(spec) for spec in (*specs[:2], *specs[4:8]))
    for spec in (specs[0], *specs[4:8]):
        compiler.release(spec)
    assert compiler.knows(specs[0])  # two requests had it
    assert sum(compiler.knows(spec) for spec in specs) == 3
    compiler.release(specs[0])
    compiler.release(GrammarSpec("regex", "unknown"))
    for spec in specs[5:]:
        compiler.refuse(spec)
    assert not compiler.knows(specs[0])
    assert compiler.knows(specs[1])


def test_the_loop_may_hold_while_another_thread_does() -> None:
    compiler = GrammarCompiler(TOKENIZER, VOCAB, (EOS,), 2)
    specs = [GrammarSpec("regex", "b" * (1 + i)) for i in range(6)]

    def hold() -> None:
        for spec in specs:
            compiler.hold(spec)

    threads = [threading.Thread(target=hold) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [kept.open for kept in compiler._kept.values()] == [4] * 6


@pytest.mark.parametrize("threads", [0, -1, 4096])
def test_more_threads_than_cores_are_refused(threads: int) -> None:
    refused = refuse_config(EngineConfig(model="pycoder", grammar_threads=threads))
    assert refused is not None
    assert refused.field == "grammar_threads"
    assert "cores" in refused.reason
