"""Drafts on the device over ranks (threads here): every rank drafts the same, rank 0 decides."""

import msgspec
import pytest
import torch

from outrider.engine.gpu.worker import GpuWorker
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.sampling_params import SamplingParams

from ..cores import drive, request, tokens_of
from ..gpu.device_cores import KvModel, device_core
from ..gpu.test_device_drafts import VOCAB, Tokens, check_after, flags
from ..tiny import bigram_config
from .meeting import LocalRank, Meeting


class Headless(KvModel):
    """A rank's model that has no output head."""

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("rank 0 alone computes logits")


def requests() -> list[GenerateRequest]:
    greedy = SamplingParams(temperature=0.0, max_new_tokens=14, ignore_eos=True)
    drawn = msgspec.structs.replace(greedy, temperature=0.7, seed=3)
    edited = msgspec.structs.replace(greedy, frequency_penalty=0.4, logit_bias={2: 0.5})
    params = (greedy, drawn, edited)
    return [request(f"r{i}", [i, 1, 2, 3, i, 1], some) for i, some in enumerate(params)]


def on_ranks(
    source: str | None, **fields: object
) -> list[tuple[Tokens, list[torch.Tensor], GpuWorker]]:
    """Tokens, the slots' state and the worker of each rank, which drives a core of its own."""

    def work(rank: LocalRank) -> tuple[Tokens, list[torch.Tensor], GpuWorker]:
        model = KvModel(VOCAB) if rank.leads else Headless(VOCAB)
        given = flags(source, **fields)
        with device_core(model, bigram_config(VOCAB), ranks=rank, **given) as (assembly, worker):
            outputs = drive(assembly.core, requests())
            check_after(assembly, worker)
        state = worker._step.state
        held = [state.seq_lens, state.last_tokens, state.out_counts, state.page_table]
        if worker._step.drafter is not None:
            held.append(worker._step.drafter.history)  # type: ignore[attr-defined]
        return {rid: tokens_of(some) for rid, some in outputs.items()}, held, worker

    return Meeting(2).run(work)


@pytest.mark.parametrize("source", ["gpu", "both"])
def test_ranks_draft_alike_and_give_the_tokens_of_plain_decoding(source: str) -> None:
    with device_core(KvModel(VOCAB), bigram_config(VOCAB), **flags(None)) as (assembly, _):
        plain = {rid: tokens_of(some) for rid, some in drive(assembly.core, requests()).items()}
    (tokens, held, first), (others, others_held, second) = on_ranks(source)
    assert tokens == others == plain
    for mine, other in zip(held, others_held, strict=True):
        assert torch.equal(mine, other)
    assert first._runner.steps == second._runner.steps < 14 + 3
    # Ranks capture together, so their edits' layouts change together; one keeps the counts.
    edits, followed = first._step.state.edits, second._step.state.edits
    assert edits.layout == followed.layout == 2
    assert len(edits.history) > 0
    assert followed.history.numel() == followed.list_ids.numel() == 0


def test_rank_0_forces_accept_lengths_for_all() -> None:
    (tokens, held, worker), (others, others_held, _) = on_ranks("gpu", simulate_accept_length=3.0)
    assert tokens == others
    for mine, other in zip(held, others_held, strict=True):
        assert torch.equal(mine, other)
    assert worker._runner.steps < 14
