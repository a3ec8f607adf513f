"""What was timed, and the report's row made of it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...engine_core.draft_source import DraftSource
from ...engine_core.model_config import ModelConfig
from ...engine_core.round_floor import draft_work
from ...engine_core.step_bench import StepRow
from ...engine_core.step_floor import Rates, step_work
from ..worker import DeviceCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch of ``batch_size`` requests whose prompts have ``context`` tokens."""

    mode: str
    batch_size: int
    context: int
    draft_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of consecutive decode steps, in seconds.

    ``walls`` float64[steps]; ``device_s`` over all steps; ``length``: mean tokens of a request;
    ``counts``: over the timed steps; ``plan_s``, ``commit_s``: CPU time of a step; ``bare_s``: a
    bare replay. ``emitted``: tokens of all steps.
    """

    walls: npt.NDArray[np.float64]
    device_s: float
    length: float
    emitted: int
    counts: DeviceCounts | None
    bare_s: float | None
    plan_s: float | None = None
    commit_s: float | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """What a floor depends on beside the step. ``simulated``: accept lengths are forced."""

    model: ModelConfig
    rates: Rates
    streamed_bytes: int
    kv_bytes_per_token: int
    dtype: str
    draft: DraftSource | None = None
    simulated: bool = False


def make_row(machine: Machine, case: Case, timing: Timing, plain: StepRow | None = None) -> StepRow:
    """The report's row; ``plain``: that of draft length 0 in the same mode."""
    tokens = case.batch_size * (1 + case.draft_length)
    work = step_work(
        machine.model,
        machine.streamed_bytes,
        machine.kv_bytes_per_token,
        case.batch_size,
        tokens,
        timing.length,
    )
    if machine.draft is not None:
        config, shape = machine.draft.config, machine.draft.shape
        work = work.with_drafts(
            draft_work(config, shape, machine.dtype, case.batch_size, timing.length)
        )
    steps, total = len(timing.walls), float(timing.walls.sum())
    wall, mean = float(np.median(timing.walls)), total / steps
    device, floor = timing.device_s / steps, work.floor(machine.rates)
    counts, bare = timing.counts, timing.bare_s
    return StepRow(
        mode=case.mode,
        batch_size=case.batch_size,
        context=case.context,
        draft_length=case.draft_length,
        steps=steps,
        mean_context=timing.length,
        wall_ms=wall * 1e3,
        wall_p90_ms=float(np.percentile(timing.walls, 90)) * 1e3,
        wall_mean_ms=mean * 1e3,
        steps_per_s=1 / mean,
        tokens_per_s=timing.emitted / total,
        device_ms=device * 1e3,
        idle_ms=(mean - device) * 1e3,
        gap_ms=None if counts is None else counts.gap_ns * 1e-6 / steps,
        plan_us=None if timing.plan_s is None else timing.plan_s * 1e6,
        commit_us=None if timing.commit_s is None else timing.commit_s * 1e6,
        decode_steps=None if counts is None else counts.decode_steps,
        graph_replays=None if counts is None else counts.replays,
        replay_share=None if counts is None else counts.replays / max(1, counts.decode_steps),
        weight_bytes=work.weight_bytes,
        kv_bytes=work.kv_bytes,
        operations=work.operations,
        floor_ms=floor * 1e3,
        ratio=wall / floor,
        bare_ms=None if bare is None else bare * 1e3,
        bare_steps_per_s=None if bare is None else 1 / bare,
        share_of_bare=None if bare is None else bare / mean,
        verify_over_plain=None if plain is None else wall * 1e3 / plain.wall_ms,
        accept_length=(None if machine.draft is None else timing.emitted / case.batch_size / steps),
        simulated=machine.simulated,
    )
