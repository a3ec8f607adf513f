"""Steps with prefill rows in graphs: padding between the rows changes nothing that they give.

Where nothing can be captured a replay launches the tier's kernels over its block, see
``eager_graphs``.
"""

import random
from pathlib import Path

import msgspec
import pytest
import torch

from outrider.engine.gpu.step_runner import GpuStepRunner
from outrider.engine.gpu.tiers import Tier
from outrider.engine.models import GpuModel
from outrider.engine.models.gpu_decoder import GpuDecoder
from outrider.engine.weights import Checkpoint
from outrider.engine_core.graph_sizes import CHUNK_ROWS
from outrider.engine_core.ids import RowKind, i32
from outrider.engine_core.model_config import ModelConfig, load_model_config
from outrider.engine_core.plan import HostDrafts, SlotInit, StepPlan, StepResult
from outrider.engine_core.sampling_params import SamplingParams

from ..driver import Drafts, chain, int32
from ..test_step import GREEDY, SEEDED, random_tree
from ..tiny import bigram_config, write_checkpoint
from .device_cores import KvModel
from .eager_graphs import GRAPHS, EagerGraphs
from .gpu_driver import DEVICE, GpuDriver

VOCAB, WIDTH, CHUNK = 40, 4, 12
SLOTS = 6
EDITED = SamplingParams(temperature=0.7, frequency_penalty=0.4, logit_bias={3: 2.0})
STEPS = 60 if DEVICE.type == "cuda" else 14


class Twins:
    """The same steps kernel by kernel in their exact sizes, and in graphs."""

    def __init__(
        self, model: GpuModel, config: ModelConfig, slots: int = SLOTS, chunk: int = CHUNK
    ) -> None:
        self.exact = GpuDriver(model, config, slots, graphs=False, width=WIDTH)
        self.exact_kv = isinstance(model, KvModel)
        recorder = EagerGraphs if self.exact_kv else GRAPHS
        self.padded = GpuDriver(
            model, config, slots, recorder=recorder, width=WIDTH, chunk=chunk
        )  # fmt: skip
        self.params: dict[int, SamplingParams] = {}
        self.left: dict[int, tuple[list[int], int]] = {}  # prompt, and how much of it is in

    @property
    def runner(self) -> GpuStepRunner:
        return self.padded.gpu_runner

    def enter(self, slot: int, prompt: list[int], params: SamplingParams) -> None:
        self.params[slot], self.left[slot] = params, (prompt, 0)

    def decoding(self) -> list[int]:
        return sorted(self.params.keys() - self.left.keys())

    def step(self, rows: dict[int, Drafts | None], chunks: dict[int, int]) -> StepResult:
        """Verify ``rows`` beside so many tokens of prompts; both twins give the result."""
        prefills = []
        for slot, count in chunks.items():
            prompt, start = self.left[slot]
            init = None
            if start == 0:
                init = SlotInit(slot, 1, self.params[slot], slot, int32(prompt), b"", 0, ())
            end = min(start + count, len(prompt))
            kind = RowKind.PREFILL_LAST if end == len(prompt) else RowKind.PREFILL
            prefills.append(self.exact.chunk(slot, kind, start, prompt[start:end], init))
            self.left[slot] = (prompt, end)
            if end == len(prompt):
                del self.left[slot]
        verify, drafts = self.exact.verify_plan(rows)
        return self.run(*self.exact.joined(verify, drafts, prefills))

    def run(self, plan: StepPlan, drafts: HostDrafts | None) -> StepResult:
        results = [driver.run(plan, drafts) for driver in (self.exact, self.padded)]
        bare = [msgspec.structs.replace(result, busy_ns=0) for result in results]
        assert bare[0] == bare[1]
        return results[1]

    def check(self) -> None:
        """Slots' state is the same, and so is the KV of all that is in place."""
        a, b = self.exact.device_state, self.padded.device_state
        for name in ("seq_lens", "last_tokens", "out_counts", "page_table"):
            left, right = getattr(a, name)[:-1], getattr(b, name)[:-1]
            assert torch.equal(left, right), name
        for slot in self.params:
            left, right = self.exact.kv_of(slot), self.padded.kv_of(slot)
            if self.exact_kv:
                left, right = (kv[0, 0, :, 0, 0] for kv in (left, right))
                assert torch.equal(left, right)
            else:
                torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def decoder(folder: Path) -> tuple[GpuModel, ModelConfig]:
    folder = write_checkpoint(folder / "model", VOCAB)
    config = load_model_config(folder)
    return GpuDecoder(Checkpoint(folder), config, torch.float32, DEVICE), config


def some_drafts(rng: random.Random, tree: bool) -> Drafts | None:
    count = rng.choice((0, 1, WIDTH - 1))
    if not count:
        return None
    return random_tree(rng, [], count) if tree else chain([rng.randrange(VOCAB)] * count)


def play(twins: Twins, seed: int, tree: bool, kinds: list[SamplingParams], steps: int) -> None:
    """Requests come, are prefilled in chunks beside others' drafts, and go."""
    rng = random.Random(seed)
    reached = {"between": 0, "alone": 0, "cut": 0, "several": 0, "entered": 0, "narrow": 0}
    for _ in range(steps):
        free = [slot for slot in range(SLOTS) if slot not in twins.params]
        if free and rng.random() < 0.8:
            slot = rng.choice(free)
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 2 * CHUNK))]
            twins.enter(slot, prompt, rng.choice(kinds))
        ready = twins.decoding()
        rows = {
            slot: some_drafts(rng, tree) for slot in rng.sample(ready, rng.randint(0, len(ready)))
        }
        chunks, room = {}, CHUNK
        for slot, (prompt, start) in twins.left.items():
            count = min(room, len(prompt) - start, rng.randint(1, CHUNK))
            if count:
                chunks[slot], room = count, room - count
                reached["entered"] += start == 0
                reached["cut"] += start + count < len(prompt)
        if not rows and not chunks:
            continue
        reached["between"] += bool(chunks) and 0 < len(rows) < SLOTS
        reached["alone"] += bool(chunks) and not rows
        reached["narrow"] += bool(chunks) and bool(rows) and not any(rows.values())
        reached["several"] += len(chunks) > 1
        twins.step(rows, chunks)
        twins.check()
        done = [slot for slot in ready if int(twins.exact.device_state.seq_lens[slot]) > 40]
        for slot in done:  # its slot is free for another
            del twins.params[slot]
    needed = ("between", "cut", "several", "entered")
    assert min(reached[name] for name in needed) > 0, reached
    counts = twins.runner
    assert counts.prefill_replays == counts.prefill_steps > 0
    assert counts.replays == counts.decode_steps
    assert twins.exact.gpu_runner.prefill_replays == 0


ROUNDS = pytest.mark.parametrize(
    ("seed", "tree", "kinds"),
    [(0, True, [GREEDY]), (1, False, [GREEDY, SEEDED]), (2, True, [SEEDED, EDITED, GREEDY])],
    ids=["greedy", "sampled", "edited"],
)


@ROUNDS
def test_random_steps_are_those_of_single_launches(
    seed: int, tree: bool, kinds: list[SamplingParams]
) -> None:
    play(Twins(KvModel(VOCAB), bigram_config(VOCAB)), seed, tree, kinds, STEPS)


@pytest.mark.gpu
@ROUNDS
def test_random_steps_replay_cuda_graphs(
    tmp_path: Path, seed: int, tree: bool, kinds: list[SamplingParams]
) -> None:
    assert DEVICE.type == "cuda"
    play(Twins(*decoder(tmp_path)), seed, tree, kinds, 300)


def test_a_models_steps_are_those_of_single_launches(tmp_path: Path) -> None:
    """Attention over padded rows, features picked by node, KV of padding in the sink page."""
    twins, rng = Twins(*decoder(tmp_path), slots=3), random.Random(4)
    for slot in range(3):
        twins.enter(slot, [rng.randrange(VOCAB) for _ in range(7 + slot)], GREEDY)
    twins.step({}, {0: 7, 1: 3})
    twins.step({0: chain([3, 4, 5])}, {1: 5, 2: 4})
    result = twins.step({0: None, 1: random_tree(rng, [], 3)}, {2: 5})
    assert i32(result.accept_lens).min() > 0
    twins.check()
    kv, state = twins.padded.kv, twins.padded.device_state
    for slot in range(3):
        beyond = torch.arange(int(state.seq_lens[slot]) + WIDTH, twins.padded.pages * kv.page_size)
        pages = state.page_table[slot].cpu()[beyond // kv.page_size]
        places = pages.long() * kv.page_size + beyond % kv.page_size
        assert kv.data.cpu()[:, :, places].isnan().all(), "no padding went there"
    assert twins.runner.prefill_replays == twins.runner.prefill_steps == 3


def test_many_rows_take_the_tier_that_holds_them() -> None:
    twins = Twins(KvModel(VOCAB), bigram_config(VOCAB), slots=32, chunk=20)
    tiers: list[Tier] = []
    assert twins.padded.graphs is not None
    get = twins.padded.graphs.get
    twins.padded.graphs.get = lambda tier: tiers.append(tier) or get(tier)  # type: ignore[method-assign, func-returns-value]
    for slot in range(11):
        twins.enter(slot, [slot, 3], GREEDY)
    twins.step({}, dict.fromkeys(range(8), 2))
    for slots in (range(8), range(9)):
        twins.step({slot: chain([5]) for slot in slots if slot < 8}, {slots[-1] + 1: 1})
    twins.step(dict.fromkeys(range(8)), {8: 2, 10: 2})
    twins.step(dict.fromkeys(range(9)), {9: 1})
    twins.check()
    assert [(tier.rows, tier.width) for tier in tiers] == [(8, 1), (8, 4), (8, 4), (8, 1), (32, 1)]


def test_what_fits_no_graph_runs_kernel_by_kernel() -> None:
    twins = Twins(
        KvModel(VOCAB), bigram_config(VOCAB), slots=CHUNK_ROWS + 8, chunk=CHUNK + CHUNK_ROWS
    )
    runner = twins.runner
    long, asking, paged = (CHUNK_ROWS + more for more in (4, 5, 6))

    def replayed(rows: dict[int, Drafts | None], chunks: dict[int, int]) -> bool:
        before = runner.prefill_replays
        twins.step(rows, chunks)
        return runner.prefill_replays > before

    for slot in range(CHUNK_ROWS + 2):
        twins.enter(slot, [slot, 3], GREEDY)
    assert not replayed({}, dict.fromkeys(range(CHUNK_ROWS + 1), 1)), "too many prompts"
    assert replayed({}, dict.fromkeys(range(CHUNK_ROWS), 1))
    twins.enter(long, [2] * (CHUNK + CHUNK_ROWS + 1), GREEDY)
    assert not replayed({0: None}, {long: CHUNK + CHUNK_ROWS + 1}), "a longer chunk"
    twins.enter(asking, [5, 6, 7], SamplingParams(temperature=0.0, logprobs=1))
    assert not replayed({0: None}, {asking: 3}), "log-probabilities"
    assert replayed({0: chain([3])}, {CHUNK_ROWS: 1})

    twins.enter(paged, [5, 6, 7], GREEDY)
    plan = twins.exact.chunk(
        paged,
        RowKind.PREFILL_LAST,
        0,
        [5, 6, 7],
        SlotInit(paged, 1, GREEDY, 0, int32([5]), b"", 0, ()),
    )
    fields = {name: getattr(plan, name) * 80 for name in ("page_slots", "page_indexes", "page_ids")}
    before = runner.prefill_replays
    twins.run(msgspec.structs.replace(plan, **fields), None)
    assert runner.prefill_replays == before, "page-table changes without end"
    del twins.left[paged]
    twins.check()
