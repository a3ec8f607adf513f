"""Ragged verify of block drafts through whole cores on a CPU: lengths change, tokens do not."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from outrider.engine_core import admission
from outrider.engine_core.controller import StepLengths
from outrider.engine_core.counters import Counters
from outrider.engine_core.device_lengths import DeviceLengths
from outrider.engine_core.ids import I32, i32
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.sampling_params import SamplingParams

from .block_cores import BlockCore, block_core, write_target
from .cores import drive, request, tokens_of
from .test_block_exact import Tokens, check_pages, requests

RAGGED = ("cap-accept", "compact")
WIDE = {"max_running_requests": 32}
over_drafts = pytest.mark.parametrize("name", ["dflash", "dspark"])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def waves() -> list[list[GenerateRequest]]:
    """So many at once that 32 run; then some whose beginnings are in the cache."""
    first = [message for name in "abcd" for message in requests(name)]
    return [first, requests("s", 6)[:3]]


true_plan = DeviceLengths.plan


def shorter(self: DeviceLengths, slots: I32, room: I32, batch_tokens: int) -> StepLengths:
    """A policy that gives each slot one to three drafts."""
    lengths = true_plan(self, slots, room, batch_tokens)
    return lengths._replace(caps=np.minimum(lengths.caps, 1 + slots % 3).astype(np.int32))


@contextmanager
def ragged_core(target: Path, name: str, mode: str, **flags: object) -> Iterator[BlockCore]:
    """DSPARK verifies two drafts of five, DFLASH as many as a policy says."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "dflash" and mode != "static":
            patch.setattr(DeviceLengths, "plan", shorter)
        with block_core(target, name, speculative_ragged_verify_mode=mode, **flags) as made:
            verify = made.core.scheduler.verify
            assert (verify is None) == (name == "dflash" or mode == "static")
            if verify is not None:
                verify.planner.force(0.4)
            yield made


@pytest.fixture(scope="module")
def plain(target: Path) -> Tokens:
    with block_core(target, None) as made:
        outputs = [drive(made.core, wave) for wave in waves()]
    return {rid: tokens_of(some) for wave in outputs for rid, some in wave.items()}


def check_capped(counters: Counters, name: str, mode: str) -> None:
    """Lengths were what they should be."""
    assert (counters.spec_draft_tokens < 2.5 * counters.spec_drafts) == (mode != "static")
    assert (counters.budget_steps > 5) == (mode != "static" and name == "dspark")
    if name == "dspark":
        assert (counters.trimmed_drafts > 2) == (mode == "cap-accept")


@over_drafts
@pytest.mark.parametrize(
    ("mode", "others"),
    [
        ("static", WIDE),
        *((mode, WIDE | {"page_size": 1, "chunked_prefill_size": 64}) for mode in RAGGED),
        *((mode, WIDE | {"disable_overlap_schedule": True}) for mode in RAGGED),
        *((mode, {"disable_overlap_schedule": True}) for mode in RAGGED),
        *((mode, {"max_running_requests": 1}) for mode in RAGGED),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_every_mode_gives_the_tokens_of_plain_decoding(
    target: Path, plain: Tokens, name: str, mode: str, others: dict[str, object]
) -> None:
    found: Tokens = {}
    with ragged_core(target, name, mode, **others) as made:
        for wave in waves():
            found |= {rid: tokens_of(some) for rid, some in drive(made.core, wave).items()}
        counters = made.core.scheduler.counters
        check_pages(made)
    assert found == plain
    assert counters.cached_tokens > 0
    assert counters.spec_accepted_tokens > 0
    check_capped(counters, name, mode)


@pytest.mark.parametrize("mode", RAGGED)
@over_drafts
def test_retractions_and_aborts_change_nothing(
    target: Path, name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 1)
    params = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    messages = [request(f"r{i}", [i, 1, 2, 3, i], params) for i in range(6)]
    with block_core(target, None) as made:
        plain = {rid: tokens_of(some) for rid, some in drive(made.core, messages).items()}
    found: Tokens = {message.rid: [] for message in messages}
    with ragged_core(target, name, mode, page_size=1, max_total_tokens=72) as made:
        core, steps = made.core, 0
        for message in messages:
            assert core.submit(message) is None
        while core.has_work:
            for output in core.step():
                found[output.rid] += i32(output.tokens).tolist()
            steps += 1
            if steps == 6:
                assert core.abort("r1")
        counters = core.scheduler.counters
        check_pages(made)
    assert counters.retractions > 0
    assert counters.aborts == 1
    cut = found.pop("r1")
    assert len(cut) < 24
    assert cut == plain["r1"][: len(cut)]
    assert found == {rid: plain[rid] for rid in found}
    check_capped(counters, name, mode)
