"""What ``outrider bench step`` asks of its measuring process, and the answer: a JSON line each."""

import msgspec

from .config import EngineConfig
from .memory_report import MemoryReport


class StepBenchSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every batch size at every context with every draft length, ``steps`` decode steps each.

    ``prefill_lengths``: prompts of so many tokens are prefilled, every batch size of each.
    ``config`` is plain, or has a draft model: then rounds are measured, and ``draft_lengths`` is
    (0,). Its pool and its running requests are sized for the largest of these.
    """

    config: EngineConfig
    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    draft_lengths: tuple[int, ...]
    steps: int
    prefill_lengths: tuple[int, ...] = ()
    seed: int = 0


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement; times are milliseconds a step, None where there is no such thing.

    - ``mode``: "engine", the core's loop of plan, launch, collect and commit; "round", the same
      with a draft model that drafts for every row of every step; or "device_only", plans made by
      hand, launched one ahead. Compare rows of one mode, and rounds with "engine".
    - ``draft_length`` k: random drafts, or a draft model's, verified with the bonus token: k + 1
      query tokens a row.
    - ``mean_context``: mean length of the requests over the timed steps, the query tokens included.
    - ``wall_ms``, ``wall_p90_ms``: median and 90th percentile between two results;
      ``wall_mean_ms`` is the whole over the steps. ``device_ms``: mean time on the device.
    - ``idle_ms`` = wall_mean_ms - device_ms; ``gap_ms``: mean time from a step's end to the next
      one's begin by the device's own clock.
    - ``floor_ms`` = max(weight_bytes / copy rate, operations / matmul rate) + kv_bytes / copy rate;
      ``ratio`` = wall_ms / floor_ms. A round's bytes and operations are those of the target and of
      all forwards of the draft, heads included.
    - ``bare_ms``: the step's CUDA graph replayed back to back; ``share_of_bare`` =
      bare_ms / wall_mean_ms, steps a second beside those of the bare loop.
    - ``verify_over_plain``: wall_ms over that of draft length 0, same mode, batch and context; of
      a round over the plain step of an engine without a draft model.
    - ``accept_length``: tokens emitted a row and step, of rounds. ``simulated``: it was forced, so
      ``tokens_per_s`` says nothing of the models.
    """

    mode: str
    batch_size: int
    context: int
    draft_length: int
    steps: int
    mean_context: float
    wall_ms: float
    wall_p90_ms: float
    wall_mean_ms: float
    steps_per_s: float
    tokens_per_s: float
    device_ms: float
    idle_ms: float
    gap_ms: float | None
    plan_us: float | None
    commit_us: float | None
    decode_steps: int | None
    graph_replays: int | None
    replay_share: float | None
    weight_bytes: int
    kv_bytes: int
    operations: int
    floor_ms: float
    ratio: float
    bare_ms: float | None
    bare_steps_per_s: float | None
    share_of_bare: float | None
    verify_over_plain: float | None
    accept_length: float | None = None
    simulated: bool = False


class PrefillRow(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill of ``batch_size`` prompts of ``prompt_tokens`` tokens through the core's loop.

    - ``chunk_tokens``: the most prompt tokens of a step, over all requests; ``steps``: those it
      took, mean of the turns; ``graph_replays``: those of them that replayed a CUDA graph, null
      where there are none.
    - ``wall_ms``: median time until every prompt has its one token; ``device_ms``: mean time of
      the steps on the device.
    - ``linear_operations``: 2 x elements x tokens of the layers' matrices, and of the output head
      for the last tokens; ``attention_operations``: causal, 4 x query width x tokens seen.
    - ``tflop_per_s``: of both over wall_ms; ``matmul_share``: that over the measured matmul rate,
      ``device_matmul_share``: the same over device_ms.
    """

    batch_size: int
    prompt_tokens: int
    chunk_tokens: int
    steps: float
    wall_ms: float
    device_ms: float
    tokens_per_s: float
    linear_operations: int
    attention_operations: int
    tflop_per_s: float
    matmul_share: float
    device_matmul_share: float
    graph_replays: float | None = None


class StepBenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was measured. ``build_s``: loading, and capturing graphs; ``seconds``: all.

    ``copy_gb_per_s`` counts bytes read and bytes written; ``matmul_tflop_per_s`` is of square
    matrices of random numbers in ``rate_dtype``. ``streamed_bytes``: the weights without an
    embedding table of their own. ``memory``: of a CUDA device, without what measuring the rates
    took.
    """

    model: str
    device: str
    device_name: str
    dtype: str
    torch: str
    copy_gb_per_s: float
    matmul_tflop_per_s: float
    weight_bytes: int
    streamed_bytes: int
    kv_bytes_per_token: int
    kv_pool_tokens: int
    build_s: float
    seconds: float
    rows: list[StepRow]
    prefills: list[PrefillRow]
    memory: MemoryReport | None
    config: EngineConfig


class StepBenchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The report, or why there is none; ``field`` names the setting at fault when one is known."""

    report: StepBenchReport | None = None
    field: str = ""
    message: str = ""


def shown_rate(value: float) -> str:
    """A rate with one decimal, or three significant digits below 10: a CPU's are small."""
    return f"{value:.1f}" if value >= 10.0 else f"{value:.3g}"


def encode_line(message: StepBenchSpec | StepBenchAnswer) -> bytes:
    """One JSON line, newline included."""
    return msgspec.json.encode(message) + b"\n"


def decode_spec(line: bytes) -> StepBenchSpec:
    """Read what to measure. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(line, type=StepBenchSpec)


def decode_answer(line: bytes) -> StepBenchAnswer:
    """Read the answer. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(line, type=StepBenchAnswer)
