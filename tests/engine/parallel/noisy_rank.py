"""A rank that reaches decisions of its own from logits with noise of 1e-3, and keeps a count.

Runs in place of ``rank_process``; ``OUTRIDER_TEST_NOISE`` names the file that the count goes to,
``OUTRIDER_TEST_MODEL`` the checkpoint whose output head, of ``OUTRIDER_TEST_VOCAB`` rows, it uses.
"""

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from outrider.engine.parallel import cpu_steps, rank_process
from outrider.engine.speculative.verify import decide
from outrider.engine.step import Drafted
from outrider.engine.weights import Checkpoint
from outrider.engine_core.plan import HostDrafts, StepPlan, StepResult

NOISE = 1e-3
COUNTS = Path(os.environ["OUTRIDER_TEST_NOISE"])


class NoisyRunner(cpu_steps.FollowerRunner):
    """Writes its own decisions where rank 0's will stand, and disturbs its hidden states."""

    _generator = torch.Generator().manual_seed(0)
    _nodes = _differ = 0
    lm_head: torch.Tensor

    def _decide(
        self, plan: StepPlan, drafts: HostDrafts | None, drafted: Drafted, hidden: torch.Tensor
    ) -> StepResult:
        picked = hidden.index_select(0, drafted.batch.logits_index)
        clean = F.linear(picked, self.lm_head)
        noisy = clean + NOISE * torch.randn(clean.shape, generator=self._generator)
        self._nodes += len(picked)
        self._differ += int((clean.argmax(1) != noisy.argmax(1)).sum())
        decide(noisy.argmax(1), drafted.slots, drafted.branches, self._buffers)
        result = super()._decide(plan, drafts, drafted, hidden.fill_(torch.nan))
        COUNTS.write_text(f"{self._nodes} {self._differ}")
        return result


def main() -> int:
    checkpoint = Checkpoint(Path(os.environ["OUTRIDER_TEST_MODEL"]))
    vocab = int(os.environ["OUTRIDER_TEST_VOCAB"])
    NoisyRunner.lm_head = checkpoint.take("lm_head.weight", (vocab, 16))
    cpu_steps.FollowerRunner = NoisyRunner  # type: ignore[misc]
    return rank_process.main()


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
