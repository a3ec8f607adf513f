"""Penalties, bias and minimum lengths in the device's steps: the CPU's tokens and the reference's.

On a GPU every verify step of these tests is the replay of a graph.
"""

import random

import msgspec
import numpy as np
import pytest
import torch

from outrider.engine.gpu.worker import GpuWorker
from outrider.engine.kv_pool import KVPool
from outrider.engine_core import admission
from outrider.engine_core.config import EngineConfig, resolve_config
from outrider.engine_core.controller import LengthController
from outrider.engine_core.core import EngineCore
from outrider.engine_core.refusal import Refused
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.step_times import StepTimes
from outrider.engine_core.worker import WorkerInfo

from ..cores import RandomDrafter, drive, request, tokens_of
from ..driver import Driver, bigram_driver, chain
from ..test_processors import (
    EOS,
    VOCAB,
    Request,
    alternating_table,
    check_banned_sequences,
    make_table,
    random_params,
)
from ..tiny import bigram_config
from .gpu_driver import DEVICE, GpuBigram, GpuDriver

GREEDY = SamplingParams(temperature=0.0)
STEPS, SLOTS = (40, 8) if DEVICE.type == "cuda" else (5, 4)


def gpu_bigram(table: torch.Tensor) -> GpuDriver:
    return GpuDriver(GpuBigram(table), bigram_config(table.shape[0]))


def edited_params(rng: random.Random) -> SamplingParams:
    return msgspec.structs.replace(random_params(rng), logprobs=None)


def history_of(driver: GpuDriver, slot: int) -> list[int]:
    row: list[int] = driver.device_state.edits.history[slot].tolist()
    return row


def check_history(driver: GpuDriver, slot: int, asked: Request) -> None:
    """The slot's counts are those of what was emitted, or nobody keeps any."""
    penalized = bool(driver.device_state.edits.penalized[slot])
    assert penalized == asked.params.penalized
    if penalized:
        row = 2 * np.bincount(asked.output, minlength=VOCAB)
        row[asked.prompt] |= 1
        assert history_of(driver, slot) == row.tolist()


def drafts_of(asked: Request, rng: random.Random, chains: bool) -> object:
    if not chains:
        return asked.draft(rng)
    tokens: list[int] = []
    for _ in range(rng.randint(0, 8)):
        good = rng.random() < 0.8
        tokens.append(asked.target(tokens) if good else rng.randrange(VOCAB))
    return chain(tokens) if tokens else None


@pytest.mark.parametrize(("seed", "chains"), [(0, True), (1, False)])
def test_edited_and_plain_rows_give_the_cpus_tokens(seed: int, chains: bool) -> None:
    rng, table = random.Random(seed), make_table(seed)
    drivers: list[Driver] = [gpu_bigram(table), bigram_driver(table)]
    gpu = drivers[0]
    assert isinstance(gpu, GpuDriver)
    requests: dict[int, Request] = {}
    reached = {"accepted": 0, "masked": 0, "returned": 0, "plain": 0, "sampled": 0}

    def enter(slot: int, asked: Request) -> None:
        expected = asked.target([])
        for driver in drivers:
            got = driver.enter(slot, asked.prompt, asked.params, asked.seed, EOS, asked.output)
            assert got == expected
        asked.output = [*asked.output, expected]
        requests[slot] = asked

    for slot in range(SLOTS):
        params = edited_params(rng) if slot % 4 else GREEDY
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        asked = Request(table, params, prompt, rng.getrandbits(64) - 2**63)
        asked.output = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 3]))]
        enter(slot, asked)
    replays = gpu.gpu_runner.replays
    for step in range(STEPS):
        slots = rng.sample(sorted(requests), rng.randint(1, len(requests)))
        drafts = {slot: drafts_of(requests[slot], rng, chains) for slot in slots}
        results = [driver.verify(drafts)[0] for driver in drivers]  # type: ignore[arg-type]
        assert results[0] == results[1]
        for slot in slots:
            asked = requests[slot]
            assert results[0][slot] == asked.accepted(drafts[slot])  # type: ignore[arg-type]
            edited = asked.params.penalized or asked.params.logit_bias
            reached["accepted"] += bool(edited) and len(results[0][slot]) > 2
            reached["masked"] += len(asked.output) < asked.params.min_new_tokens
            reached["plain"] += asked.params == GREEDY
            reached["sampled"] += not asked.params.greedy
            asked.output = asked.output + results[0][slot]
            check_history(gpu, slot, asked)
        if step % 4 == 3:  # a request that was retracted returns into another's slot
            slot = rng.choice(slots)
            asked = requests.pop(slot)
            reached["returned"] += asked.params != GREEDY
            other = (slot + 3) % SLOTS
            requests.pop(other, None)
            enter(other, asked)
    assert min(reached[name] for name in ("accepted", "masked", "plain", "sampled")) > 0, reached
    if DEVICE.type == "cuda":
        entered = gpu.gpu_runner.steps - gpu.gpu_runner.decode_steps
        assert gpu.gpu_runner.replays - replays == STEPS
        assert entered > 0


def test_without_edits_nothing_is_allocated_and_plain_rows_keep_their_bits() -> None:
    table = make_table(5)
    driver = gpu_bigram(table)
    edits = driver.device_state.edits
    driver.enter(0, [3], GREEDY)
    driver.enter(1, [4], SamplingParams(seed=4), 4)
    before = driver.verify({0: None, 1: None})[0]
    assert (edits.layout, edits.history.numel(), edits.list_ids.numel()) == (0, 0, 0)
    other = gpu_bigram(table)
    other.enter(2, [5], SamplingParams(frequency_penalty=1.0, logit_bias={1: 2.0}), 0, EOS)
    assert other.device_state.edits.layout == 2
    other.enter(0, [3], GREEDY)
    other.enter(1, [4], SamplingParams(seed=4), 4)
    after = other.verify({0: None, 1: None, 2: None})[0]
    assert {slot: after[slot] for slot in (0, 1)} == before


def test_a_longer_list_than_fits_grows_the_lists_and_keeps_what_they_held() -> None:
    driver = gpu_bigram(torch.zeros(1200, 1200))
    edits = driver.device_state.edits
    driver.enter(0, [3], SamplingParams(temperature=0.0, logit_bias={7: 1.0, 9: 2.0}))
    assert driver.verify({0: None})[0] == {0: [9]}
    layout, room = edits.layout, edits.list_ids.shape[1]
    bias = {token: float(token % 5) for token in range(1100)}
    assert driver.enter(1, [3], SamplingParams(temperature=0.0, logit_bias=bias)) == 4
    assert edits.layout == layout + 1
    assert edits.list_ids.shape[1] > room
    assert driver.verify({0: None, 1: None})[0] == {0: [9], 1: [4]}


def test_an_end_token_may_have_a_bias_and_be_named_twice() -> None:
    driver = gpu_bigram(torch.zeros(8, 8))
    params = SamplingParams(temperature=0.0, logit_bias={2: 1.0, 5: 3.0, 6: 2.0}, min_new_tokens=3)
    tokens = [driver.enter(0, [1], params, 0, (5, 0, 5))]
    edits = driver.device_state.edits
    assert edits.list_bounds[0].tolist() == [2, 3, 4]
    tokens += driver.verify({0: chain([6, 6])})[0][0]
    assert tokens == [6, 6, 6, 5]
    assert driver.verify({0: None})[0][0] == [5]
    driver.enter(0, [1], GREEDY)
    assert not edits.list_bounds[0].any()
    assert driver.verify({0: None})[0][0] == [0]


@pytest.mark.parametrize("output", [[], [1, 2, 1]], ids=["fresh", "retracted"])
def test_a_draft_that_completes_a_banned_sequence_is_refused_at_every_depth(
    output: list[int],
) -> None:
    check_banned_sequences(gpu_bigram(alternating_table()), output)


def test_bans_get_their_room_when_the_first_request_has_them_and_leave_with_it() -> None:
    driver = gpu_bigram(torch.zeros(40, 40))
    edits = driver.device_state.edits
    driver.enter(0, [3], SamplingParams(temperature=0.0, logit_bias={5: 1.0}))
    assert not edits.bans.used
    layout = edits.layout
    banned = tuple((token,) for token in range(39))
    assert driver.enter(1, [3], SamplingParams(temperature=0.0, bad_words_ids=banned)) == 39
    assert driver.enter(2, [3], SamplingParams(temperature=0.0, allowed_token_ids=(38, 35))) == 35
    assert edits.layout == layout + 2
    many = ((0,), *((token % 30, token % 7) for token in range(900)))  # all below 7 after 1
    assert driver.enter(3, [3], SamplingParams(temperature=0.0, bad_words_ids=many)) == 1
    assert edits.layout == layout + 3
    assert driver.verify({0: None, 1: None, 2: None, 3: None})[0] == {
        0: [5], 1: [39], 2: [35], 3: [7]
    }  # fmt: skip
    for slot in (1, 2, 3):
        driver.enter(slot, [3], SamplingParams(temperature=0.0, logit_bias={6: 1.0}))
    assert driver.verify({1: None, 2: None, 3: None})[0] == {1: [6], 2: [6], 3: [6]}


class GoodDrafter(RandomDrafter):
    """Random drafts, half of whose tokens are the two that the requests like best."""

    def propose(self, slots, caps):  # type: ignore[no-untyped-def]
        proposal = super().propose(slots, caps)
        likely = proposal.tokens % 2 + 1
        tokens = np.where(proposal.tokens % 3 > 0, likely, proposal.tokens)
        return proposal._replace(tokens=tokens.astype(np.int32))


def edited_worker(table: torch.Tensor, config: EngineConfig, pages: int) -> GpuWorker:
    vocab = table.shape[0]
    info = WorkerInfo(
        vocab_size=vocab,
        context_length=256,
        num_pages=pages,
        page_size=1,
        max_slots=8,
        eos_ids=(0,),
        weight_bytes=1,
        kv_bytes_per_token=1,
        num_threads=1,
        device=DEVICE.type,
        dtype="float32",
    )
    kv = KVPool(pages, 1, bigram_config(vocab), torch.float32, DEVICE)
    return GpuWorker(info, config, GpuBigram(table), kv, 400)


def expected_output(asked: Request) -> list[int]:
    output: list[int] = []
    while len(output) < asked.params.max_new_tokens:
        output.append(asked.target(output))
        if output[-1] in asked.scalar.eos_ids:
            break
    return output


def test_requests_that_are_retracted_end_as_the_reference_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through the core and the GPU's worker: overlap, chunks, late drafts, a full pool."""
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 1)
    table = make_table(9)
    table[:, 1:3] += 2.5  # drafts are accepted
    config = EngineConfig(
        model="unused",
        page_size=1,
        max_running_requests=4,
        chunked_prefill_size=8,
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=4,
        speculative_length_policy="fixed",
        disable_cuda_graph=DEVICE.type == "cpu",
        disable_radix_cache=True,
        skip_tokenizer_init=True,
    )
    worker = edited_worker(table, config, 75)
    resolved = resolve_config(config, worker.info())
    assert not isinstance(resolved, Refused), resolved
    worker.prepare(resolved)
    core = EngineCore(
        resolved,
        worker,
        host_drafter=GoodDrafter(VOCAB, 3, False),
        controller=LengthController(StepTimes([1, 64], [1e-3, 2e-3]), 8, 3, "fixed"),
    )
    rng = random.Random(3)
    edits: list[dict[str, object]] = [
        {"ignore_eos": True},
        {"ignore_eos": True, "bad_words_ids": ((1, 1), (2, 1, 2), (1, 2, 2)), "seed": 4},
        {"ignore_eos": True, "repetition_penalty": 1.3, "allowed_token_ids": (1, 2, 5, 9)},
        {
            "max_new_tokens": 14,
            "temperature": 0.8,
            "frequency_penalty": 0.2,
            "presence_penalty": 0.1,
        },
        {"logit_bias": {3: 2.0, 0: 4.0}, "min_new_tokens": 22},
        {"logit_bias": {0: 9.0}, "min_new_tokens": 25},
    ]
    asked = []
    for number, fields in enumerate(edits):
        values: dict[str, object] = {"temperature": 0.0, "max_new_tokens": 30, "seed": number}
        values |= fields
        params = SamplingParams(**values)  # type: ignore[arg-type]
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randint(3, 12))]
        found = Request(table, params, prompt, number)
        found.scalar.eos_ids = () if params.ignore_eos else (0,)
        asked.append(found)
    messages = [request(f"r{i}", one.prompt, one.params) for i, one in enumerate(asked)]
    outputs = drive(core, messages)
    counters = core.scheduler.counters
    for i, one in enumerate(asked):
        assert tokens_of(outputs[f"r{i}"]) == expected_output(one), edits[i]
    assert counters.retractions > 0
    assert counters.spec_accepted_tokens > 5
    if DEVICE.type == "cuda":
        assert worker.counts.replays == worker.counts.decode_steps
    worker.shutdown()
