"""Every processor at every node of random trees, against the scalar reference."""

import random

import numpy as np
import pytest
import torch

from outrider.engine_core.ids import f32, i32
from outrider.engine_core.plan import TokenLogprobs
from outrider.engine_core.sampling_params import SamplingParams

from ..reference import sampling_ref as ref
from .driver import Drafts, Driver, bigram_driver, chain

VOCAB = 23
EOS = (0, 4)


def make_table(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB, VOCAB, generator=generator) * 2.0


def random_params(rng: random.Random) -> SamplingParams:
    """A mix in which every feature is on about half of the time."""
    on = rng.random
    return SamplingParams(
        max_new_tokens=200,
        min_new_tokens=rng.choice([0, 5, 40]),
        temperature=rng.choice([0.0, 0.7, 1.0, 1.8]),
        top_k=rng.choice([-1, -1, 1, 6]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.1]),
        repetition_penalty=rng.choice([1.0, 1.4, 0.8]),
        presence_penalty=rng.choice([0.0, 0.9, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.6, -0.3]),
        logit_bias={rng.randrange(VOCAB): rng.uniform(-9, 9) for _ in range(3)}
        if on() < 0.5
        else {},
        logprobs=rng.choice([None, 0, 3]),
        **random_bans(rng),  # type: ignore[arg-type]
    )


def random_bans(rng: random.Random) -> dict[str, object]:
    """Sequences of up to four of a few tokens, and a list that leaves most tokens out."""
    bans: dict[str, object] = {}
    if rng.random() < 0.4:
        some = [[rng.randrange(6) for _ in range(rng.randint(1, 4))] for _ in range(12)]
        bans["bad_words_ids"] = tuple(tuple(ban) for ban in some)
    if rng.random() < 0.3:
        bans["allowed_token_ids"] = (*rng.sample(range(VOCAB), 6), VOCAB - 1)
    return bans


def reference_params(params: SamplingParams) -> ref.Params:
    return ref.Params(
        temperature=float(np.float32(params.temperature)),
        top_k=params.top_k,
        top_p=float(np.float32(params.top_p)),
        min_p=float(np.float32(params.min_p)),
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        bias=params.logit_bias,
        min_new_tokens=params.min_new_tokens,
        eos_ids=EOS,
        bans=params.bad_words_ids,
        allowed=params.allowed_token_ids,
        two_back=two_back_of(params),
    )


def two_back_of(params: SamplingParams) -> float | None:
    """What the example processor takes of the token two back."""
    call = params.logits_processors.get("two_back")
    return None if call is None else float(str(call["strength"]))


class Request:
    """What the reference says of one request of a bigram model."""

    def __init__(self, table: torch.Tensor, params: SamplingParams, prompt: list[int], seed: int):
        self.table = table.tolist()
        self.params = params
        self.scalar = reference_params(params)
        self.prompt = prompt
        self.seed = seed
        self.output: list[int] = []

    def target(self, path: list[int]) -> int:
        """The token after the output so far and the drafts ``path``."""
        output = self.output + path
        last = (self.prompt + output)[-1]
        return ref.choose(self.table[last], self.scalar, self.prompt, output, self.seed)

    def accepted(self, drafts: Drafts | None) -> list[int]:
        """What a verify row must emit."""
        node = 0
        path: list[int] = []
        while True:
            token = self.target(path)
            path.append(token)
            children = [
                i + 1
                for i in range(len(drafts.tokens) if drafts else 0)
                if drafts and drafts.parents[i] == node and drafts.tokens[i] == token
            ]
            if not children:
                return path
            node = children[0]

    def draft(self, rng: random.Random) -> Drafts | None:
        """A random tree in which some paths continue as the target will."""
        if rng.random() < 0.15:
            return None
        tokens: list[int] = []
        parents: list[int] = []
        paths: list[list[int]] = [[]]
        for _ in range(rng.randint(1, 11)):
            parent = rng.choice([0, len(tokens), rng.randint(0, len(tokens))])
            good = rng.random() < 0.7
            token = self.target(paths[parent]) if good else rng.randrange(VOCAB)
            tokens.append(token)
            parents.append(parent)
            paths.append([*paths[parent], token])
        return Drafts(tokens, parents)

    def check_logprobs(self, entries: tuple[TokenLogprobs, ...], emitted: list[int]) -> None:
        assert [entry.token for entry in entries] == emitted
        history = self.prompt + self.output
        for place, entry in enumerate(entries):
            last = (history + emitted[:place])[-1]
            expected = ref.log_softmax(self.table[last])
            assert entry.value == pytest.approx(expected[entry.token], abs=1e-4)
            top = i32(entry.top_ids).tolist()
            assert len(top) == self.params.logprobs
            assert top == sorted(range(VOCAB), key=lambda t: -expected[t])[: len(top)]
            assert f32(entry.top_values).tolist() == pytest.approx(
                [expected[token] for token in top], abs=1e-4
            )


@pytest.mark.parametrize("seed", range(6))
def test_every_position_of_every_row_matches_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    table = make_table(seed)
    driver = bigram_driver(table)
    requests: dict[int, Request] = {}
    longest = 0
    for slot in range(8):
        params = random_params(rng) if slot else SamplingParams(temperature=0.0)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        request = Request(table, params, prompt, rng.getrandbits(64) - 2**63)
        before = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 3]))]
        request.output = before  # as after a retraction
        requests[slot] = request
        expected = request.target([])
        assert driver.enter(slot, prompt, params, request.seed, EOS, before) == expected
        request.output = [*before, expected]
    for _ in range(14):
        slots = rng.sample(sorted(requests), rng.randint(1, 8))
        drafts = {slot: requests[slot].draft(rng) for slot in slots}
        emitted, result = driver.verify(drafts)
        logprobs = {slots[entry.row]: entry.tokens for entry in result.logprobs}
        assert set(logprobs) == {s for s in slots if requests[s].params.logprobs is not None}
        for slot in slots:
            request = requests[slot]
            assert emitted[slot] == request.accepted(drafts[slot])
            if slot in logprobs:
                request.check_logprobs(logprobs[slot], emitted[slot])
            longest = max(longest, len(emitted[slot]))
            request.output = request.output + emitted[slot]
    assert longest >= 4


def enter_one(params: SamplingParams, table: torch.Tensor) -> tuple[Driver, Request]:
    driver = bigram_driver(table)
    request = Request(table, params, [3, 5], 11)
    request.output = [driver.enter(0, request.prompt, params, 11, EOS)]
    return driver, request


def test_counts_follow_what_was_emitted_and_slots_start_clean() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=0.3)
    driver, request = enter_one(params, make_table(1))
    rng = random.Random(4)
    while len(request.output) < 40:
        emitted, _ = driver.verify({0: request.draft(rng)})
        request.output += emitted[0]
    counts = driver.state.edits.counts
    row = int(counts.row_of[0])
    expected = np.bincount(request.output, minlength=VOCAB)
    assert counts.output[row].tolist() == expected.tolist()
    first = driver.enter(0, [3, 5], SamplingParams(temperature=0.0), 1, EOS)
    assert int(counts.row_of[0]) == -1
    assert first == int(make_table(1)[5].argmax())


def test_a_slot_with_nothing_special_costs_no_column() -> None:
    driver, _ = enter_one(SamplingParams(temperature=0.0), make_table(2))
    table, edits = driver.state.sampling, driver.state.edits
    assert (table.featured, edits.counts.output.shape[0]) == (0, 0)
    assert (edits.biases, edits.masked, edits.bans, table.logprobs) == ({}, {}, {}, {})
    some = SamplingParams(logit_bias={1: 2.0}, min_new_tokens=2, bad_words_ids=((1, 2),))
    driver.enter(0, [1], some, 0, EOS)
    assert (table.featured, list(edits.bans)) == (1, [0])
    driver.state.reset()
    assert (table.featured, edits.biases, edits.masked, edits.bans) == (0, {}, {}, {})


def test_eos_is_legal_exactly_after_min_new_tokens() -> None:
    """The model wants EOS everywhere; drafts say EOS at every depth."""
    table = torch.zeros(VOCAB, VOCAB)
    table[:, 0], table[:, 7] = 5.0, 1.0
    params = SamplingParams(temperature=0.0, min_new_tokens=6)
    driver, request = enter_one(params, table)
    assert request.output == [7]
    emitted, _ = driver.verify({0: Drafts([0, 7, 0, 7, 0, 7, 0], [0, 0, 2, 2, 4, 4, 6])})
    assert emitted[0] == [7, 7, 7, 7]
    emitted, _ = driver.verify({0: Drafts([7, 0, 0, 0], [0, 1, 2, 3])})
    assert (request.output + [7] * 4 + emitted[0])[:8] == [7, 7, 7, 7, 7, 7, 0, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(seed=1)])
def test_unusable_logits_end_their_row_only(bad: float, params: SamplingParams) -> None:
    table = make_table(3)
    driver = bigram_driver(table)
    for slot in (0, 1, 2):
        driver.enter(slot, [slot + 1], params, 5, EOS)
    last = [int(token) for token in driver.state.last_tokens[:3]]
    table[last[1], 2] = bad
    assert last[1] not in (last[0], last[2]), "the prompts were chosen to give other tokens"
    lengths = driver.state.seq_lens.tolist()
    emitted, result = driver.verify({0: None, 1: None, 2: None})
    assert [(error.row, "NaN or infinite" in error.message) for error in result.errors] == [
        (1, True)
    ]
    assert (len(emitted[0]), len(emitted[1]), len(emitted[2])) == (1, 0, 1)
    assert driver.state.seq_lens[1] == lengths[1]


def test_bad_logits_off_the_accepted_path_harm_nobody() -> None:
    table = make_table(3)
    driver, request = enter_one(SamplingParams(temperature=0.0), table)
    wrong = next(token for token in range(VOCAB) if token != request.target([]))
    table[wrong] = float("nan")
    emitted, result = driver.verify({0: Drafts([wrong], [0])})
    assert emitted[0] == [request.target([])]
    assert not result.errors


@pytest.mark.parametrize("output", [[], [1, 2, 1]], ids=["fresh", "retracted"])
def test_a_draft_that_completes_a_banned_sequence_is_refused_at_every_depth(
    output: list[int],
) -> None:
    check_banned_sequences(bigram_driver(alternating_table()), output)


def alternating_table() -> torch.Tensor:
    """A model that counts 1, 2, 1, 2, ..., and takes 7 where it may not."""
    table = torch.zeros(VOCAB, VOCAB)
    for token in range(VOCAB):
        table[token, 2 if token == 1 else 1] = 5.0
        table[token, 7] = 1.0
    return table


def check_banned_sequences(driver: Driver, output: list[int]) -> None:
    """History and drafts complete sequences of two to four in the alternating model."""
    params = SamplingParams(temperature=0.0, bad_words_ids=((1, 2, 1, 2), (7, 2), (9,)))
    tokens = [*output, driver.enter(0, [1, 2, 1, 2], params, 0, EOS, output)]
    while len(tokens) < 30:
        drafts = [(1, 2)[(len(tokens) + i) % 2] for i in range(7)]
        tokens += driver.verify({0: chain(drafts)})[0][0]
    assert tuple(tokens[:4]) == (1, 2, 1, 7)
    assert not any(
        tuple(tokens[at : at + len(ban)]) == ban
        for ban in params.bad_words_ids
        for at in range(len(tokens))
    )
    assert tokens.count(1) > 5
