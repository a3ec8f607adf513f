"""Log-probabilities of prompts through whole cores, against one pass of transformers."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine_core import admission
from outrider.engine_core.ids import f32, i32
from outrider.engine_core.messages import RequestOutput
from outrider.engine_core.plan import TokenLogprobs
from outrider.engine_core.sampling_params import SamplingParams

from .checkpoints import save
from .cores import drive, request, running_engine, tiny_config, tokens_of
from .draft_cores import VOCAB, Models, draft_core, write_models

TOP = 3
MODES: list[dict[str, object]] = [
    {},
    {"page_size": 1, "chunked_prefill_size": 7},
    {"page_size": 16, "chunked_prefill_size": 5, "disable_overlap_schedule": True},
    {"disable_radix_cache": True, "max_running_requests": 2},
]


class Target:
    """A checkpoint, and what transformers says of texts in one pass."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reference: Any = save("qwen3", folder)

    def expected(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.reference(torch.tensor([tokens])).logits[0]
        return torch.log_softmax(logits.double(), dim=1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("qwen3"))


def prompts() -> Iterator[tuple[list[int], int]]:
    """Texts that begin alike, so that the cache holds parts of them, and where scores start."""
    rng = random.Random(5)
    shared = [rng.randrange(131) for _ in range(40)]
    for length, start in ((40, 0), (33, 20), (40, 39), (1, 0), (17, 1), (40, 40), (24, 16)):
        own = [rng.randrange(131) for _ in range(length % 3)]
        yield [*shared[: length - len(own)], *own], start


def entries_of(outputs: list[RequestOutput]) -> list[TokenLogprobs]:
    """The scores, which come at once with the first output."""
    assert not any(output.prompt_logprobs for output in outputs[1:])
    return list(outputs[0].prompt_logprobs)


def check(entries: list[TokenLogprobs], values: torch.Tensor, prompt: list[int], start: int) -> int:
    first = max(1, start)
    assert [entry.token for entry in entries] == prompt[first:]
    for entry, row in zip(entries, values[first - 1 :], strict=False):
        assert entry.value == pytest.approx(float(row[entry.token]), abs=1e-4)
        best, ids = torch.topk(row, TOP)
        assert i32(entry.top_ids).tolist() == ids.tolist()
        assert f32(entry.top_values).tolist() == pytest.approx(best.tolist(), abs=1e-4)
        assert entry.rank == 1 + int((row > row[entry.token]).sum())
    return len(entries)


def params(start: int, **fields: object) -> SamplingParams:
    values: dict[str, object] = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}
    values |= {"prompt_logprobs": TOP, "logprob_start_len": start, **fields}
    return SamplingParams(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: ",".join(mode) or "default")
@pytest.mark.parametrize("algorithm", [None, "NGRAM"])
def test_every_prompt_is_scored_as_in_one_pass(
    target: Target, algorithm: str | None, mode: dict[str, object]
) -> None:
    asked = list(prompts())
    with running_engine(tiny_config(target.folder, algorithm, **mode)) as engine:
        plain = [
            request(f"p{i}", prompt, params(0, prompt_logprobs=None))
            for i, (prompt, _) in enumerate(asked)
        ]
        without = drive(engine.core, plain)  # fills the cache
        messages = [
            request(f"r{i}", prompt, params(start, max_new_tokens=3 * (i % 4 > 0)))
            for i, (prompt, start) in enumerate(asked)
        ]
        outputs = drive(engine.core, messages)
        cached = {rid: some[-1].stats.cached_tokens for rid, some in outputs.items()}  # type: ignore[union-attr]
    scored = 0
    for i, (prompt, start) in enumerate(asked):
        scored += check(entries_of(outputs[f"r{i}"]), target.expected(prompt), prompt, start)
        expected = tokens_of(without[f"p{i}"]) if i % 4 else []
        assert tokens_of(outputs[f"r{i}"]) == expected
        assert cached[f"r{i}"] <= max(start - 1, 0) or start == len(prompt)
    assert scored == sum(len(prompt) - max(1, start) for prompt, start in asked if start < 40)
    if not mode.get("disable_radix_cache"):
        assert sum(cached.values()) > 20


def test_retracted_requests_are_scored_once(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 1)
    rng = random.Random(2)
    texts = [[rng.randrange(131) for _ in range(30)] for _ in range(4)]
    config = tiny_config(
        target.folder, "NGRAM", page_size=1, max_total_tokens=170, chunked_prefill_size=16
    )
    with running_engine(config) as engine:
        messages = [
            request(f"r{i}", text, params(0, max_new_tokens=60)) for i, text in enumerate(texts)
        ]
        outputs = drive(engine.core, messages)
        assert engine.core.scheduler.counters.retractions > 0
    for i, text in enumerate(texts):
        some = outputs[f"r{i}"]
        entries = [entry for output in some for entry in output.prompt_logprobs]
        check(entries, target.expected(text), text, 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return write_models(tmp_path_factory.mktemp("drafts"))


@pytest.mark.parametrize("algorithm", [None, "STANDALONE", "EAGLE", "EAGLE3"])
def test_scores_of_a_text_are_those_it_was_generated_with(models: Models, algorithm: Any) -> None:
    """Also where the last cached position is recomputed, and with drafts accepted around it."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    with draft_core(models, algorithm, page_size=1, chunked_prefill_size=6) as made:
        asked = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True, logprobs=TOP)
        first = drive(made.core, [request("a", prompt, asked)])["a"]
        text = [*prompt, *tokens_of(first)]
        again = drive(made.core, [request("b", text, params(8)), request("c", text, params(19))])
        fresh = drive(made.core, [request("d", text, params(0, prompt_logprobs=None))])["d"]
    generated = [entry for output in first for entry in output.logprobs]
    for rid, skipped in (("b", 0), ("c", 11)):
        entries = entries_of(again[rid])
        assert [entry.token for entry in entries] == text[8 + skipped :]
        for one, other in zip(entries, generated[skipped:], strict=True):
            assert one.value == pytest.approx(other.value, abs=1e-4)
            assert (one.rank, other.rank) == (1, 1)
            assert np.array_equal(i32(one.top_ids)[:1], i32(other.top_ids)[:1])
        assert tokens_of(again[rid]) == tokens_of(fresh)
        last = again[rid][-1].stats
        assert last is not None
        assert last.cached_tokens <= 7 + skipped
        assert last.cached_tokens > skipped // 2
    assert max(text) < VOCAB
