"""Masks over draft trees against a reference that tries every string of a finite language."""

import json
from collections import Counter
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from outrider.engine_core.grammar_compiler import GrammarCompiler
from outrider.engine_core.grammar_spec import GrammarSpec
from outrider.engine_core.grammar_walk import (
    ALL,
    MaskThreads,
    legal_drafts,
    legal_nodes,
    plan_masks,
)
from outrider.engine_core.ids import I32
from outrider.engine_core.model_path import resolve_model

from ..reference.grammar_ref import allowed, token_bytes

EOS, VOCAB = 0, 8192
TOKENIZER = resolve_model("pycoder") / "tokenizer.json"
IDS = token_bytes(TOKENIZER)
BYTES = {index: text for text, ids in IDS.items() for index in ids}
COMPILER = GrammarCompiler(TOKENIZER, VOCAB, (EOS,))
THREADS = MaskThreads(2)
SEEN: Counter[str] = Counter()

languages = st.lists(
    st.text(alphabet='ab {"é', min_size=1, max_size=7), min_size=1, max_size=5, unique=True
)


def masks_of(
    matcher: LLMatcher,
    tokens: Sequence[int] = (-1,),
    parents: Sequence[int] = (-1,),
    threads: MaskThreads = COMPILER.mask_threads,
) -> I32:
    """The masks of a tree's nodes, in their order."""
    tree = plan_masks(matcher, tokens, parents, COMPILER.eos_ids, 1)
    block = np.full((1 + len(parents), COMPILER.mask_words), ALL, dtype=np.int32)
    threads.fill(tree.chains, block)
    assert (block[0] == ALL).all()
    assert sorted(tree.rows) == list(range(1, 1 + len(parents)))
    SEEN["chains"] += len(tree.chains)
    SEEN["errors"] += sum(chain.matcher.is_error() for chain in tree.chains)
    return block[tree.rows]


def tokens_of(row: I32) -> set[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB]
    return set(np.flatnonzero(bits).tolist())


def forced_beginnings(strings: list[bytes], text: bytes) -> set[bytes]:
    """What all strings that are left go on with."""
    rests = [string[len(text) :] for string in strings if string.startswith(text)]
    beginnings = [{rest[:end] for end in range(1, 1 + len(rest))} for rest in rests]
    return set.intersection(*beginnings)


@settings(max_examples=250)
@given(languages, st.randoms(use_true_random=False))
def check_trees(language: list[str], random: object) -> None:
    """A matcher somewhere in a language, and a tree of drafts of which some are allowed."""
    pick = random.random  # type: ignore[attr-defined]
    choice = random.choice  # type: ignore[attr-defined]
    strings = [text.encode() for text in language]
    matcher = COMPILER.matcher(GrammarSpec("choice", json.dumps(language)))
    texts: dict[int, bytes | None] = {0: b""}  # of nodes; None where nothing may follow
    while pick() < 0.5:
        inner = sorted(allowed(strings, texts[0] or b"", IDS, EOS) - {EOS})
        if not inner:
            break
        token = choice(inner)
        assert matcher.consume_token(token)
        texts[0] = (texts[0] or b"") + BYTES[token]
    tokens, parents = [-1], [-1]
    legal: list[int] = []
    for node in range(1, 9):
        parent = node - 1 if pick() < 0.6 else choice(range(node))
        before = texts[parent]
        wanted = set() if before is None else allowed(strings, before, IDS, EOS)
        token = choice(sorted(wanted)) if wanted and pick() < 0.8 else choice(range(VOCAB))
        tokens.append(token)
        parents.append(parent)
        texts[node] = None
        SEEN["branch"] += parent != node - 1
        if token in wanted:
            legal.append(node)
            SEEN["end" if token == EOS else "inside"] += 1
            if token != EOS:
                texts[node] = (before or b"") + BYTES[token]
        else:
            SEEN["below" if before is None else "forbidden"] += 1
    masks = masks_of(matcher, tokens, parents)
    assert (masks_of(matcher, tokens, parents, THREADS) == masks).all()
    for node, text in texts.items():
        found = tokens_of(masks[node])
        if text is None:
            assert found == set(range(VOCAB))
            continue
        wanted = allowed(strings, text, IDS, EOS)
        # Bytes without a choice are written by their own tokens, not by any that spell them.
        if len(wanted) > 1 and found != wanted and len(found) == 1:
            assert BYTES[min(found)] in forced_beginnings(strings, text)
            SEEN["forced"] += 1
            wanted &= found
        assert found == wanted
    kept = [node for node, _ in legal_nodes(matcher, tokens, parents, COMPILER.eos_ids)]
    assert kept == legal
    assert (masks_of(matcher) == masks[:1]).all()
    assert not matcher.is_error()


def test_masks_are_those_of_the_strings_that_are_left() -> None:
    SEEN.clear()
    check_trees()
    kinds = "branch", "inside", "end", "forbidden", "below", "forced"
    assert min(SEEN[kind] for kind in kinds) > 10, SEEN
    assert SEEN["chains"] > 500
    assert not SEEN["errors"]  # going back along a chain is none


def test_a_stop_inside_a_chain_lets_the_walk_go_on() -> None:
    """The grammar ends at a draft, and drafts follow it (sglang#17617)."""
    yes = COMPILER.matcher(GrammarSpec("choice", '["yes"]'))
    text = [IDS[b"yes"][0]] if b"yes" in IDS else [IDS[b"y"][0], IDS[b"es"][0]]
    tokens = [-1, *text, EOS, 17, 18]
    parents = list(range(-1, len(tokens) - 1))
    masks = masks_of(yes, tokens, parents)
    assert tokens_of(masks[len(text)]) == {EOS}
    assert not yes.is_error()


def test_what_does_not_compile_is_refused_by_its_field() -> None:
    for kind, text in (
        ("regex", "("),
        ("json_schema", '{"type": "nothing"}'),
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 3}'),
        ("ebnf", "root ::= missing"),
        ("ebnf", "start: <|no_such_token|>"),
    ):
        refused = COMPILER.refuse(GrammarSpec(kind, text, "the_field"))  # type: ignore[arg-type]
        assert refused is not None
        assert refused.field == "the_field"
        assert refused.reason
    assert COMPILER.refuse(GrammarSpec("regex", "[a-z]+")) is None


def test_a_kept_grammar_is_not_moved_by_its_requests() -> None:
    spec = GrammarSpec("regex", "a[ab]*c")
    first = COMPILER.matcher(spec)
    assert first.consume_token(IDS[b"a"][0])
    masks = np.concatenate([masks_of(first), masks_of(COMPILER.matcher(spec))])
    assert EOS not in tokens_of(masks[0]) | tokens_of(masks[1])
    assert IDS[b"b"][0] in tokens_of(masks[0]) - tokens_of(masks[1])


@settings(max_examples=150)
@given(languages, st.randoms(use_true_random=False))
def check_chains(language: list[str], random: object) -> None:
    """What is kept of a chain, in one call, is what is kept of it as a tree."""
    pick = random.random  # type: ignore[attr-defined]
    choice = random.choice  # type: ignore[attr-defined]
    strings = [text.encode() for text in language]
    matcher = COMPILER.matcher(GrammarSpec("choice", json.dumps(language)))
    text, tokens = b"", list[int]()
    while len(tokens) < 8 and pick() < 0.9:
        may = sorted(allowed(strings, text, IDS, EOS) - {EOS})
        token = choice(may) if may and pick() < 0.8 else choice([EOS, *sorted(BYTES)[:50]])
        tokens.append(token)
        text += BYTES.get(token, b"")
    kept, parents = legal_drafts(matcher, tokens, list(range(len(tokens))), COMPILER.eos_ids)
    nodes = legal_nodes(matcher, [-1, *tokens], range(-1, len(tokens)), COMPILER.eos_ids)
    assert kept == [tokens[node - 1] for node, _ in nodes]
    assert parents == list(range(len(kept)))
    SEEN["chains cut"] += 0 < len(kept) < len(tokens)
    SEEN["chains whole"] += 0 < len(kept) == len(tokens)
    SEEN["chains with an end"] += EOS in tokens
    SEEN["chains to an end"] += EOS in kept


def test_a_chain_is_kept_in_one_call() -> None:
    SEEN.clear()
    check_chains()
    for rare in ("chains cut", "chains whole", "chains with an end", "chains to an end"):
        assert SEEN[rare] > 3, SEEN
