"""The core's loop against the fake worker: plain, speculative, overlapped, synchronous."""

from typing import Any

import pytest

from .core_fixtures import assert_all_pages_back, expected, make_core, request, run_all
from .fake_worker import FakeWorker

NGRAM: dict[str, Any] = {"speculative_algorithm": "NGRAM"}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("speculation", [{}, NGRAM])
def test_many_requests_get_their_own_continuation(
    page_size: int, overlap: bool, speculation: dict[str, Any]
) -> None:
    worker = FakeWorker(num_pages=1024 // page_size, page_size=page_size)
    core = make_core(
        worker, disable_overlap_schedule=not overlap, chunked_prefill_size=16, **speculation
    )
    messages = [
        request(f"r{i}", range(1, 5 + 4 * i), 20 + i, ignore_eos=i % 2 == 0) for i in range(12)
    ]
    for message in messages:
        assert core.submit(message) is None
    got = run_all(core)
    for message in messages:
        tokens, finish = expected(message, 256, 50)
        client = got[message.rid]
        assert client.tokens == tokens
        assert client.finish is not None
        assert client.finish.kind == finish
    assert_all_pages_back(core)
    assert worker.mixed_steps > 0
    assert (core.scheduler.counters.spec_accepted_tokens > 50) == bool(speculation)
