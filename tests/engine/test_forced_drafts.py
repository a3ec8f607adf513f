"""What grammars force through whole cores on a CPU: it is drafted without a drafter, and holds."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from msgspec import structs

from outrider.engine.build import Engine
from outrider.engine_core.controller import NOT_PROFITABLE, StepLengths
from outrider.engine_core.device_lengths import DeviceLengths
from outrider.engine_core.draft_caps import device_caps, draft_room
from outrider.engine_core.forced_drafts import FORCED_WIDTH
from outrider.engine_core.grammar_spec import GrammarSpec
from outrider.engine_core.ids import I32, RowKind, i32
from outrider.engine_core.messages import GenerateRequest, RequestStats
from outrider.engine_core.plan import StepPlan, StepResult
from outrider.engine_core.sampling_params import SamplingParams

from .cores import drive, request, running_engine, tiny_config, tokens_of
from .letters import write_tokenizer
from .tiny import write_checkpoint

LOOP = "(a(bcdl|ef)(ghi|jk[a-c]{2})){3,6}"
LONG = "abcdabcdefghijkl(ab|ghij){2}lkjihgfedcbalkji[a-c]"
Tokens = dict[str, list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder: a target over 16 tokens, and a tokenizer of them."""
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint(folder, 16, scale=0.4)
    return write_tokenizer(folder)


def requests(**fields: object) -> list[GenerateRequest]:
    """Three with grammars, greedy and seeded, and one without."""
    made = []
    for i, text in enumerate((LONG, LOOP, LONG, None)):
        values: dict[str, object] = {
            "temperature": 0.8 * (i % 2),
            "seed": i,
            "max_new_tokens": 60,
            "grammar": None if text is None else GrammarSpec("regex", text),
            **fields,
        }
        params = SamplingParams(**values)  # type: ignore[arg-type]
        made.append(request(f"r{i}", [(3 * j + i) % 12 + 1 for j in range(2 + 5 * i)], params))
    return made


def undrafted(messages: Sequence[GenerateRequest]) -> list[GenerateRequest]:
    return [structs.replace(message, speculative=False) for message in messages]


class Run(NamedTuple):
    tokens: Tokens
    stats: dict[str, RequestStats]
    steps: int
    forced: int
    plans: list[StepPlan]
    results: list[StepResult]


def run(model: Path, messages: Sequence[GenerateRequest], **flags: object) -> Run:
    with running_engine(tiny_config(model, None, **flags)) as engine:
        plans, results = watch(engine)
        outputs = drive(engine.core, messages)
        stats = {rid: parts[-1].stats for rid, parts in outputs.items()}
        assert all(one is not None for one in stats.values())
        return Run(
            {rid: tokens_of(parts) for rid, parts in outputs.items()},
            stats,  # type: ignore[arg-type]
            engine.core.stats(0).steps,
            engine.core.stats(0).forced_drafts,
            plans,
            results,
        )


def watch(engine: Engine) -> tuple[list[StepPlan], list[StepResult]]:
    """The plans and results of all steps to come."""
    plans, results, worker = list[StepPlan](), list[StepResult](), engine.worker
    launch, collect = worker.launch, worker.collect

    def noted(plan: StepPlan) -> None:
        plans.append(plan)
        launch(plan)

    def kept() -> StepResult:
        results.append(collect())
        return results[-1]

    worker.launch, worker.collect = noted, kept  # type: ignore[method-assign]
    return plans, results


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"disable_overlap_schedule": True},
        {"max_running_requests": 1},
        {"page_size": 1, "chunked_prefill_size": 7},
    ],
    ids=lambda flags: ",".join(flags) or "default",
)
def test_steps_change_and_tokens_do_not(model: Path, flags: dict[str, object]) -> None:
    without = run(model, undrafted(requests()), **flags)
    made = run(model, requests(), **flags)
    assert made.tokens == without.tokens
    assert without.forced == 0
    assert made.forced > 60
    assert made.steps < without.steps
    assert sum(stats.correct_drafts for stats in made.stats.values()) == made.forced
    for rid, stats in made.stats.items():
        assert stats.correct_drafts == stats.proposed_drafts  # they hold, all of them
        assert stats.verify_tokens == stats.correct_drafts + stats.verify_ct
        assert stats.verify_tokens + stats.plain_ct + 1 == stats.completion_tokens
        assert (stats.verify_ct > 0) == (rid != "r3")
        assert stats.spec_off_reason is None


def test_rows_without_a_grammar_are_planned_as_ever(model: Path) -> None:
    made = run(model, requests())
    texts = [structs.replace(m, params=structs.replace(m.params, grammar=None)) for m in requests()]
    plain = run(model, texts)
    assert plain.forced == 0
    assert not any(plan.late_bound for plan in (*made.plans, *plain.plans))
    assert not any(draft_room(plan).any() for plan in plain.plans)
    assert max(int(draft_room(plan).max()) for plan in made.plans) == FORCED_WIDTH - 1
    # A step in which nothing is forced has the tokens of a plain one.
    for plan, result in zip(made.plans, made.results, strict=True):
        if not result.forced and set(plan.kinds) == {RowKind.VERIFY}:
            assert result.batch_tokens == plan.num_rows


def test_a_run_is_cut_where_its_request_ends(model: Path) -> None:
    whole = run(model, undrafted(requests())).tokens["r0"]
    for new in (3, 7, 12, 13, 14, 25):
        made = run(model, requests(max_new_tokens=new)[:1])
        assert made.tokens["r0"] == whole[:new]
    for stop in (9, 12, 10):
        made = run(model, requests(stop_token_ids=(stop,))[:1])
        assert made.tokens["r0"] == whole[: whole.index(stop) + 1]
        assert made.forced > 0
    made = run(model, requests(stop=("hij",))[:1])
    assert made.tokens["r0"] == whole[: whole.index(10) + 1]


def test_log_probabilities_and_penalties_are_those_of_each_token(model: Path) -> None:
    fields = {"logprobs": 2, "repetition_penalty": 1.2, "logit_bias": {5: 2.0}}
    with running_engine(tiny_config(model)) as engine:
        texts = requests(**fields)
        found = [
            {
                rid: [
                    (entry.token, round(entry.value, 4))
                    for part in parts
                    for entry in part.logprobs
                ]
                for rid, parts in drive(engine.core, messages).items()
            }
            for messages in (undrafted(texts), texts)
        ]
        assert engine.core.stats(0).forced_drafts > 60
    assert found[0] == found[1]


def test_a_tokenizer_that_is_not_loaded_leaves_no_room(model: Path) -> None:
    with running_engine(tiny_config(model, None, skip_tokenizer_init=True)) as engine:
        assert engine.core.config.verify_width == 1
        assert engine.core.config.forced_drafts is None


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A length policy for which drafts of the device never pay."""
    weigh = DeviceLengths.weigh

    def nothing(self: DeviceLengths, slots: I32, room: I32, tokens: int) -> StepLengths:
        lengths = weigh(self, slots, room, tokens)
        reasons = np.full(len(slots), NOT_PROFITABLE, np.uint8)
        return lengths._replace(caps=np.zeros_like(lengths.caps), reasons=reasons)

    monkeypatch.setattr(DeviceLengths, "weigh", nothing)
    monkeypatch.setattr(DeviceLengths, "settle", lambda self, lengths, *_: lengths)


@pytest.mark.usefixtures("lazy")
def test_where_drafts_do_not_pay_forced_ones_still_come() -> None:
    spec = GrammarSpec("regex", "(Yes|No), the answer to that question is (small|large)")
    messages = [
        request(f"r{i}", [5 + i, 6, 7], SamplingParams(max_new_tokens=20 + i, grammar=grammar))
        for i, grammar in enumerate((spec, None))
    ]
    found = list[Tokens]()
    for some in (undrafted(messages), messages):
        with running_engine(tiny_config(Path("pycoder"), "EAGLE3")) as engine:
            plans, _ = watch(engine)
            outputs = drive(engine.core, some)
            stats = engine.core.stats(0)
            found.append({rid: tokens_of(parts) for rid, parts in outputs.items()})
    assert found[0] == found[1]
    assert stats.spec_draft_tokens == stats.spec_accepted_tokens == stats.forced_drafts > 4
    assert all(not device_caps(plan).any() for plan in plans)
    assert any(max(i32(plan.q_caps)) > 1 and plan.device_caps for plan in plans)
    plain = outputs["r1"][-1].stats
    assert plain is not None
    assert plain.spec_off_reason == "not profitable at this batch size"
