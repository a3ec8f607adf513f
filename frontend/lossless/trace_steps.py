"""Where in a trace a failure is: the step that gave the first wrong token."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from ...engine_core.ids import i32
from ...engine_core.messages import GenerateRequest
from ...engine_core.plan import StepResult
from ...engine_core.sampling_params import SamplingParams
from ...engine_core.trace import StepDone, TraceError, TraceReader


class Sought(NamedTuple):
    """A request with drafts, and its output up to and with the first wrong token.

    ``after``: the steps that were done before it was sent. Requests of several rows are equal but
    for what they are compared with, so this tells them apart.
    """

    prompt: list[int]
    params: SamplingParams
    output: tuple[int, ...]
    after: int


class _Served(NamedTuple):
    prompt: bytes
    params: SamplingParams
    tokens: list[int]
    steps: list[int]  # of each token


def find_steps(path: str, wanted: Sequence[Sought]) -> list[int | None]:
    """The step of each failure's last token; None where the trace does not hold it."""
    try:
        served = _served(path)
    except (TraceError, OSError):
        return [None] * len(wanted)
    return [_step(served, one) for one in wanted]


def _served(path: str) -> list[_Served]:
    """All requests with drafts, in the order of arrival."""
    served: dict[str, _Served] = {}
    step = 0
    for frame in TraceReader(path):
        if isinstance(frame, GenerateRequest) and frame.speculative:
            served[frame.rid] = _Served(frame.prompt, frame.params, [], [])
        elif isinstance(frame, StepResult):
            step = frame.step
        elif isinstance(frame, StepDone):
            for output in frame.outputs:
                one = served.get(output.rid)
                if one is not None:
                    tokens = i32(output.tokens).tolist()
                    one.tokens.extend(tokens)
                    one.steps.extend([step] * len(tokens))
    return list(served.values())


def _step(served: list[_Served], wanted: Sought) -> int | None:
    prompt, length = array("i", wanted.prompt).tobytes(), len(wanted.output)
    for one in served:
        if (
            0 < length <= len(one.steps)
            and one.steps[0] > wanted.after
            and one.prompt == prompt
            and one.params == wanted.params
            and tuple(one.tokens[:length]) == wanted.output
        ):
            return one.steps[length - 1]
    return None
