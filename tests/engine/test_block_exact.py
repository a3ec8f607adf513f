"""Block drafts through whole cores on a CPU: nothing but the number of steps changes."""

from pathlib import Path

import pytest
import torch

from outrider.engine.kv_pool import KVPool
from outrider.engine.models import TargetModel, load_model
from outrider.engine.speculative import eagle_drafter, standalone_drafter
from outrider.engine.speculative.block_drafter import make
from outrider.engine.speculative.device_drafter import DrafterContext, DraftRows
from outrider.engine_core import admission
from outrider.engine_core.config import EngineConfig
from outrider.engine_core.ids import i32
from outrider.engine_core.messages import GenerateRequest, RequestStats
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.plan import SlotInit
from outrider.engine_core.sampling_params import SamplingParams

from ..reference.block_draft import BlockReference
from .block_cores import DRAFTS, VOCAB, BlockCore, block_core, draft_config, write_target
from .block_nets import random_tensors, reference_of
from .cores import drive, request, tokens_of
from .steps import Pages, Query, Sequence, make_batch

CPU = torch.device("cpu")
Tokens = dict[str, list[int]]

over_drafts = pytest.mark.parametrize("name", DRAFTS)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def requests(name: str = "r", first: int = 0) -> list[GenerateRequest]:
    """Greedy and seeded ones of several lengths, some with the beginning of another."""
    out = []
    for i in range(first, first + 8):
        prompt = [(3 * j * j + i % 7 * 5 + j) % VOCAB for j in range(1 + 5 * i)]
        params = SamplingParams(
            temperature=(0.0, 0.8)[i % 2],
            seed=i,
            max_new_tokens=12 + i,
            ignore_eos=i % 3 > 0,
            stop_token_ids=(5,) if i == 4 else (),
        )
        out.append(request(f"{name}{i}", prompt, params))
    return out


def waves() -> list[list[GenerateRequest]]:
    return [requests(), requests("s", 6)[:3]]


def check_pages(made: BlockCore) -> None:
    """Every page is back."""
    cache = made.core.scheduler.cache
    assert cache.tree.locked_pages == 0
    assert cache.available == cache.total


def run(
    target: Path, name: str | None, messages: list[list[GenerateRequest]], **flags: object
) -> tuple[Tokens, list[RequestStats]]:
    """Tokens and statistics of some waves of requests."""
    tokens: Tokens = {}
    stats: list[RequestStats] = []
    with block_core(target, name, **flags) as made:
        for wave in messages:
            for rid, outputs in drive(made.core, wave).items():
                tokens[rid] = tokens_of(outputs)
                last = outputs[-1].stats
                assert last is not None
                stats.append(last)
        check_pages(made)
    return tokens, stats


@pytest.fixture(scope="module")
def plain(target: Path) -> Tokens:
    return run(target, None, waves())[0]


@over_drafts
@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"disable_overlap_schedule": True, "max_running_requests": 1},
        {"page_size": 1, "chunked_prefill_size": 5},
        {"page_size": 1, "max_running_requests": 1, "disable_overlap_schedule": True},
        {"page_size": 64, "disable_radix_cache": True, "max_running_requests": 3},
    ],
    ids=lambda mode: ",".join(mode) or "default",
)
def test_every_mode_gives_the_tokens_of_plain_decoding(
    target: Path, plain: Tokens, name: str, mode: dict[str, object]
) -> None:
    tokens, stats = run(target, name, waves(), **mode)
    assert tokens == plain
    accepted = sum(some.correct_drafts for some in stats)
    proposed = sum(some.proposed_drafts for some in stats)
    assert 0 < accepted < proposed
    # The last drafts before a request's end are fewer.
    most = 3 * sum(some.verify_ct for some in stats)
    assert 0.8 * most < proposed < most


def test_a_good_drafts_blocks_are_accepted_in_part_and_whole(target: Path, plain: Tokens) -> None:
    tokens, stats = run(target, "dspark", waves())
    assert tokens == plain
    lengths = [sum((*some.histogram, *[0] * 9)[n] for some in stats) for n in range(4)]
    assert min(lengths) > 3


@over_drafts
def test_retracted_requests_draft_on(
    target: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 1)
    params = SamplingParams(temperature=0.0, max_new_tokens=18, ignore_eos=True)
    messages = [request(f"r{i}", [i, 1, 2, 3, i], params) for i in range(5)]
    wanted, _ = run(target, None, [messages])
    got: Tokens = {message.rid: [] for message in messages}
    with block_core(target, name, page_size=1, max_total_tokens=60) as made:
        core = made.core
        for message in messages:
            assert core.submit(message) is None
        while core.has_work:
            for output in core.step():
                got[output.rid] += i32(output.tokens).tolist()
        assert core.scheduler.counters.retractions > 0
        check_pages(made)
    assert got == wanted


@over_drafts
def test_a_context_is_filled_to_its_end(target: Path, name: str) -> None:
    prompt = [i * i % VOCAB for i in range(480)]
    full = SamplingParams(temperature=0.0, max_new_tokens=99, ignore_eos=True)
    tokens, _ = run(target, name, [[request("full", prompt, full)]])
    wanted, _ = run(target, None, [[request("full", prompt, full)]])
    assert tokens == wanted
    assert len(tokens["full"]) == 512 - 480


def test_simulated_acceptance_takes_the_drafts(target: Path) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True)
    messages = [request(f"r{i}", [i, 2, 3], params) for i in range(3)]
    _, stats = run(target, "dflash", [messages], simulate_accept_length=2.5)
    count = sum(some.verify_ct for some in stats)
    assert sum(some.verify_tokens for some in stats) == pytest.approx(2.5 * count, rel=0.15)


@pytest.mark.parametrize("mode", ["static", "compact"])
def test_simulated_survival_is_what_confidence_says(target: Path, mode: str) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True)
    messages = [request(f"r{i}", [i, 2, 3], params) for i in range(8)]
    flags = {"speculative_ragged_verify_mode": mode, "simulate_survival": 0.7}
    with block_core(target, "dspark", **flags) as made:
        if mode == "compact":
            assert made.core.scheduler.verify is not None
            made.core.scheduler.verify.planner.force(0.4)
        outputs = drive(made.core, messages)
        counters = made.core.scheduler.counters
    assert all(len(tokens_of(some)) == 60 for some in outputs.values())
    accepted = counters.spec_accepted_tokens / counters.spec_draft_tokens
    # 0.7, 0.49 and 0.34 of all drafts; of the surest two of five more than that.
    assert 0.41 < accepted < 0.61 if mode == "static" else accepted > 0.65


def test_drafting_is_timed(target: Path) -> None:
    with block_core(target, "dspark") as made:
        assert min(made.worker.measure([1, 8])) > 0
        assert min(made.worker.measure_drafting([1, 4])) > 0


class Watch:
    """Holds what a drafter proposes against the equations over the text so far, run anew."""

    def __init__(self, made: BlockCore, name: str, folder: Path, texts: dict[bytes, list[int]]):
        self.seen = 0
        self.short = 0
        self._texts = texts
        self._slots: dict[int, list[int]] = {}
        self._drafter = made.drafter
        self._state = made.runner.state
        self._config = load_model_config(folder)
        self._draft = draft_config(name, self._config)
        self._model: TargetModel = load_model(folder, self._config, torch.float32, CPU)
        self._reference: BlockReference = reference_of(
            self._draft, random_tensors(self._draft), self._model
        )
        self._enter, self._propose = self._drafter.enter, self._drafter.propose
        self._drafter.enter = self.enter  # type: ignore[method-assign]
        self._drafter.propose = self.propose  # type: ignore[method-assign]

    def enter(self, init: SlotInit) -> None:
        self._enter(init)
        self._slots[init.slot] = self._texts[bytes(init.prompt)]

    def propose(self, rows: DraftRows) -> None:
        lengths = rows.seq_lens.clone()
        self._propose(rows)
        block = self._draft.block
        assert block is not None
        for row, slot in enumerate(rows.slots.tolist()):
            length, cap = int(lengths[slot]), int(rows.caps[row])
            text = self._slots[slot]
            if not cap or length >= len(text):
                continue  # beyond its end, which the core does not know of yet
            assert int(self._drafter.bonus[slot]) == text[length]
            context = self._reference.inject(self._features(text[:length]))
            ids = [text[length], *[block.mask_token_id] * (min(cap, 3) + block.first_row - 1)]
            hidden = self._reference.forward(context, torch.tensor(ids))
            drafts, sure = self._reference.choose(hidden, text[length])
            begin = int(rows.cu_q[row]) + 1
            assert rows.tokens[begin : begin + cap].tolist() == drafts
            if sure:
                assert self._drafter.confidence is not None
                assert self._drafter.confidence.shape == (len(rows.slots), 3)
                found = self._drafter.confidence[row, : len(sure)].double()
                torch.testing.assert_close(found, torch.tensor(sure).double(), atol=1e-3, rtol=1e-3)
            self.seen += 1
            self.short += cap < 3

    def _features(self, text: list[int]) -> torch.Tensor:
        pages = Pages(8, 64, 0)
        kv = KVPool(8, 64, self._config, torch.float32, CPU)
        batch = make_batch([Query(Sequence(), text)], pages)
        _, features = self._model.forward_capture(batch, kv, self._draft.feature_layers)
        return features


@pytest.mark.parametrize("name", ["dflash", "random-dspark"])
@pytest.mark.parametrize(
    "mode",
    [{}, {"disable_overlap_schedule": True}, {"page_size": 1, "chunked_prefill_size": 5}],
    ids=lambda mode: ",".join(mode) or "default",
)
def test_drafts_are_those_of_the_text_so_far(
    target: Path, plain: Tokens, name: str, mode: dict[str, object]
) -> None:
    """Whatever was rejected, cut into chunks or found in the cache before."""
    messages = [*waves()[0][:5], *waves()[1][:1]]
    texts = {m.prompt: i32(m.prompt).tolist() + plain[m.rid] for m in messages}
    with block_core(target, name, **mode) as made:
        watch = Watch(made, name, target, texts)
        for wave in (messages[:5], messages[5:]):
            drive(made.core, wave)
    assert watch.seen > 30
    assert watch.short > 2


def test_drafters_need_a_model_of_their_kind(target: Path) -> None:
    with block_core(target, "dflash") as made:
        draft, state = made.worker._draft, made.runner.state
        context = DrafterContext(
            EngineConfig(model="m"), 4, 64, CPU, state.page_table, made.runner._model, 2, VOCAB
        )
        with pytest.raises(ValueError, match="DFLASH and DSPARK draft with a model"):
            make(context)
        for module in (eagle_drafter, standalone_drafter):
            with pytest.raises(ValueError, match=r"with a model of (its|their) kind"):
                module.make(context._replace(draft=draft))
