"""A rank that raises in its eighth step, or refuses or sleeps through it: its argument says so.

Runs in place of ``rank_process``.
"""

import os
import sys
import time

import torch

from outrider.engine.parallel import cpu_steps, rank_process
from outrider.engine.step import Drafted
from outrider.engine_core.plan import HostDrafts, StepPlan, StepResult
from outrider.engine_core.refusal import Refused, RefusedError


class FailingRunner(cpu_steps.FollowerRunner):
    """Takes part in seven steps."""

    def _decide(
        self, plan: StepPlan, drafts: HostDrafts | None, drafted: Drafted, hidden: torch.Tensor
    ) -> StepResult:
        if plan.step >= 7:
            if sys.argv[1] == "refuse":
                raise RefusedError(Refused("mem_fraction_static", "rank 1 had enough"))
            if sys.argv[1] == "sleep":
                time.sleep(600.0)
            raise ValueError("rank 1 had enough")
        return super()._decide(plan, drafts, drafted, hidden)


if __name__ == "__main__":
    cpu_steps.FollowerRunner = FailingRunner  # type: ignore[misc]
    status = rank_process.main()
    sys.stderr.flush()
    os._exit(status)
