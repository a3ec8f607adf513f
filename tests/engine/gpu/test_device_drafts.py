"""N-gram drafts from the device through whole engines: nothing but the number of steps changes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.cython_ext.packed_rows import PackedRows
from outrider.engine.gpu.packer import StepPacker, fill
from outrider.engine.gpu.staging import StagingViews, field_lengths, split_device
from outrider.engine.gpu.tier_shapes import exact_staging
from outrider.engine.gpu.worker import GpuWorker
from outrider.engine.models.gpu_decoder import GpuDecoder
from outrider.engine.speculative.device_drafter import DraftRows
from outrider.engine.speculative.suffix_drafter import SuffixDrafter
from outrider.engine.weights import Checkpoint
from outrider.engine_core import admission
from outrider.engine_core.assembly import Assembly
from outrider.engine_core.ids import i32
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.model_config import ModelConfig, load_model_config
from outrider.engine_core.plan import HostDrafts, SlotInit, StepPlan
from outrider.engine_core.sampling_params import SamplingParams

from ..cores import drive, request, tokens_of
from ..driver import int32
from ..tiny import bigram_config, write_checkpoint
from .device_cores import CONTEXT, KvModel, device_core
from .gpu_driver import DEVICE

VOCAB = 7  # the model's texts repeat after about 20 tokens
Tokens = dict[str, list[int]]


def flags(source: str | None, **others: object) -> dict[str, Any]:
    fields: dict[str, Any] = {"disable_cuda_graph": True, **others}
    if source is not None:
        fields |= {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": 6,
            "speculative_ngram_source": source,
        }
    return fields


def requests() -> list[GenerateRequest]:
    """Greedy ones of several lengths; the last runs into the context's end."""
    out = []
    for i in range(5):
        prompt = [(3 * j + i) % VOCAB for j in range(3 + 5 * i)]
        params = SamplingParams(
            temperature=0.0,
            max_new_tokens=12 + i,
            ignore_eos=i % 2 == 0,
            stop_token_ids=(3,) if i == 3 else (),
        )
        out.append(request(f"r{i}", prompt, params))
    full = SamplingParams(temperature=0.0, max_new_tokens=99, ignore_eos=True)
    return [*out, request("full", [i % 5 for i in range(CONTEXT - 14)], full)]


def run(source: str | None, messages: list[GenerateRequest], **others: object) -> Tokens:
    with device_core(KvModel(VOCAB), bigram_config(VOCAB), **flags(source, **others)) as made:
        outputs = drive(made[0].core, messages)
        check_after(*made)
    return {rid: tokens_of(some) for rid, some in outputs.items()}


def check_after(assembly: Assembly, worker: GpuWorker) -> None:
    """Every page is back, and the drafter's texts are the slots'."""
    cache = assembly.core.scheduler.cache
    assert cache.tree.locked_pages == 0
    assert cache.available == cache.total
    drafter, state = worker._step.drafter, worker._step.state
    if drafter is not None:
        assert isinstance(drafter, SuffixDrafter)
        used = state.seq_lens[:-1].clamp(max=drafter.history.shape[1] - 1).long()
        newest = drafter.history[torch.arange(len(used), device=DEVICE), used]
        assert torch.equal(newest[used > 0], state.last_tokens[:-1][used > 0])


def check_texts(assembly: Assembly, worker: GpuWorker) -> int:
    """What the device holds of running requests begins with all that the core knows; tokens."""
    drafter, tokens = worker._step.drafter, 0
    assert isinstance(drafter, SuffixDrafter)
    for running in assembly.core.scheduler.batch.running:
        text = running.request.tokens().tolist()
        assert drafter.history[running.slot, : len(text)].tolist() == text
        tokens += len(text)
    return tokens


@pytest.fixture(scope="module")
def plain() -> Tokens:
    return run(None, requests())


@pytest.mark.parametrize("source", ["gpu", "both"])
@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"disable_overlap_schedule": True},
        {"page_size": 1, "chunked_prefill_size": 7},
        {"page_size": 64, "max_running_requests": 1},
        {"page_size": 16, "disable_radix_cache": True, "speculative_length_policy": "auto"},
    ],
    ids=lambda mode: ",".join(mode) or "default",
)
def test_every_mode_gives_the_tokens_of_plain_decoding(
    plain: Tokens, source: str, mode: dict[str, object]
) -> None:
    assert run(source, requests(), **mode) == plain


def test_plain_decoding_reaches_what_the_modes_compare(plain: Tokens) -> None:
    assert len(plain["full"]) == 14
    assert len(plain["r3"]) < 12
    assert sum(map(len, plain.values())) > 50


def test_seeded_requests_draw_the_same_tokens() -> None:
    params = SamplingParams(temperature=0.5, seed=4, max_new_tokens=14, ignore_eos=True)
    messages = [request("a", [1, 2, 3, 1, 2], params)]
    assert run("gpu", messages) == run(None, messages)


@pytest.mark.parametrize("source", ["gpu", "both"])
def test_retracted_requests_draft_from_all_their_text(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 1)
    params = SamplingParams(temperature=0.0, max_new_tokens=18, ignore_eos=True)
    messages = [request(f"r{i}", [i, 1, 2, 3, i], params) for i in range(4)]
    wanted = run(None, messages)
    got: Tokens = {message.rid: [] for message in messages}
    with device_core(
        KvModel(VOCAB), bigram_config(VOCAB), page_size=1, pool_tokens=60, **flags(source)
    ) as (assembly, worker):
        core, checked = assembly.core, 0
        for message in messages:
            assert core.submit(message) is None
        while core.has_work:
            for output in core.step():
                got[output.rid] += i32(output.tokens).tolist()
            if source == "gpu":  # no launched step waits for drafts before it enters requests
                checked += check_texts(assembly, worker)
        counters = core.scheduler.counters
        assert counters.retractions > 0
        assert counters.spec_accepted_tokens > 0
        assert checked > 200 or source == "both"
        check_after(assembly, worker)
    assert got == wanted


@pytest.mark.parametrize("source", ["gpu", "both"])
def test_aborts_leave_the_others_alone(plain: Tokens, source: str) -> None:
    with device_core(KvModel(VOCAB), bigram_config(VOCAB), **flags(source)) as (assembly, worker):
        core = assembly.core
        got: Tokens = {}
        for message in requests():
            assert core.submit(message) is None
        for step in range(400):
            if step in (3, 6):
                core.abort(f"r{step // 3}")
            for output in core.step():
                got.setdefault(output.rid, []).extend(i32(output.tokens).tolist())
            if not core.has_work:
                break
        check_after(assembly, worker)
    for rid, tokens in got.items():
        assert tokens == plain[rid] if rid not in ("r1", "r2") else plain[rid][: len(tokens)]


def test_drafts_are_counted_without_padding(plain: Tokens) -> None:
    """Looping text is accepted in full; a row without a match proposes nothing and says so."""
    with device_core(KvModel(VOCAB), bigram_config(VOCAB), **flags("gpu")) as (assembly, worker):
        params = SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True)
        (outputs,) = drive(assembly.core, [request("a", [4], params)]).values()
        stats = outputs[-1].stats
        assert stats is not None
        assert stats.plain_ct > 0
        assert stats.spec_off_reason == "no match"
        assert stats.verify_tokens / stats.verify_ct > 2
        assert stats.correct_drafts <= stats.proposed_drafts <= 5 * stats.verify_ct
        steps = assembly.core.scheduler.counters.steps
        assert steps < 40
        assert worker.counts.decode_steps == steps - 1
    assert assembly.core.stats(0).wait_for_drafts == 0.0


def test_logprobs_and_penalties_beside_device_drafts() -> None:
    """Those run after the graph, along the path that the device walked."""
    edits = {"repetition_penalty": 1.2, "logit_bias": {3: 1.5}, "min_new_tokens": 6}
    given: list[dict[str, Any]] = [{"logprobs": 2}, edits, {**edits, "logprobs": 1, "seed": 3}]
    messages = [
        request(f"r{i}", [1, 2, 3, 1, 2, 3, 1], SamplingParams(
            temperature=0.0 if i < 2 else 0.8, max_new_tokens=14, **fields
        ))
        for i, fields in enumerate(given)
    ]  # fmt: skip
    results = []
    for source in (None, "gpu"):
        with device_core(KvModel(VOCAB), bigram_config(VOCAB), **flags(source)) as made:
            outputs = drive(made[0].core, messages)
        results.append(
            {
                rid: (tokens_of(some), [(e.token, e.value) for o in some for e in o.logprobs])
                for rid, some in outputs.items()
            }
        )
    assert results[0] == results[1]


@pytest.mark.parametrize("source", ["gpu", "both"])
def test_simulated_acceptance_counts_the_rows_that_have_drafts(source: str) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=70, ignore_eos=True)
    given = flags(source, simulate_accept_length=3.0)
    with device_core(KvModel(VOCAB), bigram_config(VOCAB), **given) as (assembly, worker):
        (outputs,) = drive(assembly.core, [request("a", [1, 2, 3], params)]).values()
        stats = outputs[-1].stats
        check_after(assembly, worker)
    assert stats is not None
    assert stats.verify_ct > 10
    assert stats.verify_tokens == pytest.approx(3 * stats.verify_ct, abs=3)


def test_the_match_window_bounds_the_match() -> None:
    """A window of 2 matches one token: the latest; a longer one the longest."""
    given = {"speculative_ngram_max_trie_depth": 2, **flags("gpu")}
    for fields, most in ((given, 1), (flags("gpu"), 17)):
        with device_core(KvModel(VOCAB), bigram_config(VOCAB), **fields) as (_, worker):
            drafter = worker._step.drafter
        assert isinstance(drafter, SuffixDrafter)
        init = SlotInit(2, 1, SamplingParams(), 0, int32([5, 1, 2, 6, 2, 3, 1, 2]), b"", 0, ())
        drafter.enter(init)
        tokens, parents, seq_lens = (
            torch.full((n,), 7, dtype=torch.int32, device=DEVICE) for n in (4, 4, 9)
        )
        rows = [
            torch.tensor(values, dtype=torch.int32, device=DEVICE)
            for values in ([2], [0, 4], [3], [9], [9])
        ]
        slots, cu_q, caps, proposed, depths = rows
        drafter.propose(DraftRows(slots, cu_q, caps, seq_lens, tokens, parents, proposed, depths))
        assert tokens.tolist() == [7, *([3, 1, 2] if most == 1 else [6, 2, 3])]
        assert proposed.tolist() == depths.tolist() == [3]


def drafts(counts: list[int], caps: list[int]) -> HostDrafts:
    nodes = sum(counts)
    return HostDrafts(7, int32(counts), int32([3] * nodes), int32([0] * nodes), int32(caps))


def mixed_plan(late_bound: bool) -> StepPlan:
    """Two verify rows of up to three tokens, one without drafts, and a chunk."""
    return StepPlan(
        7, late_bound, int32([4, 2, 0, 1]), bytes([2, 2, 2, 0]), int32([3, 3, 1, 2]),
        int32([-1, -1, -1, 5]), int32([8, 9]), (), b"", b"", b"",
    )  # fmt: skip


def filled(packed: PackedRows) -> StagingViews:
    """The step's block, in its exact size."""
    plan = mixed_plan(False)
    staging = exact_staging(packed, plan)
    block = np.zeros(sum(field_lengths(staging)), dtype=np.int32)
    fill(block, staging, packed, plan, 8)
    return split_device(torch.from_numpy(block), staging)


def test_the_packer_leaves_room_for_device_drafts() -> None:
    packer = StepPacker(8, 10, True)
    packed = packer.pack(mixed_plan(False), None)
    assert packed.caps is not None
    assert packed.caps.tolist() == [2, 2, 0, 0]
    assert packed.device_drafts == 4
    assert packed.q_lens.tolist() == [3, 3, 1, 2]
    assert filled(packed).parents.tolist() == [-1, -1, -1, -1, -1, -1, -1, -1, 0]
    assert packed.depths.tolist() == [0] * 4
    packed = packer.pack(mixed_plan(True), drafts([2, 0, 0, 0], [0, 1, 0, 0]))
    assert packed.caps is not None
    assert packed.caps.tolist() == filled(packed).caps.tolist() == [0, 1, 0, 0]
    assert filled(packed).tokens.tolist() == [0, 3, 3, 0, 0, 0, 8, 9]
    assert filled(packed).parents.tolist() == [-1, 0, 0, -1, -1, -1, -1, 0]
    assert packed.depths.tolist() == [1, 0, 0, 0]
    assert packer.pack(mixed_plan(True), drafts([2, 0, 0, 0], [])).caps is None


@pytest.mark.parametrize(
    ("on_device", "counts", "caps", "words"),
    [
        (False, [0, 0, 0, 0], [0, 1, 0, 0], "has no drafter"),
        (True, [1, 0, 0, 0], [1, 0, 0, 0], "device_caps"),
        (True, [0, 0, 0, 0], [1], "device_caps"),
        (True, [0, 0, 0, 0], [0, 3, 0, 0], "row 1: 3 drafts"),
        (True, [0, 0, 0, 0], [0, 0, 0, 1], "row 3: 1 drafts"),
    ],
)
def test_broken_room_is_named(
    on_device: bool, counts: list[int], caps: list[int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        StepPacker(8, 10, on_device).pack(mixed_plan(True), drafts(counts, caps))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig]:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", 12, layers=1)
    return folder, load_model_config(folder)


def real(
    decoder: tuple[Path, ModelConfig], source: str | None, count: int, **others: object
) -> Iterator[tuple[Tokens, GpuWorker]]:
    folder, config = decoder
    model = GpuDecoder(Checkpoint(folder), config, torch.float32, DEVICE)
    params = [
        SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=5, max_new_tokens=count, ignore_eos=True),
    ]
    messages = [request(f"r{i}", [1, 5, 2, 1, 5, 2, 1 + i], params[i % 2]) for i in range(2)]
    with device_core(model, config, **flags(source, **others)) as (assembly, worker):
        outputs = drive(assembly.core, messages)
        yield {rid: tokens_of(some) for rid, some in outputs.items()}, worker


def test_a_transformer_drafts_on_the_device(decoder: tuple[Path, ModelConfig]) -> None:
    ((wanted, _),) = real(decoder, None, 8)
    ((got, _),) = real(decoder, "gpu", 8)
    assert got == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["gpu", "both"])
def test_drafting_steps_replay_their_graphs(decoder: tuple[Path, ModelConfig], source: str) -> None:
    assert DEVICE.type == "cuda"
    ((wanted, _),) = real(decoder, None, 100)
    ((got, worker),) = real(decoder, source, 100, disable_cuda_graph=False)
    assert got == wanted
    counts = worker.counts
    assert counts.replays == counts.decode_steps > 0
    assert counts.prefill_replays == counts.prefill_steps > 0
