"""The match in a row's own text: kernel, reference and a plain search agree, padding included."""

import random
from collections import Counter
from types import ModuleType

import pytest
import torch

from outrider.kernels import suffix_match, suffix_match_gpu

from ..reference.suffix_match_ref import best_match, draft
from .step_model import DEVICE

BOTH = pytest.mark.parametrize(
    ("module", "device"),
    [(suffix_match, "cpu"), (suffix_match_gpu, DEVICE)],
    ids=["torch", "gpu"],
)
POISON = -77


def propose(
    module: ModuleType,
    device: str,
    texts: list[list[int]],
    caps: list[int],
    least: int,
    most: int,
    columns: int,
    room: int = 0,
) -> list[list[int]]:
    """Each row's drafts; slots are shuffled, what lies behind texts and rows is poison."""

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    rows = len(texts)
    order = random.Random(rows).sample(range(rows + 1), rows)
    history = torch.full((rows + 1, columns), POISON, dtype=torch.int32)
    seq_lens = [0] * (rows + 1)
    for slot, text in zip(order, texts, strict=True):
        history[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        seq_lens[slot] = len(text) - 1
    cu_q = [0]
    for cap in caps:
        cu_q.append(cu_q[-1] + 1 + cap)
    spare = next(slot for slot in range(rows + 1) if slot not in order)
    tokens, parents = int32([POISON] * (cu_q[-1] + 5)), int32([POISON] * (cu_q[-1] + 5))
    proposed, depths = int32([POISON] * (rows + room)), int32([POISON] * (rows + room))
    module.suffix_match(
        history.to(device), int32(order + [spare] * room), int32(seq_lens),
        int32(cu_q + cu_q[-1:] * room), int32(caps + [0] * room), least, most,
        tokens=tokens, parents=parents, proposed=proposed, depths=depths,
    )  # fmt: skip
    assert torch.equal(proposed, depths)
    assert proposed[rows:].tolist() == [0] * room
    found, untouched = [], [POISON] * 5
    for row, cap in enumerate(caps):
        begin, count = cu_q[row] + 1, int(proposed[row])
        assert count in (0, cap)
        drafts, chain = (t[begin : begin + cap].tolist() for t in (tokens, parents))
        assert chain == (list(range(cap)) if count else [-1] * cap)
        assert count or drafts == [0] * cap
        assert tokens[begin - 1] == parents[begin - 1] == POISON
        found.append(drafts[:count])
    assert tokens[cu_q[-1] :].tolist() == parents[cu_q[-1] :].tolist() == untouched
    return found


def note(counts: Counter[str], text: list[int], cap: int, least: int, most: int) -> None:
    """Count the rare cases that a row is of."""
    match = best_match(text, least, most)
    counts["one token"] += len(text) == 1
    if match is None:
        counts["no match"] += 1
        return
    length, end = match
    ends = [
        e for e in range(length, len(text)) if text[e - length : e] == text[len(text) - length :]
    ]
    counts["tie"] += len(ends) > 1
    counts["at the start"] += end == length
    counts["overlaps the suffix"] += end > len(text) - length
    counts["reaches the end"] += end + cap > len(text)
    counts["capped"] += length == most
    counts["shortest"] += length == least


@BOTH
def test_random_texts(module: ModuleType, device: str) -> None:
    rng, counts = random.Random(7), Counter[str]()
    for turn in range(40):
        least, columns = rng.choice((1, 1, 2, 4)), rng.choice((64, 100, 200))
        most = rng.randint(least, 9)
        texts, caps = [], []
        for _ in range(rng.randint(1, 6)):
            vocab = rng.choice((1, 2, 3, 30))
            length = rng.choice((1, 2, rng.randint(3, columns), columns))
            texts.append([rng.randrange(vocab) for _ in range(length)])
            caps.append(rng.choice((0, 1, 3, 11, 63)))
        got = propose(module, device, texts, caps, least, most, columns, turn % 3)
        for text, cap, drafts in zip(texts, caps, got, strict=True):
            assert drafts == (draft(text, cap, least, most) if cap else [])
            if cap:
                note(counts, text, cap, least, most)
    for name in ("one token", "no match", "tie", "at the start", "overlaps the suffix",
                 "reaches the end", "capped", "shortest"):  # fmt: skip
        assert counts[name] >= 5, (name, counts)


@BOTH
def test_cases_by_hand(module: ModuleType, device: str) -> None:
    cases: list[tuple[list[int], int, int, int, list[int]]] = [
        ([5], 3, 1, 4, []),
        ([5, 6], 3, 1, 4, []),
        ([5, 5], 3, 1, 4, [5, 5, 5]),
        ([1, 2, 3, 1, 2], 4, 1, 4, [3, 1, 2, 3]),  # starts over at the end
        ([1, 2, 3, 1, 2], 4, 3, 4, []),  # two tokens are too few
        ([1, 2, 8, 1, 2, 9, 1, 2], 1, 1, 4, [9]),  # the latest of equals
        ([7, 1, 2, 8, 1, 2, 9, 7, 1, 2], 1, 1, 4, [8]),  # the longest before the latest
        ([7, 1, 2, 8, 1, 2, 9, 7, 1, 2], 1, 1, 2, [9]),  # no longer than asked
    ]
    for text, cap, least, most, expected in cases:
        assert propose(module, device, [text], [cap], least, most, 16) == [expected]


@BOTH
def test_blocks_of_a_long_text(
    module: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matches on both sides of the blocks' edges, and a longer one behind a shorter one."""
    monkeypatch.setattr(suffix_match_gpu, "_MOST_LANES", 64)
    rng = random.Random(3)
    for end in (3, 64, 65, 127, 128, 129, 190, 236, 237):
        text = [100 + i for i in range(240)]
        text[-3:] = [1, 2, 3]
        text[end - 3 : end] = [1, 2, 3]
        if end + 5 < 230:
            text[end + 4 : end + 6] = [2, 3]
        caps = [rng.randint(1, 11)]
        got = propose(module, device, [text], caps, 1, 8, 240)
        assert got == [draft(text, caps[0], 1, 8)]
        assert got[0][0] == text[end]


@BOTH
def test_emitted_tokens_are_appended(module: ModuleType, device: str) -> None:
    rng = random.Random(2)
    for _ in range(10):
        slots, width, columns = rng.sample(range(6), 4), rng.choice((1, 3, 12)), 24
        history = torch.full((6, columns), POISON, dtype=torch.int32)
        counts = [rng.randint(0, width) for _ in slots]
        after = [rng.randint(width, columns + 2) for _ in range(6)]
        tokens = torch.randint(0, 9, (4, width), dtype=torch.int32)
        expected = history.clone()
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            for i in range(count):
                place = after[slot] - count + 1 + i
                if place < columns:
                    expected[slot, place] = tokens[row, i]
        moved = history.to(device)
        module.append_tokens(
            moved,
            torch.tensor(slots, dtype=torch.int32, device=device),
            torch.tensor(after, dtype=torch.int32, device=device),
            torch.tensor(counts, dtype=torch.int32, device=device),
            tokens.to(device),
        )
        assert torch.equal(moved.cpu(), expected)


@pytest.mark.gpu
def test_many_long_texts() -> None:
    rng = random.Random(1)
    texts = [[rng.randrange(60) for _ in range(rng.randint(1, 9000))] for _ in range(64)]
    caps = [rng.choice((0, 5, 63)) for _ in texts]
    got = propose(suffix_match_gpu, DEVICE, texts, caps, 1, 17, 9000)
    other = propose(suffix_match, "cpu", texts, caps, 1, 17, 9000)
    assert got == other
