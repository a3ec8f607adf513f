"""What ranks on CPUs tell each other in a step: rank 0's decisions, and sizes to time."""

import os
from collections.abc import Sequence

import numpy as np
import torch

from ...engine_core.plan import HostDrafts, RowLogprobs, StepPlan, StepResult
from ...engine_core.worker import WorkerInfo
from ..agreement import Ranks
from ..future_map import FutureMap
from ..kv_pool import KVPool
from ..measure import StepTimer
from ..models import Model
from ..sampling.prompt_scores import Piece
from ..speculative.verify import settle
from ..step import Drafted, ShareDecisions, StepRunner
from ..step_buffers import StepBuffers
from ..worker import TorchWorker


def share_decisions(group: Ranks, check: bool | None = None) -> ShareDecisions:
    """What makes accept lengths int32[R] and, of N nodes, paths and tokens those of rank 0.

    ``check``: see that every rank ran the same batch; None follows OUTRIDER_CHECK.
    """
    checks = os.environ.get("OUTRIDER_CHECK") == "1" if check is None else check

    def share(buffers: StepBuffers, rows: int, nodes: int) -> None:
        if checks:
            _check_batch(group, buffers, rows)
        group.agree(
            [
                torch.from_numpy(buffers.accept_lens[:rows]),
                torch.from_numpy(buffers.accept_idx[:nodes]),
                torch.from_numpy(buffers.emitted[:nodes]),
            ]
        )

    return share


def _check_batch(group: Ranks, buffers: StepBuffers, rows: int) -> None:
    """Raise RuntimeError unless rows, query tokens and where KV goes are those of rank 0."""
    tokens = int(buffers.cu_q[rows])
    arrays = (
        buffers.starts[:rows],
        buffers.q_lens[:rows],
        buffers.input_ids[:tokens],
        buffers.kv_slots[:tokens],
    )
    mine = torch.from_numpy(np.concatenate(arrays).astype(np.int32))
    decided = mine.clone()
    group.agree([decided])
    if not torch.equal(mine, decided):
        raise RuntimeError("this rank laid out another batch than rank 0")


class FollowerRunner(StepRunner):
    """The steps of a rank that decides nothing: no logits, and rank 0's word for the rest."""

    def _decide(
        self, plan: StepPlan, drafts: HostDrafts | None, drafted: Drafted, hidden: torch.Tensor
    ) -> StepResult:
        buffers, rows = self._buffers, len(drafted.slots)
        assert self._share is not None, "a rank that follows shares in what rank 0 decides"
        self._share(buffers, rows, int(buffers.node_cu[rows]))
        np.cumsum(buffers.accept_lens[:rows], out=buffers.accept_cu[1 : rows + 1])
        total = int(buffers.accept_cu[rows])
        settle(total, drafted.branches, drafted.slots, buffers, self.state, self._kv)
        return self._result(plan, drafts, drafted, total)

    def _score(self, pieces: list[Piece], hidden: torch.Tensor) -> tuple[RowLogprobs, ...]:
        return ()


_NO_DRAFT_MODEL = "ranks on the CPU share no draft model; use --tp-size 1"


class LeaderTimer:
    """Rank 0's timer: the clock says how often each size is run, and the others must know."""

    def __init__(self, timer: StepTimer, group: Ranks) -> None:
        self._timer = timer
        self._group = group

    def measure(self, batch_tokens: Sequence[int]) -> list[float]:
        """Seconds of a step of each size (rising)."""
        times = self._timer.measure(batch_tokens, self._announce)
        self._announce(0)
        return times

    def measure_drafting(self, rows: Sequence[int]) -> list[float]:
        """Raises RuntimeError: no draft model is shared by ranks on the CPU."""
        raise RuntimeError(_NO_DRAFT_MODEL)

    def _announce(self, tokens: int) -> None:
        self._group.agree([torch.tensor([tokens], dtype=torch.int32)])


class FollowerTimer:
    """Runs what a ``LeaderTimer`` announces; the times are the leader's to know."""

    def __init__(self, timer: StepTimer, group: Ranks) -> None:
        self._timer = timer
        self._group = group

    def measure(self, batch_tokens: Sequence[int]) -> list[float]:
        """Run until a size of 0 comes; no times."""
        announced = torch.zeros(1, dtype=torch.int32)
        while True:
            self._group.agree([announced])
            if not announced.item():
                return []
            self._timer.run(int(announced.item()))

    def measure_drafting(self, rows: Sequence[int]) -> list[float]:
        """Raises RuntimeError, as the leader."""
        raise RuntimeError(_NO_DRAFT_MODEL)


def make_cpu_worker(
    info: WorkerInfo,
    model: Model,
    kv: KVPool,
    state: FutureMap,
    timer: StepTimer,
    accept_length: float | None,
    group: Ranks,
) -> TorchWorker:
    """The worker of one of several ranks; ``accept_length`` is rank 0's to force."""
    share = share_decisions(group)
    if group.leads:
        runner = StepRunner(model, kv, state, info.vocab_size, accept_length, share)
        return TorchWorker(info, runner, LeaderTimer(timer, group))
    follower = FollowerRunner(model, kv, state, info.vocab_size, share=share)
    return TorchWorker(info, follower, FollowerTimer(timer, group))
