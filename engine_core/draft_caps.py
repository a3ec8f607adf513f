"""Room for drafts in the rows of a step's plan."""

from .ids import I32, i32
from .plan import HostDrafts, StepPlan


def draft_room(plan: StepPlan) -> I32:
    """int32[R]: most drafts of each row, whoever makes them."""
    room: I32 = i32(plan.q_caps) - 1
    rows = plan.verify_rows
    if rows < len(room):
        room[rows:] = 0
    return room


def device_caps(plan: StepPlan) -> I32:
    """int32[R]: drafts that a drafter on the device makes of the rows of a step, at most.

    The step is not late-bound: of one that is the host's drafts say it.
    """
    caps = draft_room(plan)
    if plan.device_caps:
        given = i32(plan.device_caps)
        caps[: len(given)] = given
    return caps


def no_drafts(plan: StepPlan, on_device: bool = False) -> HostDrafts:
    """Drafts of a step to which the host adds none; ``on_device``: a drafter there may."""
    nothing = bytes(4 * plan.num_rows)
    return HostDrafts(
        plan.step, nothing, b"", b"", device_caps(plan).tobytes() if on_device else b""
    )
