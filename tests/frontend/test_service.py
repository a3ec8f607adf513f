"""The service without HTTP: samples, seeds, limits, aborts, what reaches the core."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from outrider.engine_core.messages import FinishReason, RequestStats
from outrider.engine_core.refusal import RefusedError
from outrider.engine_core.sampling_params import SamplingParams
from outrider.frontend.core_client import connect_core
from outrider.frontend.expand import GenerateItem, child_seed
from outrider.frontend.meta_info import final_meta_info
from outrider.frontend.service import AsyncService, Delta

from .fake_core import INFO, TOKEN, TOKENIZER, FakeCore, expected_text

PARAMS = SamplingParams(max_new_tokens=12)


@asynccontextmanager
async def service(folder: Path) -> AsyncIterator[tuple[FakeCore, AsyncService]]:
    core = FakeCore(folder)
    client, info = await connect_core(core.endpoint, TOKEN, timeout_s=10)
    try:
        yield core, AsyncService(client, TOKENIZER, info)
    finally:
        await client.close()
        await core.close()


def run(work: Coroutine[object, object, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work, 20)

    asyncio.run(bounded())


def test_deltas_add_up(short_folder: Path) -> None:
    async def work() -> None:
        async with service(short_folder) as (_, served):
            deltas = [d async for d in served.generate("a b c", PARAMS, rid="r")]
            assert "".join(d.text for d in deltas) == expected_text("a b c", 12)
            assert sum(len(d.tokens) for d in deltas) == 12
            assert [d.finish is not None for d in deltas][:-1] == [False] * (len(deltas) - 1)
            assert deltas[-1].meta_info.completion_tokens == 12
            assert {d.rid for d in deltas} == {"r"}
            assert served.open_requests == 0

    run(work())


def test_samples_have_ids_and_seeds_of_their_own(short_folder: Path) -> None:
    async def work() -> None:
        async with service(short_folder) as (core, served):
            params = msgspec.structs.replace(PARAMS, n=3, seed=-9)
            deltas = [d async for d in served.generate("a", params, rid="r", stream=False)]
            assert sorted(d.index for d in deltas) == [0, 1, 2]
            assert {d.rid for d in deltas} == {"r_0", "r_1", "r_2"}
            sent = core.requests
            assert [r.params.n for r in sent] == [1, 1, 1]
            assert [r.params.seed for r in sent] == [child_seed(-9, i) for i in range(3)]

    run(work())


def test_child_seeds_are_distinct_and_fit() -> None:
    seeds = [child_seed(seed, i) for seed in (0, 1, 2**63 - 1, -(2**63)) for i in range(128)]
    assert len(set(seeds)) == len(seeds)
    assert all(seed is not None and -(2**63) <= seed < 2**63 for seed in seeds)
    assert child_seed(None, 3) is None


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("", PARAMS, "prompt"),
        ([], PARAMS, "prompt"),
        ([1] * 512, PARAMS, "prompt"),
        ([1] * 501, PARAMS, "max_new_tokens"),
        ([9000], PARAMS, "prompt"),
        ([1], SamplingParams(top_p=0.0), "top_p"),
    ],
)
def test_limits(
    short_folder: Path, prompt: str | list[int], params: SamplingParams, field: str
) -> None:
    async def work() -> None:
        async with service(short_folder) as (core, served):
            with pytest.raises(RefusedError) as caught:
                await anext(served.generate(prompt, params))
            assert caught.value.refused.field == field
            assert caught.value.refused.status == 400
            assert core.requests == []
            assert served.open_requests == 0

    run(work())


def test_the_whole_context_may_be_used(short_folder: Path) -> None:
    async def work() -> None:
        async with service(short_folder) as (_, served):
            deltas = [d async for d in served.generate([1] * 500, PARAMS)]
            assert deltas[-1].meta_info.completion_tokens == 12

    run(work())


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_leaving_aborts(short_folder: Path, how: str) -> None:
    async def work() -> None:
        async with service(short_folder) as (core, served):
            core.slow = 0.05
            deltas = served.generate("a b", msgspec.structs.replace(PARAMS, n=2))
            await anext(deltas)
            if how == "close":
                await deltas.aclose()
            else:
                waiting = asyncio.create_task(collect(deltas))
                await asyncio.sleep(0.01)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            await asyncio.sleep(0.1)
            assert len(core.aborted) == 2
            assert counted(served) == {"requests": 2.0, "aborted_requests": 2.0}
            assert served.open_requests == 0
            assert served.core.open_requests == 0

    run(work())


def counted(served: AsyncService) -> dict[str, float | None]:
    value = served.metrics.registry.get_sample_value
    names = ("requests", "aborted_requests")
    return {name: value(f"outrider:num_{name}_total") for name in names}


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


def test_duplicate_id_leaves_the_first_request_alone(short_folder: Path) -> None:
    async def work() -> None:
        async with service(short_folder) as (core, served):
            core.slow = 0.01
            first = served.generate("a b", PARAMS, rid="r_0")
            await anext(first)
            with pytest.raises(RefusedError, match="in flight"):
                await anext(served.generate("a", PARAMS, rid="r_0"))
            with pytest.raises(RefusedError, match="in flight"):  # its sample would be r_0
                await anext(served.generate("a", msgspec.structs.replace(PARAMS, n=2), rid="r"))
            rest = await collect(first)
            assert rest[-1].finish == FinishReason("length")
            assert core.aborted == []
            assert counted(served) == {"requests": 1.0, "aborted_requests": 0.0}

    run(work())


def test_an_id_taken_up_again_gets_nothing_of_the_request_before(short_folder: Path) -> None:
    async def work() -> None:
        async with service(short_folder) as (core, served):
            core.slow = 0.001
            long = msgspec.structs.replace(PARAMS, max_new_tokens=300)
            late = 0
            for _ in range(10):
                left = served.generate("x y z", long, rid="same")
                await anext(left)
                await left.aclose()
                late += len(served.core._forgotten)  # its outputs and finish are on their way
                again = await collect(served.generate("a b", PARAMS, rid="same"))
                assert "".join(d.text for d in again) == expected_text("a b", 12)
                assert again[-1].finish == FinishReason("length")
                assert {d.rid for d in again} == {again[-1].meta_info.id} == {"same"}
            assert late == 10
            assert len({request.rid for request in core.requests}) == 20
            assert not served.core._forgotten

    run(work())


def test_scopes_share_no_ids(short_folder: Path) -> None:
    async def work() -> None:
        async with service(short_folder) as (core, served):
            core.slow = 0.05
            one = msgspec.structs.replace(PARAMS, max_new_tokens=1)
            first = served.generate("a b", PARAMS, rid="r", scope="sdk1")
            await anext(first)
            assert served.abort("r") == served.abort("sdk1:r") == served.abort("r", "sdk2") == 0
            other = await collect(served.generate("a", one, rid="r"))
            assert other[-1].finish == FinishReason("length")
            with pytest.raises(RefusedError, match="in flight"):
                await anext(served.generate("a", PARAMS, rid="r", scope="sdk1"))
            assert served.abort("r", "sdk1") == 1
            rest = await collect(first)
            assert rest[-1].finish is not None
            assert rest[-1].finish.kind == "abort"

    run(work())


def test_a_refused_batch_leaves_nothing_open(short_folder: Path) -> None:
    async def work() -> None:
        async with service(short_folder) as (core, served):
            served.core._max_open = 2
            two = msgspec.structs.replace(PARAMS, n=2)
            for ids, match in ((("a", "b"), "try again later"), (("r", "r_0"), "in flight")):
                items = [
                    GenerateItem(prompt="a", params=params, rid=rid)
                    for rid, params in zip(ids, (two, PARAMS), strict=True)
                ]
                with pytest.raises(RefusedError, match=match):
                    await anext(served.generate_many(items))
                assert served.open_requests == served.core.open_requests == 0
            assert core.requests == []
            assert await collect(served.generate("a", two, rid="r"))

    run(work())


def test_abort_by_id_ends_every_sample(short_folder: Path) -> None:
    async def work() -> None:
        async with service(short_folder) as (core, served):
            core.slow = 0.05
            params = msgspec.structs.replace(PARAMS, n=2)
            waiting = asyncio.create_task(collect(served.generate("a b", params, rid="r")))
            await asyncio.sleep(0.02)
            assert served.abort("r") == 2
            ends = [d.finish.kind for d in await waiting if d.finish is not None]
            assert ends == ["abort", "abort"]

    run(work())


def test_a_tokenizer_of_another_model_is_refused(short_folder: Path) -> None:
    async def work() -> None:
        core = FakeCore(short_folder, msgspec.structs.replace(INFO, vocab_size=100))
        client, info = await connect_core(core.endpoint, TOKEN, timeout_s=10)
        with pytest.raises(RefusedError, match="use the tokenizer of the model"):
            AsyncService(client, TOKENIZER, info)
        await client.close()
        await core.close()

    run(work())


def test_meta_info_without_and_with_drafts() -> None:
    none = RequestStats(3, 4, 0, 0, 0, 0, 0, 0, 4, (), "too short")
    plain = final_meta_info("r", FinishReason("stop", "x"), none, 0.5, False).to_dict()
    assert not any(key.startswith("spec_") for key in plain)
    assert plain["finish_reason"] == {"type": "stop", "matched": "x"}
    spec = final_meta_info("r", FinishReason("length"), none, 0.5, True).to_dict()
    assert (spec["spec_accept_length"], spec["spec_accept_rate"]) == (0.0, 0.0)
    assert (spec["spec_plain_steps"], spec["spec_off_reason"]) == (4, "too short")
    assert spec["finish_reason"] == {"type": "length", "length": 4}
    assert "simulated" not in spec
    assert final_meta_info("r", FinishReason("length"), none, 0.5, True, True).simulated
