"""Custom logits processors on the GPU's steps: between segments F and A, once results are in."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from outrider.engine.gpu import worker as gpu_worker
from outrider.engine.gpu.worker import GpuWorker
from outrider.engine.sampling import slot_processors
from outrider.engine.sampling.slot_processors import SlotProcessors
from outrider.engine_core import admission
from outrider.engine_core.assembly import Assembly
from outrider.engine_core.core import EngineCore
from outrider.engine_core.draft_config import DraftAlgorithm, SpecShape
from outrider.engine_core.grammar_spec import GrammarSpec
from outrider.engine_core.ids import i32
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.model_path import resolve_model
from outrider.engine_core.sampling_params import SamplingParams

from ..block_cores import write_target
from ..cores import drive, request, running_engine, tiny_config, tokens_of
from ..draft_cores import CHAIN, TREE, Models, draft_core, write_models
from ..processor_package import example_processors
from ..tiny import bigram_config
from . import test_gpu_block_steps as blocks
from . import test_gpu_draft_steps as drafts
from .device_cores import KvModel, device_core
from .eager_graphs import EagerGraphs

VOCAB = 19
PROCESSORS: dict[str, Any] = {"logits_processors": "two_back,count,misbehave"}
NGRAM: dict[str, Any] = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 5}
Calls = dict[str, dict[str, object]]
Tokens = dict[str, list[int]]


@pytest.fixture(scope="module", autouse=True)
def package() -> Iterator[None]:
    with example_processors():
        yield


def requests() -> list[GenerateRequest]:
    """Greedy and sampled; one with other edits, one with logprobs, two without the processor."""
    made = []
    for i in range(6):
        prompt = [(3 * j + i) % VOCAB for j in range(3 + 3 * i)]
        params = SamplingParams(
            temperature=(0.0, 0.9)[i % 2],
            seed=i,
            max_new_tokens=9,
            ignore_eos=True,
            logits_processors={"two_back": {"back": 1 + i % 4}} if i % 3 else {},
            repetition_penalty=1.2 if i == 4 else 1.0,
            bad_words_ids=((3, 4), (7,)) if i == 4 else (),
            logprobs=2 if i == 5 else None,
        )
        made.append(request(f"r{i}", prompt, params))
    return made


@contextmanager
def core(vocab: int = VOCAB, **flags: Any) -> Iterator[tuple[Assembly, GpuWorker]]:
    flags = {"disable_cuda_graph": True, **PROCESSORS, **flags}
    with device_core(KvModel(vocab), bigram_config(vocab), **flags) as made:
        yield made


def tokens_by_rid(made: EngineCore, messages: Sequence[GenerateRequest]) -> Tokens:
    return {rid: tokens_of(parts) for rid, parts in drive(made, messages).items()}


def run(**flags: Any) -> Tokens:
    with core(**flags) as (assembly, _):
        tokens = tokens_by_rid(assembly.core, requests())
        if "speculative_algorithm" in flags:
            assert assembly.core.stats(0).spec_accepted_tokens > 0
    return tokens


@pytest.fixture(scope="module")
def plain() -> Tokens:
    """Without overlap, one request at a time; what is ruled out does not occur."""
    tokens = run(max_running_requests=1, disable_overlap_schedule=True)
    for message in requests():
        call = message.params.logits_processors.get("two_back")
        if call is not None:
            text = [*i32(message.prompt).tolist(), *tokens[message.rid]]
            back, begin = int(str(call["back"])), len(message.prompt) // 4
            assert all(text[at] != text[at - back] for at in range(max(begin, back), len(text)))
    return tokens


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {**NGRAM},
        {**NGRAM, "disable_overlap_schedule": True, "chunked_prefill_size": 9},
        {**NGRAM, "speculative_ngram_source": "both", "page_size": 1},
    ],
    ids=lambda flags: ",".join(flags) or "default",
)
def test_every_mode_gives_the_same_tokens(plain: Tokens, flags: dict[str, Any]) -> None:
    assert run(**flags) == plain


def test_steps_in_graphs_do_too(plain: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments D, F and A as graphs of their own, eager ones for a model that reads its batch."""
    monkeypatch.setattr(gpu_worker, "StepGraphs", EagerGraphs)
    flags = {"disable_cuda_graph": False, "chunked_prefill_size": 16, **NGRAM}
    with core(**flags) as (assembly, worker):
        tokens = tokens_by_rid(assembly.core, requests()[:5])
        counts = worker.counts
    assert tokens == {rid: plain[rid] for rid in tokens}
    assert counts.replays == counts.decode_steps > 3
    assert counts.prefill_replays > 0


def counted() -> list[int]:
    """What NGRAM's drafts, learnt from the prompt, are when a processor counts on."""
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, logits_processors={"count": {}})
    with core(**NGRAM) as (assembly, _):
        prompt = [token % VOCAB for token in range(40)]
        (tokens,) = tokens_by_rid(assembly.core, [request("r", prompt, params)]).values()
        assert assembly.core.stats(0).spec_accepted_tokens > 2
    return tokens


def test_what_processors_leave_is_accepted_as_drafted() -> None:
    assert counted() == [token % VOCAB for token in range(40, 52)]


def test_a_history_without_the_drafts_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    true_paths = slot_processors._paths

    def blind(*arguments: Any) -> dict[int, tuple[int, ...]]:
        return dict.fromkeys(true_paths(*arguments), ())

    monkeypatch.setattr(slot_processors, "_paths", blind)
    with pytest.raises(AssertionError):
        assert counted() == [token % VOCAB for token in range(40, 52)]


def test_retracted_requests_go_on_with_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 1)
    params = SamplingParams(
        temperature=0.0, max_new_tokens=14, ignore_eos=True,
        logits_processors={"two_back": {"back": 3}},
    )  # fmt: skip
    messages = [request(f"r{i}", [i, 7, 9], params) for i in range(4)]
    found: list[Tokens] = []
    for pool in (640, 30):
        with core(page_size=1, pool_tokens=pool) as (assembly, _):
            found.append(tokens_by_rid(assembly.core, messages))
            assert (assembly.core.scheduler.counters.retractions > 0) == (pool == 30)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "failed: KeyError: "),
        ("nan", "NaN or +inf"),
        ("nothing", "left no token"),
    ],
)
def test_only_the_request_that_a_processor_fails_on_ends(
    plain: Tokens, how: str, reason: str
) -> None:
    bad: Calls = {"misbehave": {"how": how}}
    params = SamplingParams(temperature=0.0, max_new_tokens=9, logits_processors=bad)
    with core(**NGRAM, max_running_requests=8) as (assembly, _):
        outputs = drive(assembly.core, [request("bad", [1, 2, 3], params), *requests()[:3]])
    finish = outputs.pop("bad")[-1].finish
    assert finish is not None
    assert finish.kind == "abort"
    assert (finish.message or "").startswith("logits_processors.misbehave: the processor ")
    assert reason in (finish.message or "")
    assert {rid: tokens_of(parts) for rid, parts in outputs.items()} == {
        rid: plain[rid] for rid in outputs
    }


def test_beside_grammars_and_under_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks of a step with a grammar are not there in a later one without."""
    monkeypatch.setattr(gpu_worker, "StepGraphs", EagerGraphs)
    folder, vocab = resolve_model("pycoder"), 8192
    spec = GrammarSpec("regex", "[a-d]{2}(ab){1,2}")  # at most six tokens and the end
    calls: Calls = {"two_back": {"back": 1}}
    plain = SamplingParams(temperature=0.0, max_new_tokens=8)
    messages = [
        request("grammar", [5, 6, 7], replace(plain, grammar=spec)),
        request("both", [5, 6, 8], replace(plain, grammar=spec, logits_processors=calls)),
        request("processor", [5, 6, 9], replace(plain, ignore_eos=True, logits_processors=calls)),
    ]
    flags: dict[str, Any] = {"tokenizer_path": str(folder), "disable_cuda_graph": False}
    alone: Tokens = {}
    with core(vocab, **{**flags, "disable_cuda_graph": True}) as (assembly, _):
        for message in messages:
            alone |= tokens_by_rid(assembly.core, [message])
    dead = replace(plain, grammar=spec, logits_processors={"count": {}})
    with core(vocab, **NGRAM, **flags) as (assembly, _):
        outputs = drive(assembly.core, [*messages, request("dead", [5, 6, 7], dead)])
    finish = outputs.pop("dead")[-1].finish
    assert finish is not None
    assert (finish.kind, finish.status) == ("abort", 400)
    assert (finish.message or "").startswith("logits_processors.count: ")
    assert {rid: tokens_of(parts) for rid, parts in outputs.items()} == alone
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert len(alone["processor"]) == 8
    assert not set(tokenizer.decode(alone["both"][:-1])) - set("abcd")
    assert alone["both"][-1] == 0


def test_steps_without_them_do_not_know_of_them(
    plain: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("asked about rows that use none")

    monkeypatch.setattr(SlotProcessors, "work", never)
    bare = [message for message in requests() if not message.params.logits_processors]
    with core(**NGRAM) as (assembly, worker):
        tokens = tokens_by_rid(assembly.core, bare)
        assert worker._runner._later is None
    assert tokens == {rid: plain[rid] for rid in tokens}


# --- drafters on the device -----------------------------------------------------------------------


def with_processor(messages: Sequence[GenerateRequest]) -> list[GenerateRequest]:
    calls: Calls = {"two_back": {"strength": 3.0}}
    return [
        replace(message, params=replace(message.params, logits_processors=calls))
        for message in messages
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return write_models(tmp_path_factory.mktemp("drafts"))


def on_the_cpu(models: Models, algorithm: DraftAlgorithm | None, **flags: object) -> Tokens:
    with draft_core(models, algorithm, CHAIN, **PROCESSORS, **flags) as made:
        return tokens_by_rid(made.core, with_processor(drafts.requests()))


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        pytest.param(CHAIN, {}, marks=pytest.mark.gpu),
        (TREE, {}),
        (CHAIN, {"speculative_use_rejection_sampling": True}),
    ],
    ids=["chain", "tree", "rejection"],
)
def test_drafts_of_a_model_give_the_tokens_of_the_cpu(
    models: Models, shape: SpecShape, rule: dict[str, Any]
) -> None:
    """Plain decoding's, but where the rule draws otherwise: there those of the same drafter."""
    wanted = on_the_cpu(models, "EAGLE3" if rule else None, **rule)
    with drafts.started(models, "EAGLE3", shape, **PROCESSORS, **rule) as (assembly, _):
        tokens = tokens_by_rid(assembly.core, with_processor(drafts.requests()))
        assert assembly.core.stats(0).spec_accepted_tokens > 0
    assert tokens == wanted


@pytest.mark.parametrize("mode", [pytest.param("static", marks=pytest.mark.gpu), "compact"])
def test_block_drafts_give_them_too(tmp_path: Path, mode: str) -> None:
    target = write_target(tmp_path / "target")
    messages = with_processor(blocks.requests())
    with draft_core(Models(target, {}), None, CHAIN, **PROCESSORS) as made:
        wanted = tokens_by_rid(made.core, messages)
    more = {**PROCESSORS, "speculative_ragged_verify_mode": mode}
    with blocks.started(target, "dspark", **more) as (assembly, _):
        assert tokens_by_rid(assembly.core, messages) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", [None, "NGRAM", "EAGLE3", "DSPARK"])
def test_the_embedded_model_in_graphs(algorithm: str | None) -> None:
    def tokens(device: str, algorithm: str | None) -> Tokens:
        config = tiny_config(
            Path("pycoder"), algorithm, device=device, dtype="float32", **PROCESSORS
        )
        with running_engine(config) as engine:
            return tokens_by_rid(engine.core, requests())

    assert tokens("cuda", algorithm) == tokens("cpu", None)
