"""How true DSPARK's confidence is: its calibration error by draft position, without and with STS.

    python benchmarks/bench_confidence.py --prompts work/corpus/selection.npy --json confidence.json

The engine decodes greedily, verifies every draft and records a trace (``OUTRIDER_TRACE``), which
has the confidence and the accept length of every verify step. A sample is one row of a step with
room for all drafts: survival, the product of confidence up to a position, beside whether the
position was accepted. The error is that of 15 equal-width bins of survival
(docs/verify_planner.md). ``ece_before`` has all temperatures 1, ``ece_after`` those of ``--sts``,
by default of the draft's own sts.json; a draft without one is fitted to every second request and
tried on the others. ``--npz`` keeps the samples for ``outrider profile sts``.

``--prompts``: token ids (.npy, documents behind each other as benchmarks/python_corpus.py writes
them), prompts (.jsonl, field ``prompt``), or any other text file. Ids and texts are cut into pieces
of ``--prompt-tokens`` tokens, spread over the file.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from outrider.engine.build import build_engine
from outrider.engine_core.config import EngineConfig
from outrider.engine_core.draft_source import find_draft
from outrider.engine_core.ids import F32, I32, I64, RowKind, i32, u8
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.model_path import resolve_model
from outrider.engine_core.plan import StepPlan, StepResult
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.step_times import F64
from outrider.engine_core.sts_table import (
    BINS,
    STS_FILE,
    calibration_error,
    confidence,
    fit_sts,
    identity_sts,
    read_sts,
)
from outrider.engine_core.trace import TRACE_VARIABLE, TraceReader

LEAST = 20_000  # samples that a result is worth showing with
_EPS = 1e-7  # how near to 0 and 1 a float32 chance is told apart


class Samples(NamedTuple):
    """Of n rows and G positions: ``logits`` float32[n, G], ``accepted`` float32[n, G], 1 where the
    position was accepted, and ``serials`` int64[n], the requests that the rows are of."""

    logits: F32
    accepted: F32
    serials: I64


def read_prompts(path: Path, model: Path, tokens: int, count: int) -> list[I32]:
    """``count`` prompts at most, spread over the file. Raises SystemExit for too short a file."""
    if path.suffix == ".npy":
        return _pieces(np.load(path).astype(np.int32), tokens, count)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = path.read_text()
    if path.suffix != ".jsonl":
        return _pieces(np.array(tokenizer.encode(text).ids, np.int32), tokens, count)
    rows = [json.loads(line)["prompt"] for line in text.splitlines() if line]
    chosen = [rows[i * len(rows) // count] for i in range(count)] if count < len(rows) else rows
    return [np.array(tokenizer.encode(row).ids, np.int32) for row in chosen]


def _pieces(ids: I32, tokens: int, count: int) -> list[I32]:
    most = len(ids) // tokens
    if most < 1:
        raise SystemExit(f"--prompts: {len(ids)} tokens, {tokens} are needed for one prompt")
    count = min(count, most)
    return [ids[i * most // count * tokens :][:tokens] for i in range(count)]


def record(config: EngineConfig, prompts: Sequence[I32], new_tokens: int, trace: Path) -> None:
    """Decode all prompts with every draft verified, and keep the trace."""
    before = os.environ.get(TRACE_VARIABLE)
    os.environ[TRACE_VARIABLE] = str(trace)
    try:
        engine = build_engine(config)
    finally:
        if before is None:
            del os.environ[TRACE_VARIABLE]
        else:
            os.environ[TRACE_VARIABLE] = before
    params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
    try:
        for index, prompt in enumerate(prompts):
            refused = engine.core.submit(
                GenerateRequest(str(index), prompt.tobytes(), params, stream=False)
            )
            if refused is not None:
                raise SystemExit(f"prompt {index}: {refused}")
        while engine.core.has_work:
            engine.core.step()
    finally:
        engine.shutdown()


def read_samples(trace: Path, gamma: int) -> Samples:
    """Rows with room for all drafts, from a trace whose temperatures are all 1."""
    serial_of: dict[int, int] = {}
    plans: dict[int, StepPlan] = {}
    chances: list[F32] = []
    lengths: list[I32] = []
    serials: list[list[int]] = []
    for frame in TraceReader(trace):
        if isinstance(frame, StepPlan):
            plans[frame.step] = frame
            serial_of |= {init.slot: init.serial for init in frame.inits}
        elif isinstance(frame, StepResult):
            plan = plans.pop(frame.step)
            verify = u8(plan.kinds) == RowKind.VERIFY
            drafts = i32(plan.q_caps)[verify] - 1
            given = np.frombuffer(frame.confidence, np.float32).reshape(-1, gamma)
            full = drafts == gamma
            chances.append(given[full[drafts > 0]])
            lengths.append(i32(frame.accept_lens)[verify][full])
            serials.append([serial_of[slot] for slot in i32(plan.slots)[verify][full].tolist()])
    chance = np.concatenate(chances).astype(np.float64).clip(_EPS, 1.0 - _EPS)
    logits: F32 = np.log(chance / (1.0 - chance)).astype(np.float32)
    accepted: F32 = (np.arange(1, gamma + 1) < np.concatenate(lengths)[:, None]).astype(np.float32)
    return Samples(logits, accepted, np.array([s for some in serials for s in some], np.int64))


def errors(samples: Samples, temperatures: Sequence[float]) -> list[float]:
    """Expected calibration error of the survival at each position."""
    chances = confidence(samples.logits, np.array(temperatures))
    survival: F64 = np.cumprod(chances, axis=1, dtype=np.float64)
    accepted = samples.accepted.astype(np.float64)
    return [
        round(calibration_error(survival[:, k], accepted[:, k]), 5)
        for k in range(len(temperatures))
    ]


def judge(samples: Samples, sts: Path | None) -> dict[str, object]:
    """Errors by position without and with STS, of ``sts`` or of a table fitted to half of them."""
    logits, accepted, serials = samples
    temperatures: Sequence[float]
    if sts is not None:
        source, tried = f"{sts.resolve().parent.name}/{sts.name}", samples
        temperatures = read_sts(str(sts), logits.shape[1]).temperatures
    else:
        mine = serials % 2 == 0
        source = "fitted to every second request, tried on the others"
        tried = Samples(logits[~mine], accepted[~mine], serials[~mine])
        temperatures = fit_sts(logits[mine], accepted[mine]).temperatures
    after = errors(tried, temperatures)
    return {
        "sts": source,
        "temperatures": [round(value, 4) for value in temperatures],
        "samples_tried": len(tried.logits),
        "accepted": [round(float(value), 4) for value in tried.accepted.mean(axis=0)],
        "ece_before": errors(tried, [1.0] * logits.shape[1]),
        "ece_after": after,
        "worst_after": max(after),
    }


def main() -> int:
    """Measure, print and write; 1 where there are fewer samples than asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pycoder")
    parser.add_argument("--draft", help="the draft's folder; the embedded one if left out")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--count", type=int, default=1000, help="prompts at most")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--sts", type=Path, help="an STS table other than the draft's own")
    parser.add_argument("--least", type=int, default=LEAST, help="samples that are needed")
    parser.add_argument("--npz", type=Path, help="keep the samples for `outrider profile sts`")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    begin = time.perf_counter()
    folder = resolve_model(args.model)
    prompts = read_prompts(args.prompts, folder, args.prompt_tokens, args.count)
    config = EngineConfig(
        model=args.model,
        device=args.device,
        dtype=args.dtype,
        max_running_requests=args.batch_size,
        disable_overlap_schedule=True,  # no rows of requests that have ended
        speculative_algorithm="DSPARK",
        speculative_draft_model_path=args.draft,
        speculative_length_policy="fixed",
        speculative_ragged_verify_mode="compact",
        skip_tokenizer_init=True,
    )
    source = find_draft(config, load_model_config(folder))
    assert source is not None
    gamma, own = source.shape.steps, source.folder / STS_FILE
    with tempfile.TemporaryDirectory() as place:
        ones, trace = Path(place, "ones.json"), Path(place, "trace")
        ones.write_text(json.dumps({"temperatures": identity_sts(gamma).temperatures}))
        config = msgspec.structs.replace(config, speculative_dspark_confidence_sts_path=str(ones))
        record(config, prompts, args.new_tokens, trace)
        samples = read_samples(trace, gamma)
    report = {
        "command": "python benchmarks/bench_confidence.py " + " ".join(sys.argv[1:]),
        "device": args.device,
        "prompts": len(prompts),
        "samples": len(samples.logits),
        "bins": BINS,
        "new_tokens": args.new_tokens,
        **judge(samples, args.sts or (own if own.is_file() else None)),
        "seconds": round(time.perf_counter() - begin, 1),
    }
    if args.npz is not None:
        np.savez(args.npz, logits=samples.logits, prefix_mask=samples.accepted)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    if len(samples.logits) < args.least:
        print(f"{len(samples.logits)} samples, {args.least} are needed: more prompts or tokens")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
