"""Custom logits processors on a CPU: at every node, with every drafter, by every rule."""

import random
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tokenizers import Tokenizer

from outrider.engine.build import build_worker
from outrider.engine.sampling import slot_processors
from outrider.engine.sampling.slot_processors import SlotProcessors
from outrider.engine_core import admission
from outrider.engine_core.config import resolve_config
from outrider.engine_core.core import EngineCore
from outrider.engine_core.draft_config import DraftAlgorithm, SpecShape
from outrider.engine_core.grammar_spec import GrammarSpec
from outrider.engine_core.ids import i32
from outrider.engine_core.messages import GenerateRequest, RequestOutput
from outrider.engine_core.model_path import resolve_model
from outrider.engine_core.processor_loader import ProcessorSet, processors_of
from outrider.engine_core.refusal import Refused
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.trace import TRACE_VARIABLE

from .block_cores import block_core
from .cores import (
    assert_replays,
    drive,
    finish_all_but,
    random_draft_core,
    request,
    running_engine,
    submit,
    tiny_config,
    tokens_of,
)
from .draft_cores import CHAIN, TREE, VOCAB, Models, draft_core, write_models
from .drafted_law import PROCESSED, drawn
from .driver import bigram_driver
from .joint_law import LEAST_P
from .processor_package import example_processors
from .test_processors import EOS, Request, make_table, random_params
from .test_processors import VOCAB as REFERENCE_VOCAB

PROCESSORS = {"logits_processors": "two_back,misbehave"}
Tokens = dict[str, list[int]]


@pytest.fixture(scope="module", autouse=True)
def package() -> Iterator[None]:
    with example_processors():
        yield


@pytest.fixture
def examples() -> ModuleType:
    """The package's module, with its counters at 0."""
    loaded()
    module = sys.modules["example_processors"]
    module.Misbehave.calls = module.Misbehave.most = 0
    return module


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return write_models(tmp_path_factory.mktemp("processors"))


def loaded() -> ProcessorSet:
    worker = build_worker(tiny_config(Path("pycoder")))
    resolved = resolve_config(tiny_config(Path("pycoder"), **PROCESSORS), worker.info())
    worker.shutdown()
    assert not isinstance(resolved, Refused)
    found = processors_of(resolved)
    assert found is not None
    return found


# --- every node, against the scalar reference -----------------------------------------------------


def until_the_end(run: list[int]) -> list[int]:
    """Nobody asks for what follows a token that ends the text."""
    ends = [place for place, token in enumerate(run) if token in EOS]
    return run[: ends[0] + 1] if ends else run


def walk_random_trees(seed: int) -> int:
    """Random trees behind random texts, mixed with rows that use no processor; the longest run.

    Raises AssertionError where a token is not the reference's.
    """
    rng = random.Random(seed)
    table = make_table(seed)
    driver = bigram_driver(table)
    driver.runner.process_with(loaded())
    requests: dict[int, Request] = {}
    for slot in range(8):
        params = random_params(rng)
        if slot % 4 < 3:
            strength = rng.choice([1.5, 4.0, 90.0])
            call: dict[str, dict[str, object]] = {"two_back": {"strength": strength}}
            params = replace(params, logits_processors=call)
        prompt = [rng.randrange(REFERENCE_VOCAB) for _ in range(rng.randint(1, 9))]
        request = Request(table, params, prompt, rng.getrandbits(64) - 2**63)
        request.output = [rng.randrange(REFERENCE_VOCAB) for _ in range(rng.choice([0, 0, 3]))]
        before, expected = request.output, request.target([])
        assert driver.enter(slot, prompt, params, request.seed, EOS, before) == expected
        request.output = [*before, expected]
        requests[slot] = request
    longest = 0
    for _ in range(14):
        slots = rng.sample(sorted(requests), rng.randint(1, len(requests)))
        drafts = {slot: requests[slot].draft(rng) for slot in slots}
        emitted, result = driver.verify(drafts)
        assert not result.errors
        for slot in slots:
            expected_run = until_the_end(requests[slot].accepted(drafts[slot]))
            assert emitted[slot][: len(expected_run)] == expected_run
            longest = max(longest, len(expected_run))
            requests[slot].output = requests[slot].output + emitted[slot]
            if expected_run[-1] in EOS and len(requests) > 1:
                del requests[slot]
    return longest


@pytest.mark.parametrize("seed", range(6))
def test_every_position_of_every_row_matches_the_reference(seed: int) -> None:
    assert walk_random_trees(seed) >= 3


def test_a_history_without_the_drafts_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    true_paths = slot_processors._paths

    def blind(*arguments: Any) -> dict[int, tuple[int, ...]]:
        return dict.fromkeys(true_paths(*arguments), ())

    monkeypatch.setattr(slot_processors, "_paths", blind)
    with pytest.raises(AssertionError):
        walk_random_trees(0)


def test_a_history_that_misses_what_was_emitted_would_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SlotProcessors, "advance", lambda *arguments: None)
    with pytest.raises(AssertionError):
        walk_random_trees(0)


# --- whole cores ----------------------------------------------------------------------------------


def requests(count: int = 12) -> list[GenerateRequest]:
    """Greedy and seeded ones, two thirds with the processor, one of these with others beside it."""
    made = []
    for i in range(count):
        prompt = [(3 * j * j + i % 7 * 5 + j) % VOCAB for j in range(1 + 4 * i)]
        calls: dict[str, dict[str, object]] = {}
        if i % 3:
            calls = {"two_back": {"back": 1 + i % 4}}
        params = SamplingParams(
            temperature=(0.0, 0.8)[i % 2],
            seed=i,
            max_new_tokens=30 + i,
            ignore_eos=i % 3 > 0,
            logits_processors=calls,
            frequency_penalty=0.4 if i == 4 else 0.0,
            bad_words_ids=((3, 4), (7,)) if i == 5 else (),
            logprobs=2 if i == 7 else None,
        )
        made.append(request(f"r{i}", prompt, params))
    return made


def check_texts(tokens: Tokens) -> None:
    """No token repeats the one that the request rules out."""
    for message in requests():
        call = message.params.logits_processors.get("two_back")
        if call is None:
            continue
        text = [*i32(message.prompt).tolist(), *tokens[message.rid]]
        back, begin = int(str(call["back"])), len(message.prompt) // 4
        ends = range(max(begin, back), len(text))
        assert all(text[at] != text[at - back] for at in ends), message.rid


def run(core: EngineCore, messages: Sequence[GenerateRequest]) -> Tokens:
    outputs = drive(core, messages)
    return {rid: tokens_of(parts) for rid, parts in outputs.items()}


def ngram_core(models: Models, **flags: object) -> AbstractContextManager[EngineCore]:
    """Random trees, in place of NGRAM's own."""
    return random_draft_core(tiny_config(models.target, "NGRAM", **PROCESSORS, **flags), tree=True)


@pytest.fixture(scope="module")
def plain(models: Models) -> Tokens:
    """One request at a time, without overlap."""
    flags = {"max_running_requests": 1, "disable_overlap_schedule": True}
    with draft_core(models, None, CHAIN, **PROCESSORS, **flags) as made:
        tokens = run(made.core, requests())
        unprocessed = [
            replace(message, params=replace(message.params, logits_processors={}))
            for message in requests()
        ]
        without = run(made.core, unprocessed)
    check_texts(tokens)
    differ = [rid for rid in tokens if tokens[rid] != without[rid]]
    assert {f"r{i}" for i in range(0, 12, 3)}.isdisjoint(differ)
    assert len(differ) >= 6
    return tokens


MODES: list[dict[str, object]] = [
    {},
    {"disable_overlap_schedule": True, "page_size": 1, "chunked_prefill_size": 5},
    {"max_running_requests": 3, "disable_radix_cache": True},
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: ",".join(mode) or "default")
@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [
        (None, CHAIN),
        ("STANDALONE", CHAIN),
        ("EAGLE", TREE),
        ("EAGLE3", CHAIN),
        ("EAGLE3", TREE),
    ],
    ids=["none", "STANDALONE", "EAGLE-tree", "EAGLE3", "EAGLE3-tree"],
)
def test_every_drafter_gives_the_tokens_of_plain_decoding(
    models: Models,
    plain: Tokens,
    algorithm: DraftAlgorithm | None,
    shape: SpecShape,
    mode: dict[str, object],
) -> None:
    with draft_core(models, algorithm, shape, **PROCESSORS, **mode) as made:
        assert run(made.core, requests()) == plain
        accepted = made.core.stats(0).spec_accepted_tokens
    assert (accepted > 8) == (algorithm is not None)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: ",".join(mode) or "default")
@pytest.mark.parametrize("source", ["random", "ngram"])
def test_drafts_of_the_host_do_too(
    models: Models, plain: Tokens, source: str, mode: dict[str, object]
) -> None:
    if source == "random":
        with ngram_core(models, **mode) as core:
            assert run(core, requests()) == plain
            accepted = core.stats(0).spec_accepted_tokens
    else:
        config = tiny_config(models.target, "NGRAM", **PROCESSORS, **mode)
        with running_engine(config) as engine:
            assert run(engine.core, requests()) == plain
            accepted = engine.core.stats(0).spec_accepted_tokens
    assert accepted > 5


@pytest.mark.parametrize("name", ["dflash", "dspark", "random-dspark"])
def test_block_drafts_do_too(models: Models, plain: Tokens, name: str) -> None:
    with block_core(models.target, name, **PROCESSORS) as made:
        assert run(made.core, requests()) == plain
        assert made.core.stats(0).spec_accepted_tokens > 5


@pytest.mark.parametrize("mode", ["compact", "cap-accept"])
def test_rows_that_are_cut_to_verify_lengths_do_too(
    models: Models, plain: Tokens, mode: str
) -> None:
    flags = {"speculative_ragged_verify_mode": mode, **PROCESSORS}
    with block_core(models.target, "dspark", **flags) as made:
        assert run(made.core, requests()) == plain


@pytest.mark.parametrize("algorithm", [None, "NGRAM", "EAGLE3"])
def test_retractions_and_aborts_change_nothing(
    models: Models, plain: Tokens, algorithm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 1)
    flags = {"page_size": 1, "max_total_tokens": 110, **PROCESSORS}
    if algorithm == "NGRAM":
        with running_engine(tiny_config(models.target, "NGRAM", **flags)) as engine:
            submit(engine.core, requests())
            got = finish_all_but(engine.core, "r1")
    else:
        with draft_core(models, algorithm, CHAIN, **flags) as made:
            submit(made.core, requests())
            got = finish_all_but(made.core, "r1")
    assert got.pop("r1") != plain["r1"]
    assert got == {rid: tokens for rid, tokens in plain.items() if rid != "r1"}


def test_traces_replay(
    models: Models, plain: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace"
    monkeypatch.setenv(TRACE_VARIABLE, str(path))
    with running_engine(tiny_config(models.target, "NGRAM", **PROCESSORS)) as engine:
        assert run(engine.core, requests()) == plain
    monkeypatch.delenv(TRACE_VARIABLE)
    assert_replays(path)


# --- every rule -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "shape", "rule"),
    [
        ("EAGLE3", TREE, {}),
        ("EAGLE3", CHAIN, {"speculative_use_rejection_sampling": True}),
        ("STANDALONE", CHAIN, {"speculative_use_block_verification": True}),
        ("EAGLE", TREE, {"speculative_accept_threshold_acc": 1 - 1e-9}),
    ],
    ids=["coupled", "rejection", "block", "thresholds"],
)
def test_outputs_follow_the_targets_processed_law(
    tmp_path_factory: pytest.TempPathFactory,
    algorithm: DraftAlgorithm,
    shape: SpecShape,
    rule: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OUTRIDER_CHECK", "0")
    place = tmp_path_factory.mktemp("law")
    found = drawn(place, algorithm, 6, 4, PROCESSED, shape, **PROCESSORS, **rule)
    assert found.p > LEAST_P


def test_log_probabilities_are_of_the_raw_distribution(models: Models) -> None:
    """A processor that rules out what the model likes best changes tokens, not their values."""
    params = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True, logprobs=VOCAB)
    calls: dict[str, dict[str, object]] = {"misbehave": {"how": "prefer", "token": 9}}
    with draft_core(models, None, CHAIN, **PROCESSORS) as made:
        raw, processed = (
            drive(made.core, [request("r", [1, 2, 3], one)])["r"][-1].logprobs[0]
            for one in (params, replace(params, logits_processors=calls))
        )
    assert processed.token == 9 != raw.token
    assert (processed.top_ids, processed.top_values) == (raw.top_ids, raw.top_values)


# --- order ----------------------------------------------------------------------------------------


def prefer(token: int, **fields: object) -> SamplingParams:
    """A processor wants this token above all."""
    calls: dict[str, dict[str, object]] = {"misbehave": {"how": "prefer", "token": token}}
    values: dict[str, Any] = {
        "temperature": 0.0, "max_new_tokens": 9, "logits_processors": calls, **fields
    }  # fmt: skip
    return SamplingParams(**values)


@pytest.mark.parametrize("algorithm", [None, "EAGLE3"])
def test_what_was_ruled_out_stays_ruled_out(
    models: Models, algorithm: DraftAlgorithm | None
) -> None:
    with draft_core(models, algorithm, CHAIN, **PROCESSORS) as made:
        found = run(
            made.core,
            [
                request("free", [1, 2], prefer(9)),
                request("word", [1, 2], prefer(9, bad_words_ids=((9, 9),))),
                request("allowed", [1, 2], prefer(9, allowed_token_ids=(3, 4))),
                request("end", [1, 2], prefer(0, min_new_tokens=5)),
                request("penalty", [1, 2], prefer(9, frequency_penalty=2.0, logit_bias={9: -100})),
            ],
        )
    assert found["free"] == found["penalty"] == [9] * 9
    assert 9 in found["word"]
    assert not any(pair == (9, 9) for pair in pairwise(found["word"]))
    assert set(found["allowed"]) <= {3, 4}
    assert found["end"].index(0) == 5


@pytest.mark.parametrize("algorithm", [None, "NGRAM", "DSPARK"])
def test_under_a_grammar_processors_choose_among_what_it_allows(algorithm: str | None) -> None:
    """One that wants what the grammar forbids gets nothing of it, and one that leaves only that
    ends its request."""
    folder = resolve_model("pycoder")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    spec = GrammarSpec("regex", "[a-f]{12}")
    a, b, q = (tokenizer.encode(letter).ids[0] for letter in "abq")
    flags = {"logits_processors": "two_back,count,misbehave"}
    with running_engine(tiny_config(Path("pycoder"), algorithm, **flags)) as engine:
        outputs = drive(
            engine.core,
            [
                request("legal", [a, b], prefer(a, grammar=spec, max_new_tokens=20)),
                request("illegal", [a, b], prefer(q, grammar=spec, max_new_tokens=20)),
                request("repeat", [a, b], replace(prefer(a, grammar=spec, max_new_tokens=20),
                        logits_processors={"two_back": {"back": 1}})),
                request("dead", [a, q], replace(prefer(a, grammar=spec),
                        logits_processors={"count": {}})),
            ],
        )  # fmt: skip
    assert ended(outputs.pop("dead"))[:2] == ("abort", 400)
    tokens = {rid: tokens_of(parts) for rid, parts in outputs.items()}
    assert tokens["legal"] == [a] * 12 + [0]
    for rid in ("illegal", "repeat"):
        assert re.fullmatch(spec.text, tokenizer.decode(tokens[rid][:-1]))
    assert all(one != other for one, other in pairwise(tokens["repeat"]))


# --- faults ---------------------------------------------------------------------------------------


GREEDY: dict[str, float] = {"temperature": 0.0}


def misbehaving(how: str, rid: str = "bad", sampling: dict[str, float] = GREEDY) -> GenerateRequest:
    params = SamplingParams(
        max_new_tokens=12, ignore_eos=True, logits_processors={"misbehave": {"how": how}},
        **sampling,  # type: ignore[arg-type]
    )  # fmt: skip
    return request(rid, [1, 2, 3], params)


def ended(outputs: list[RequestOutput]) -> tuple[str, int | None, str]:
    finish = outputs[-1].finish
    assert finish is not None
    return finish.kind, finish.status, finish.message or ""


HOW = [
    ("raise", 500, "the processor failed: KeyError: 'nothing for "),
    ("exit", 500, "the processor failed: SystemExit: 3"),
    ("nan", 500, "NaN or +inf"),
    ("inf", 500, "NaN or +inf"),
    ("nothing", 400, "left no token"),
    ("return", 500, "it must edit the logits in place"),
]


@pytest.mark.parametrize("algorithm", [None, "EAGLE3"])
@pytest.mark.parametrize(("how", "status", "reason"), HOW)
def test_only_the_request_that_a_processor_fails_on_ends(
    models: Models,
    plain: Tokens,
    algorithm: DraftAlgorithm | None,
    how: str,
    status: int,
    reason: str,
) -> None:
    """Beside others of the same processor, in whose steps it is asked about all at once."""
    good = misbehaving("well", "good")
    with draft_core(models, algorithm, TREE, **PROCESSORS, max_running_requests=32) as made:
        alone = run(made.core, [good])["good"]
        outputs = drive(made.core, [*requests(), misbehaving(how), good])
        cache = made.core.scheduler.cache
        assert cache.available == cache.total
    kind, found, message = ended(outputs.pop("bad"))
    assert (kind, found) == ("abort", status)
    assert message.startswith("logits_processors.misbehave: ")
    assert reason in message
    assert tokens_of(outputs.pop("good")) == alone
    assert {rid: tokens_of(parts) for rid, parts in outputs.items()} == plain


@pytest.mark.parametrize("sampling", [{"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.8}])
@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"speculative_use_rejection_sampling": True},
        {"speculative_use_block_verification": True},
        {"speculative_accept_threshold_acc": 0.5},
    ],
    ids=["coupled", "rejection", "block", "thresholds"],
)
@pytest.mark.parametrize("how", ["raise", "nan", "inf", "nothing"])
def test_rows_that_draw_end_so_too(
    models: Models, how: str, rule: dict[str, Any], sampling: dict[str, float]
) -> None:
    algorithm: DraftAlgorithm = "EAGLE3"
    status, reason = next((status, reason) for name, status, reason in HOW if name == how)
    with draft_core(models, algorithm, CHAIN, **PROCESSORS, **rule) as made:
        good = misbehaving("well", "good", sampling)
        outputs = drive(made.core, [misbehaving(how, sampling=sampling), good])
    kind, found, message = ended(outputs["bad"])
    assert (kind, found) == ("abort", status)
    assert reason in message
    assert ended(outputs["good"])[0] == "length"


@pytest.mark.parametrize("how", ["raise", "nan", "nothing"])
def test_what_goes_wrong_behind_a_draft_is_no_trouble_of_who_does_not_go_there(
    models: Models, how: str, examples: ModuleType
) -> None:
    """Random drafts hold every token, but this text never does."""
    text = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
    with ngram_core(models) as core:
        (without,) = run(core, [request("r", [1, 2, 3], text)]).values()
        absent = next(token for token in range(VOCAB) if token not in without)
        calls: dict[str, dict[str, object]] = {"misbehave": {"how": how, "at": absent}}
        found = drive(core, [request("r", [1, 2, 3], replace(text, logits_processors=calls))])["r"]
    assert tokens_of(found) == without
    assert ended(found)[0] == "length"
    assert examples.Misbehave.calls > 20


def test_a_tokens_end_is_where_nobody_asks_on(models: Models, examples: ModuleType) -> None:
    """A processor that cannot bear the stop token is asked nothing behind it."""
    with ngram_core(models) as core:
        text = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
        (without,) = run(core, [request("r", [1, 2, 3], text)]).values()
        stop = without[10]
        stopping = replace(
            text,
            stop_token_ids=(stop,),
            logits_processors={"misbehave": {"how": "raise", "at": stop}},
        )
        found = drive(core, [request("r", [1, 2, 3], stopping)])["r"]
    assert ended(found)[0] == "stop"


def test_the_example_of_the_page_works(models: Models, tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "logits-processors.md"
    code = page.read_text().partition("```python\n")[2].partition("```")[0]
    (tmp_path / "my_processors.py").write_text(code)
    found = []
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(tmp_path))
        for place in ("my_processors:TwoBack", "example_processors:TwoBack"):
            flags = {"logits_processors": f"two_back={place}"}
            with draft_core(models, "EAGLE3", TREE, **flags) as made:
                params = SamplingParams(
                    temperature=0.0, max_new_tokens=30, ignore_eos=True,
                    logits_processors={"two_back": {"strength": 3}},
                )  # fmt: skip
                found.append(run(made.core, [request("r", [1, 2, 3], params)])["r"])
                assert refusal(made.core, {"two_back": {"far": 1}}).reason.startswith("unknown")
    assert found[0] == found[1]


# --- cost and refusals ----------------------------------------------------------------------------


def test_steps_without_them_do_not_know_of_them(
    models: Models, monkeypatch: pytest.MonkeyPatch, examples: ModuleType
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("asked about rows that use none")

    monkeypatch.setattr(SlotProcessors, "work", never)
    bare = [m for m in requests() if not m.params.logits_processors]
    with draft_core(models, "EAGLE3", CHAIN, **PROCESSORS) as made:
        run(made.core, bare)
    with draft_core(models, "EAGLE3", CHAIN) as made:
        assert made.runner._processors is None
    assert examples.Misbehave.calls == 0


def test_a_processor_is_called_once_a_step_for_all_rows(
    models: Models, examples: ModuleType
) -> None:
    messages = [misbehaving("well", f"r{i}") for i in range(4)]
    with draft_core(models, "EAGLE3", TREE, **PROCESSORS) as made:
        run(made.core, messages)
        steps = made.core.stats(0).steps
    assert examples.Misbehave.calls <= steps
    assert examples.Misbehave.most > 4


def refusal(core: EngineCore, calls: object) -> Refused:
    params = SamplingParams(max_new_tokens=4, logits_processors=calls)  # type: ignore[arg-type]
    found = core.submit(request("r", [5, 6], params))
    assert found is not None
    return found


def test_what_no_processor_takes_is_refused(models: Models) -> None:
    with draft_core(models, None, CHAIN, **PROCESSORS) as made:
        unknown = refusal(made.core, {"three_back": {}})
        assert unknown.field == "logits_processors"
        assert "loaded: two_back, misbehave" in unknown.reason
        wrong = refusal(made.core, {"two_back": {"back": "far"}})
        assert (wrong.field, wrong.status) == ("logits_processors.two_back", 400)
        assert wrong.reason == "back must be 1 to 512, got 'far'"
        assert refusal(made.core, {"misbehave": {"how": "refuse"}}).status == 500
        assert "JSON" in refusal(made.core, {"two_back": {"back": torch.zeros(1)}}).reason
        assert "at most 65536" in refusal(made.core, {"two_back": {"x": "y" * 70_000}}).reason
        assert "at most 16" in refusal(made.core, {f"p{i}": {} for i in range(17)}).reason
    with draft_core(models, None, CHAIN) as made:
        found = refusal(made.core, {"two_back": {}})
        assert "loaded: none" in found.reason
        assert "--logits-processors" in found.reason


def test_arguments_that_a_processor_takes_once_and_no_more_end_the_request(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    true_request = ProcessorSet.request

    def moody(self: ProcessorSet, name: str, arguments: dict[str, object]) -> object:
        asked.append(name)
        if len(asked) > 1:
            return Refused("logits_processors.two_back", "not any more")
        return true_request(self, name, arguments)

    monkeypatch.setattr(ProcessorSet, "request", moody)
    params = SamplingParams(temperature=0.0, max_new_tokens=4, logits_processors={"two_back": {}})
    with draft_core(models, None, CHAIN, **PROCESSORS) as made:
        found = drive(made.core, [request("r", [1, 2], params)])["r"]
    assert ended(found) == ("abort", 400, "logits_processors.two_back: not any more")
