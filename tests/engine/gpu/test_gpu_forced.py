"""Forced drafts on the GPU's steps: with every drafter of the device or none, ahead of results."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from tokenizers import Tokenizer

from outrider.engine.gpu import worker as gpu_worker
from outrider.engine.gpu.forced_ahead import ForcedAhead
from outrider.engine.gpu.worker import GpuWorker
from outrider.engine_core import admission
from outrider.engine_core.assembly import Assembly
from outrider.engine_core.draft_config import SpecShape
from outrider.engine_core.grammar_spec import GrammarSpec
from outrider.engine_core.ids import i32
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.plan import StepPlan, StepResult
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.trace import Frame, TraceWriter

from ..block_cores import block_core, write_target
from ..cores import drive, request, tokens_of
from ..draft_cores import CHAIN, TREE, VOCAB, FreshDraft, Models, draft_core, write_models
from ..letters import write_tokenizer
from ..tiny import bigram_config
from .device_cores import KvModel, device_core
from .eager_graphs import EagerGraphs
from .test_gpu_block_steps import started as block_started
from .test_gpu_draft_steps import started as draft_started

Tokens = dict[str, list[int]]
Engine = tuple[Assembly, GpuWorker]
FREE, LOOP = "[a-l]{9}", "(a(bcdl|ef)(ghi|jk[a-c]{2})){3,6}"
LONG = "abcdabcdefghijkl(ab|ghij){2}lkjihgfedcbalkji[a-c]"


class Seen(NamedTuple):
    tokens: Tokens
    steps: int
    forced: int
    accepted: int
    waited: int


def requests(*texts: str | None, new: int = 60, others: int = 12) -> list[GenerateRequest]:
    """A request for each grammar, or for none, greedy and seeded."""
    made = []
    for i, text in enumerate(texts):
        grammar = None if text is None else GrammarSpec("regex", text)
        params = SamplingParams(
            temperature=0.8 * (i % 2),
            seed=i,
            max_new_tokens=others if grammar is None else new,
            grammar=grammar,
            ignore_eos=grammar is None,
        )
        made.append(request(f"r{i}", [(3 * j + i) % 12 + 1 for j in range(2 + 5 * i)], params))
    return made


def undrafted(messages: Sequence[GenerateRequest]) -> list[GenerateRequest]:
    return [msgspec.structs.replace(message, speculative=False) for message in messages]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@contextmanager
def without_drafter(tokenizer: str, **flags: Any) -> Iterator[Engine]:
    flags = {"tokenizer_path": tokenizer, "disable_cuda_graph": True, **flags}
    with device_core(KvModel(VOCAB), bigram_config(VOCAB), **flags) as made:
        yield made


def drive_counted(made: Engine, messages: Sequence[GenerateRequest]) -> Seen:
    assembly, worker = made
    waited, waits = 0, worker._runner.waits

    def counted(plan: StepPlan) -> bool:
        nonlocal waited
        found = waits(plan)
        waited += found
        return found

    worker._runner.waits = counted  # type: ignore[method-assign]
    outputs = drive(assembly.core, messages)
    counters, cache = assembly.core.scheduler.counters, assembly.core.scheduler.cache
    assert cache.available == cache.total
    return Seen(
        {rid: tokens_of(some) for rid, some in outputs.items()},
        counters.steps,
        counters.forced_drafts,
        counters.spec_accepted_tokens,
        waited,
    )


def run(tokenizer: str, messages: Sequence[GenerateRequest], **flags: Any) -> Seen:
    with without_drafter(tokenizer, **flags) as made:
        return drive_counted(made, messages)


TEXTS = (LONG, LOOP, FREE, None)


@pytest.fixture(scope="module")
def plain(tokenizer: str) -> Seen:
    """Decoded without any drafts."""
    seen = run(tokenizer, undrafted(requests(*TEXTS)))
    assert seen.forced == seen.accepted == seen.waited == 0
    return seen


@pytest.mark.parametrize(
    "flags",
    [{}, {"disable_overlap_schedule": True}, {"page_size": 1, "chunked_prefill_size": 7}],
    ids=lambda flags: ",".join(flags) or "default",
)
def test_without_a_drafter_only_the_steps_change(
    tokenizer: str, plain: Seen, flags: dict[str, Any]
) -> None:
    seen = run(tokenizer, requests(*TEXTS), **flags)
    assert seen.tokens == plain.tokens
    assert seen.forced == seen.accepted > 20  # all of them hold, and there are no others
    assert seen.steps < plain.steps - 10
    assert (seen.waited > 0) != ("disable_overlap_schedule" in flags)


@pytest.mark.parametrize("wait", [False, True], ids=["never", "always"])
def test_whether_a_step_waits_changes_no_token(
    tokenizer: str, plain: Seen, wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is drafted ahead of a result holds as well; a wait saves a step of each run."""
    monkeypatch.setattr(ForcedAhead, "worth_a_wait", lambda *_: wait)
    seen = run(tokenizer, requests(*TEXTS))
    assert seen.tokens == plain.tokens
    assert seen.forced == seen.accepted > 20
    other = run(tokenizer, requests(*TEXTS), disable_overlap_schedule=True)
    assert other.tokens == plain.tokens
    if wait:
        assert seen.forced == other.forced
    else:
        assert seen.waited == 0
        assert seen.forced < other.forced


def test_alone_it_waits_where_runs_begin_and_not_in_free_text(tokenizer: str) -> None:
    often = run(tokenizer, requests(LOOP))
    seldom = run(tokenizer, requests("[a-l]{40}", new=45))
    assert often.waited > often.steps / 2
    assert 0 < seldom.waited < 16
    assert seldom.forced == 0


def test_a_row_without_a_grammar_never_waits(tokenizer: str) -> None:
    seen = run(tokenizer, requests(LOOP, LOOP, None, others=60))
    assert seen.forced == seen.accepted > 0
    assert seen.waited == 0


@pytest.mark.parametrize("new", [5, 6, 7, 8, 17, 18])
def test_a_limit_inside_a_run_cuts_it(tokenizer: str, plain: Seen, new: int) -> None:
    seen = run(tokenizer, requests(LONG, LOOP, new=new))
    assert seen.tokens == {rid: plain.tokens[rid][:new] for rid in ("r0", "r1")}
    assert seen.accepted > 0


def test_a_stop_token_inside_a_run_ends_it(tokenizer: str, plain: Seen) -> None:
    (message,) = requests(LONG)
    stop = 9  # "i"
    params = msgspec.structs.replace(message.params, stop_token_ids=(stop,))
    seen = run(tokenizer, [msgspec.structs.replace(message, params=params)])
    tokens = plain.tokens["r0"]
    assert seen.tokens["r0"] == tokens[: tokens.index(stop) + 1]


def test_retracted_requests_go_on(
    tokenizer: str, plain: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 1)
    with without_drafter(tokenizer, page_size=1, pool_tokens=80) as made:
        seen = drive_counted(made, requests(*TEXTS))
        assert made[0].core.scheduler.counters.retractions > 0
    assert seen.tokens == plain.tokens
    assert seen.forced > 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_steps_in_graphs_draft_too(
    tokenizer: str, plain: Seen, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those without forced drafts, and those without grammars, have graphs of one token a row."""
    monkeypatch.setattr(gpu_worker, "StepGraphs", EagerGraphs)
    flags = {"disable_cuda_graph": False, "page_size": page_size}
    with without_drafter(tokenizer, **flags) as made:
        assert {tier.width for tier in made[1]._runner._tiers.all()} == {1}
        seen = drive_counted(made, requests(*TEXTS, others=60))
        counts, tiers = made[1].counts, made[1]._runner._replayed
    assert {rid: tokens[:12] if rid == "r3" else tokens for rid, tokens in seen.tokens.items()} == (
        plain.tokens
    )
    assert counts.replays == counts.decode_steps > 5
    assert {(tier.masked, tier.width) for tier in tiers} == {(False, 1), (True, 1), (True, 12)}


class Folders(NamedTuple):
    models: Models
    block_target: Path
    tokenizer: str


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: str) -> Folders:
    block = tmp_path_factory.mktemp("block")
    return Folders(write_models(tmp_path_factory.mktemp("drafts")), write_target(block), tokenizer)


def started(folders: Folders, algorithm: Any, shape: SpecShape, **flags: Any) -> Callable[[], Any]:
    """What starts an engine on the GPU's kernels."""
    flags["tokenizer_path"] = folders.tokenizer
    if algorithm in ("DFLASH", "DSPARK"):
        return partial(block_started, folders.block_target, algorithm.lower(), **flags)
    return partial(draft_started, folders.models, algorithm, shape, **flags)


def undrafted_on_a_cpu(folders: Folders, block: bool, texts: Sequence[str]) -> Tokens:
    flags: dict[str, Any] = {"tokenizer_path": folders.tokenizer}
    with ExitStack() as stack:
        if block:
            core = stack.enter_context(block_core(folders.block_target, None, **flags)).core
        else:
            core = stack.enter_context(draft_core(folders.models, None, **flags)).core
        outputs = drive(core, undrafted(requests(*texts)))
    return {rid: tokens_of(some) for rid, some in outputs.items()}


def on_a_gpu(*case: object) -> object:
    """A case that takes the interpreter long and adds little to the others."""
    return pytest.param(*case, marks=pytest.mark.gpu)


SHORT = ("(a(bcdl|ef)ghi){2}", "abcdabcdefg(ab|ghij)lk[ab]")
WINDOW = {"speculative_draft_window_size": 8}


@pytest.mark.parametrize(
    ("algorithm", "shape", "flags"),
    [
        ("EAGLE3", CHAIN, {}),
        on_a_gpu("EAGLE3", TREE, {}),
        ("EAGLE", TREE, {"disable_overlap_schedule": True}),
        on_a_gpu("EAGLE", CHAIN, {"speculative_length_policy": "auto"}),
        on_a_gpu("STANDALONE", CHAIN, {}),
        on_a_gpu("STANDALONE", TREE, {"page_size": 1}),
        ("DFLASH", CHAIN, {}),
        on_a_gpu("DFLASH", CHAIN, {"window": 8, "page_size": 1}),
        on_a_gpu("DSPARK", CHAIN, {"window": 8}),
    ],
)
def test_drafters_of_the_device_leave_rows_to_what_is_forced(
    folders: Folders, algorithm: str, shape: SpecShape, flags: dict[str, Any]
) -> None:
    wanted = undrafted_on_a_cpu(folders, algorithm in ("DFLASH", "DSPARK"), SHORT)
    with started(folders, algorithm, shape, **flags)() as made:
        seen = drive_counted(made, requests(*SHORT))
    assert seen.tokens == wanted
    assert seen.accepted >= seen.forced > 5
    assert (seen.waited > 0) != ("disable_overlap_schedule" in flags)


@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [
        ("EAGLE3", CHAIN),
        on_a_gpu("EAGLE3", TREE),
        on_a_gpu("EAGLE", CHAIN),
        on_a_gpu("EAGLE", TREE),
        on_a_gpu("STANDALONE", CHAIN),
        on_a_gpu("STANDALONE", TREE),
    ],
)
def test_draft_kv_is_that_of_a_fresh_prefill(
    folders: Folders, algorithm: Any, shape: SpecShape
) -> None:
    """After each step, of all that decode, whoever drafted what it accepted."""
    flags: dict[str, Any] = {"disable_overlap_schedule": True, "disable_radix_cache": True}
    held, cpu_flags = 0, {"tokenizer_path": folders.tokenizer}
    with (
        draft_core(folders.models, algorithm, shape, **cpu_flags) as fresh,
        started(folders, algorithm, shape, **flags)() as (assembly, worker),
    ):
        core, state, draft = assembly.core, worker._step.state, worker._draft
        assert draft is not None
        for message in requests(*SHORT):
            assert core.submit(message) is None
        while core.has_work:
            core.step()
            for running in core.scheduler.batch.running:
                text = running.request.tokens().tolist()
                length = int(state.seq_lens[running.slot])
                if length != len(text) - 1 or length == 0:
                    continue  # it still prefills
                index, size = torch.arange(length), draft.kv.page_size
                pages = state.page_table[running.slot].cpu()[index // size].long()
                kv = draft.kv.data.cpu()[:, :, pages * size + index % size]
                assert torch.allclose(kv, FreshDraft(fresh, text).kv, atol=1e-4)
                held += 1
        assert core.scheduler.counters.forced_drafts > 5
    assert held > 5


def test_all_rows_of_a_step_share_what_may_be_forced(tokenizer: str) -> None:
    """Eleven drafts for one running request, twice as many as requests for more."""
    with without_drafter(tokenizer, max_running_requests=8) as (assembly, worker):
        core, most = assembly.core, list[int]()
        collect = worker.collect

        def counted() -> Any:
            result = collect()
            if result.forced:
                most.append(int(i32(result.forced).sum()))
            return result

        worker.collect = counted  # type: ignore[method-assign]
        messages = requests(*(LONG,) * 7)
        tokens = {rid: tokens_of(some) for rid, some in drive(core, messages).items()}
        assert core.config.forced_drafts == max(most) == 16
    assert tokens == run(tokenizer, undrafted(messages)).tokens


def test_whether_steps_wait_is_the_same_again(tokenizer: str) -> None:
    """A second worker that gets the same plans in the same order forces the same drafts."""
    frames: list[Frame] = []
    trace = TraceWriter(frames.append)
    with without_drafter(tokenizer, trace=trace) as made:
        seen = drive_counted(made, requests(*TEXTS))
        assert made[0].core.stats(0).wait_for_drafts > 0.0
    assert seen.waited > 0
    again = 0
    with without_drafter(tokenizer) as (_, worker):
        for frame in frames:
            if isinstance(frame, StepPlan):
                worker.launch(frame)
            elif isinstance(frame, StepResult):
                result = worker.collect()
                assert (result.tokens, result.forced) == (frame.tokens, frame.forced)
                assert result.proposed == frame.proposed
                again += 1
    assert again == seen.steps


@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [
        ("EAGLE3", {"speculative_use_rejection_sampling": True}),
        on_a_gpu("DSPARK", {"speculative_ragged_verify_mode": "compact"}),
        on_a_gpu("DSPARK", {"speculative_ragged_verify_mode": "cap-accept"}),
    ],
)
def test_drafts_that_are_drawn_or_planned_by_confidence_stay(
    folders: Folders, algorithm: str, flags: dict[str, Any]
) -> None:
    messages = requests(*SHORT)
    if algorithm == "EAGLE3":
        sampled = msgspec.structs.replace(messages[1].params, temperature=1.2)
        messages = [msgspec.structs.replace(m, params=sampled) for m in messages]
    with started(folders, algorithm, CHAIN, **flags)() as made:
        seen = drive_counted(made, messages)
    assert seen.forced == seen.waited == 0
    assert seen.accepted > 0
    letters = Tokenizer.from_file(f"{folders.tokenizer}/tokenizer.json")
    for message in messages:
        *tokens, last = seen.tokens[message.rid]
        assert last == 0
        grammar = message.params.grammar
        assert grammar is not None
        assert re.fullmatch(grammar.text, letters.decode(tokens))
