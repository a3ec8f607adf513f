"""Grammars through whole cores on a CPU: what they allow, at every position, with every drafter."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from outrider.engine.build import build_worker
from outrider.engine.sampling.nodes import Nodes
from outrider.engine.sampling.processors import apply_masks
from outrider.engine.sampling.slot_grammars import NodeMasks
from outrider.engine_core import admission
from outrider.engine_core.config import resolve_config
from outrider.engine_core.core import EngineCore
from outrider.engine_core.grammar_compiler import (
    GrammarCompiler,
    compiler_of,
    refuse_grammar,
)
from outrider.engine_core.grammar_spec import GrammarSpec
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.model_path import resolve_model
from outrider.engine_core.refusal import Refused
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.trace import TRACE_VARIABLE
from outrider.kernels.logit_edits import MASKED

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

PYCODER = Path("pycoder")
TOKENIZER = Tokenizer.from_file(str(resolve_model("pycoder") / "tokenizer.json"))
EOS = 0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "language": {"enum": ["python", "rust", "go"]},
    },
    "required": ["name", "age", "language"],
    "additionalProperties": False,
}
UUID = r"[a-f0-9]{8}-[a-f0-9]{4}"
SPECS = (
    GrammarSpec("json_schema", json.dumps(SCHEMA)),
    GrammarSpec("regex", UUID),
    GrammarSpec("choice", '["yes", "no", "it depends"]'),
    GrammarSpec("ebnf", 'root ::= "def " [a-z]{1,8} "(" [a-z]{0,8} "):"'),
)
DRAFTERS = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "DFLASH", "DSPARK")
Tokens = dict[str, list[int]]


def requests(count: int = 12, temperature: float | None = None) -> list[GenerateRequest]:
    """Greedy and seeded ones with a grammar each, and every fifth without any."""
    made = []
    for i in range(count):
        prompt = TOKENIZER.encode(f"# record {i % 4} as text\nrecord = ").ids
        params = SamplingParams(
            temperature=(0.0, 0.9)[i % 2] if temperature is None else temperature,
            seed=i,
            max_new_tokens=60 if i % 5 < 4 else 20,
            grammar=SPECS[i % 5] if i % 5 < 4 else None,
            logprobs=2 if i == 7 else None,
            repetition_penalty=1.1 if i == 8 else 1.0,
        )
        made.append(request(f"r{i}", prompt, params))
    return made


def open_grammars(core: EngineCore) -> int:
    """Requests whose grammars may not be forgotten."""
    assert core.grammars is not None
    return sum(kept.open for kept in core.grammars._kept.values())


def run(messages: Sequence[GenerateRequest], algorithm: str | None, **fields: object) -> Tokens:
    config = tiny_config(PYCODER, algorithm, max_running_requests=8, **fields)
    with running_engine(config) as engine:
        open_before = open_grammars(engine.core)
        outputs = drive(engine.core, messages)
        assert open_grammars(engine.core) == open_before
        for rid, parts in outputs.items():
            finish = parts[-1].finish
            assert finish is not None
            assert finish.kind in ("stop", "length"), (rid, finish)
        planned = "speculative_ragged_verify_mode" in fields  # each draft's confidence is its own
        assert (engine.core.stats(0).forced_drafts > 0) != planned
        cache = engine.core.scheduler.cache
        assert cache.available == cache.total
    return {rid: tokens_of(parts) for rid, parts in outputs.items()}


def check_texts(messages: Sequence[GenerateRequest], tokens: Tokens) -> None:
    """Whole texts are what was asked for, and all end by themselves."""
    for message in messages:
        spec = message.params.grammar
        if spec is None:
            continue
        ids = tokens[message.rid]
        assert ids[-1] == EOS
        text = TOKENIZER.decode(ids[:-1])
        match spec.kind:
            case "json_schema":
                found = json.loads(text)
                assert list(found) == list(SCHEMA["properties"])  # type: ignore[call-overload]
                assert len(found["name"]) <= 12
                assert 0 <= found["age"] <= 150
                assert found["language"] in ("python", "rust", "go")
            case "regex":
                assert re.fullmatch(UUID, text)
            case "choice":
                assert text in json.loads(spec.text)
            case _:
                assert re.fullmatch(r"def [a-z]{1,8}\([a-z]{0,8}\):", text)


@pytest.fixture(scope="module")
def plain() -> Tokens:
    """One request at a time, without overlap and without drafts."""
    messages = [msgspec.structs.replace(message, speculative=False) for message in requests()]
    config = tiny_config(PYCODER, max_running_requests=1, disable_overlap_schedule=True)
    with running_engine(config) as engine:
        tokens = {
            message.rid: tokens_of(drive(engine.core, [message])[message.rid])
            for message in messages
        }
        assert engine.core.stats(0).forced_drafts == engine.core.stats(0).spec_drafts == 0
    check_texts(messages, tokens)
    return tokens


@pytest.mark.parametrize("algorithm", [None, *DRAFTERS])
def test_every_drafter_gives_the_tokens_of_plain_decoding(
    plain: Tokens, algorithm: str | None
) -> None:
    assert run(requests(), algorithm) == plain


@pytest.mark.parametrize(
    ("algorithm", "fields"),
    [
        ("NGRAM", {"disable_overlap_schedule": True, "page_size": 1}),
        ("NGRAM", {"speculative_length_policy": "auto", "chunked_prefill_size": 16}),
        (
            "EAGLE3",
            {
                "speculative_num_steps": 3,
                "speculative_eagle_topk": 4,
                "speculative_num_draft_tokens": 12,
            },
        ),
        ("EAGLE", {"disable_overlap_schedule": True, "chunked_prefill_size": 16}),
        ("DSPARK", {"speculative_ragged_verify_mode": "compact"}),
        ("DFLASH", {"speculative_draft_window_size": 64, "disable_radix_cache": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_every_mode_gives_them_too(
    plain: Tokens, algorithm: str, fields: dict[str, object]
) -> None:
    assert run(requests(), algorithm, **fields) == plain


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_forbidden_drafts_are_left_out_and_counted(plain: Tokens, tree: bool) -> None:
    """Drafts of random tokens, which a grammar nearly always forbids."""
    messages = requests()
    config = tiny_config(PYCODER, "NGRAM", speculative_num_draft_tokens=7)
    with random_draft_core(config, tree) as core:
        tokens = {rid: tokens_of(parts) for rid, parts in drive(core, messages).items()}
        stats = core.stats(0)
    assert tokens == plain
    assert stats.illegal_drafts > 100
    assert stats.forced_drafts > 20


@pytest.mark.parametrize("algorithm", [None, "NGRAM", "EAGLE3"])
def test_retractions_and_aborts_change_nothing(
    plain: Tokens, algorithm: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 1)
    messages = requests()
    config = tiny_config(PYCODER, algorithm, page_size=1, max_total_tokens=78)
    with running_engine(config) as engine:
        open_before = open_grammars(engine.core)
        submit(engine.core, messages)
        assert open_grammars(engine.core) > open_before
        got = finish_all_but(engine.core, "r0")
        assert open_grammars(engine.core) == open_before
    assert got.pop("r0") != plain["r0"]
    assert got == {rid: tokens for rid, tokens in plain.items() if rid != "r0"}


def test_rejection_sampling_obeys_them() -> None:
    """Drawn drafts are neither cut nor replaced: that would shift the distribution."""
    messages = requests(temperature=1.3)
    config = tiny_config(PYCODER, "EAGLE3", speculative_use_rejection_sampling=True)
    with running_engine(config) as engine:
        tokens = {rid: tokens_of(parts) for rid, parts in drive(engine.core, messages).items()}
        assert engine.core.stats(0).forced_drafts == 0
        assert engine.core.stats(0).spec_accepted_tokens > 0
    check_texts(messages, tokens)


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE"])
def test_traces_replay(
    plain: Tokens, algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace has no masks: workers make them anew from the requests."""
    path = tmp_path / "trace"
    monkeypatch.setenv(TRACE_VARIABLE, str(path))
    assert run(requests(), algorithm) == plain
    monkeypatch.delenv(TRACE_VARIABLE)
    assert_replays(path)


@pytest.mark.parametrize("algorithm", [None, "NGRAM"])
def test_a_limit_behind_a_draft_is_no_trouble_of_who_does_not_go_there(
    algorithm: str | None,
) -> None:
    """The drafts, learnt from the prompt, lead into what the matcher cannot hold."""
    prompt = ([88] + [6008] * 12) * 8  # "q", then "aa" again and again
    params = SamplingParams(
        temperature=0.0,
        max_new_tokens=8,
        logit_bias={95: 60.0},  # "x"
        grammar=GrammarSpec("regex", "q(x[b-d]{2}|(a{1000}){901})"),
    )
    fields = {} if algorithm is None else {"speculative_num_draft_tokens": 8}
    with running_engine(tiny_config(PYCODER, algorithm, **fields)) as engine:
        (parts,) = drive(engine.core, [request("r", prompt, params)]).values()
    assert parts[-1].finish is not None
    assert parts[-1].finish.kind == "stop"
    assert re.fullmatch("qx[b-d]{2}", TOKENIZER.decode(tokens_of(parts)[:-1]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_the_matcher_cannot_hold_ends_with_a_reason(temperature: float) -> None:
    """An ambiguous grammar, whose masks cost the more the longer the text is."""
    text = 'start: e\ne: e e | e e e | /[a-z ]/ | ""'
    params = SamplingParams(
        temperature=temperature,
        seed=1,
        max_new_tokens=80,
        grammar=GrammarSpec("ebnf", text, "guided_grammar"),
    )
    with running_engine(tiny_config(PYCODER)) as engine:
        (parts,) = drive(engine.core, [request("r", [5, 6], params)]).values()
    finish = parts[-1].finish
    assert finish is not None
    assert (finish.kind, finish.status) == ("abort", 400)
    assert (finish.message or "").startswith("guided_grammar: ")
    assert "\n" not in (finish.message or "")


def test_a_tokenizer_that_cannot_be_read_is_said_so(tmp_path: Path) -> None:
    data = json.loads((resolve_model("pycoder") / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**data, "decoder": None}))
    compiler = GrammarCompiler(tmp_path / "tokenizer.json", 8192, (0,))
    refused = compiler.refuse(GrammarSpec("regex", "a+", "regex"))
    assert refused is not None
    assert (refused.field, refused.status) == ("regex", 501)
    assert "tokenizer" in refused.reason


def test_a_slot_forgets_its_grammar() -> None:
    """One slot serves a request with a grammar, then one without."""
    first, *_, last = requests(5)
    with running_engine(tiny_config(PYCODER, max_running_requests=1)) as engine:
        alone = drive(engine.core, [last])[last.rid]
        drive(engine.core, [first])
        again = drive(engine.core, [last])[last.rid]
    assert tokens_of(again) == tokens_of(alone)


def test_a_row_that_may_have_nothing_is_an_error() -> None:
    logits = torch.randn(3, 40)
    bits = np.array([[0, 0], [0b101, 0]], dtype=np.int32)
    places = torch.tensor([2, 5, 9])
    nodes = Nodes(places, *[torch.empty(0)] * 5)
    before = logits.clone()
    apply_masks(logits, nodes, NodeMasks(np.array([9, 2]), bits, np.array([True, False])))
    assert (
        logits[0, :3] == torch.where(torch.tensor([1, 0, 1]).bool(), before[0, :3], MASKED)
    ).all()
    assert (logits[0, 3:] == MASKED).all()
    assert torch.equal(logits[1], before[1])
    assert logits[2].isnan().all()


def test_where_they_do_not_work_they_are_refused() -> None:
    spec = GrammarSpec("regex", "a+", "guided_regex")

    def refused(**fields: object) -> str:
        with running_engine(tiny_config(PYCODER, None, **fields)) as engine:
            found = engine.core.submit(
                request("r", [5, 6], SamplingParams(max_new_tokens=4, grammar=spec))
            )
        assert found is not None
        assert found.field == "guided_regex"
        assert found.status == 501
        return found.reason

    assert "tokenizer.json" in refused(skip_tokenizer_init=True)
    worker = build_worker(tiny_config(PYCODER))
    resolved = resolve_config(tiny_config(PYCODER, tp_size=2), worker.info())
    worker.shutdown()
    assert not isinstance(resolved, Refused)
    assert compiler_of(resolved) is None
    found = refuse_grammar(spec, resolved, None)
    assert found is not None
    assert "ranks" in found.reason


def core_refuses(core: EngineCore, **fields: object) -> Refused:
    params = SamplingParams(max_new_tokens=4, grammar=SPECS[1], **fields)  # type: ignore[arg-type]
    found = core.submit(request("r", [5, 6], params))
    assert found is not None
    return found


def test_what_contradicts_a_grammar_is_refused() -> None:
    with running_engine(tiny_config(PYCODER)) as engine:
        assert core_refuses(engine.core, ignore_eos=True).field == "ignore_eos"
        assert core_refuses(engine.core, min_new_tokens=2).field == "min_new_tokens"
        params = SamplingParams(max_new_tokens=4, grammar=GrammarSpec("regex", "(", "regex"))
        found = engine.core.submit(request("r", [5, 6], params))
        assert found is not None
        assert found.field == "regex"
