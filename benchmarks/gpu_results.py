"""Makes the results of an NVIDIA H200 anew, one command after the other.

Each command writes one file of ``--folder``; those that fail or take too long are named at the end
and do not stop the others. ``--list`` prints the commands, ``--only`` picks some by name.

    python benchmarks/gpu_results.py --folder benchmarks/results
    python benchmarks/gpu_results.py --folder benchmarks/results --only step-plain prefill
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
STEP = "-m outrider bench step"
QWEN = f"{STEP} --model benchmarks/configs/qwen3-8b --load-format dummy --dtype bfloat16"
WHOLE = "--chunked-prefill-size 8192"  # prompts enter in few steps
EAGLE3 = "--speculative-algorithm EAGLE3"
PROMPTS = "benchmarks/prompts/pycoder_prompts.jsonl"
# On prompts of the embedded model, with its embedded draft.
OFFLINE = (
    f"-m outrider bench offline --model pycoder --prompts {PROMPTS}"
    f" --kind completion {EAGLE3} --speculative-num-steps 5 --repeat 5"
)


class Command(NamedTuple):
    """``arguments`` of the interpreter; {} stands for the result's path. ``limit``: seconds."""

    file: str
    arguments: str
    limit: int
    gpus: int = 1


COMMANDS = {
    "step-plain": Command(
        "h200-step-qwen3-8b-plain.json",
        f"{QWEN} {WHOLE} --batch-size 1 8 32 64 128 256 --context 512 --draft-lengths 0 --steps 64"
        " --json {}",
        150,
    ),
    "step-2k": Command(
        "h200-step-qwen3-8b-2k.json",
        f"{QWEN} {WHOLE} --batch-size 1 --context 2048 --draft-lengths 0 7 --json {{}}",
        90,
    ),
    "step-drafts": Command(
        "h200-step-qwen3-8b.json",
        f"{QWEN} {WHOLE} --batch-size 1 8 32 64 --context 512 --draft-lengths 0 7 --json {{}}",
        150,
    ),
    "step-pycoder": Command(
        "h200-step-pycoder.json",
        f"{STEP} --model pycoder {WHOLE} --batch-size 1 8 32 64 --context 512 --draft-lengths 0 7"
        " --steps 256 --json {}",
        120,
    ),
    "grammar": Command(
        "h200-grammar-qwen3-8b.json", "benchmarks/bench_grammar_gpu.py --json {}", 240
    ),
    "grammar-masks": Command("h200-grammar-masks.json", "benchmarks/bench_masks.py --json {}", 90),
    "prefill": Command(
        "h200-prefill-qwen3-8b.json",
        f"{QWEN} {WHOLE} --batch-size 2 --prefill-lengths 8192 --json {{}}",
        90,
    ),
    "ngram-source": Command(
        "h200-ngram-source.json", "benchmarks/bench_ngram_source.py --json {}", 150
    ),
    "memory": Command("h200-memory.json", "benchmarks/memory_gpu.py --json {}", 200),
    "attention": Command("h200-attention.json", "benchmarks/bench_attention_gpu.py --json {}", 120),
    "draft": Command("h200-draft.json", "benchmarks/bench_draft_gpu.py --json {}", 200),
    "linear": Command("h200-linear.json", "benchmarks/bench_linear_gpu.py --json {}", 200),
    "round": Command(
        "h200-round-qwen3-8b-eagle3.json",
        f"{QWEN} {WHOLE} {EAGLE3} --speculative-draft-model-path"
        " benchmarks/configs/qwen3-8b-eagle3 --speculative-num-steps 3"
        " --simulate-accept-length 3.0 --batch-size 1 8 32 64 --context 512 --steps 64 --json {}",
        200,
    ),
    "round-dflash": Command(
        "h200-round-qwen3-8b-dflash.json",
        f"{QWEN} {WHOLE} --speculative-algorithm DFLASH --speculative-draft-model-path"
        " benchmarks/configs/qwen3-8b-dflash --simulate-accept-length 5.0"
        " --batch-size 1 8 32 64 --context 512 --steps 64 --json {}",
        200,
    ),
    "round-dspark": Command(
        "h200-round-qwen3-8b-dspark.json",
        f"{QWEN} {WHOLE} --speculative-algorithm DSPARK --speculative-draft-model-path"
        " benchmarks/configs/qwen3-8b-dspark --simulate-accept-length 4.0"
        " --batch-size 1 8 32 64 --context 512 --steps 64 --json {}",
        200,
    ),
    "ragged": Command(
        "h200-ragged-qwen3-8b.json",
        "benchmarks/bench_ragged.py --model benchmarks/configs/qwen3-8b --load-format dummy"
        " --dtype bfloat16 --draft benchmarks/configs/qwen3-8b-dspark --simulate-survival 0.8"
        " --json {}",
        580,
    ),
    "ragged-pycoder": Command(
        "h200-ragged-pycoder.json",
        f"benchmarks/bench_ragged.py --prompts {PROMPTS} --json {{}}",
        580,
    ),
    "confidence": Command(
        "h200-confidence.json",
        f"benchmarks/bench_confidence.py --device cuda --batch-size 64 --prompts {PROMPTS}"
        " --new-tokens 512 --json {}",
        300,
    ),
    "eagle3-b1": Command(
        "h200-eagle3-completion-b1.json",
        f"{OFFLINE} --batch-size 1 --speculative-length-policy fixed --json {{}}",
        300,
    ),
    "eagle3-b64": Command(
        "h200-eagle3-completion-b64.json",
        f"{OFFLINE} --batch-size 64 --max-running-requests 64 --json {{}}",
        200,
    ),
    **{
        f"exact-{part}": Command(
            f"h200-exact-{part}.json", f"benchmarks/exactness_gpu.py --only {part} --json {{}}", 580
        )
        for part in ("plain", "ngram", "drafts", "blocks")
    },
    "exact-tp2": Command("h200-exact-tp2.json", "benchmarks/exactness_tp.py --json {}", 580, 2),
    "step-tp2": Command(
        "h200-step-qwen3-8b-tp2.json",
        f"{QWEN} {WHOLE} --tp-size 2 --batch-size 1 8 32 64 --context 512 --draft-lengths 0"
        " --steps 48 --json {}",
        150,
        2,
    ),
}


def run(command: Command, folder: Path) -> str:
    """Run one command; what went wrong, if anything."""
    # The files quote their commands: no machine's folders in them.
    path = os.path.relpath(folder / command.file, ROOT)
    arguments = [sys.executable, *shlex.split(command.arguments.format(shlex.quote(path)))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen(arguments, cwd=ROOT, env=environment, start_new_session=True)
    try:
        code = child.wait(command.limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return f"took more than {command.limit} s"
    return "" if code == 0 else f"ended with {code}"


def main() -> int:
    """Run the commands; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, metavar="NAME")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="those for so many")
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    args = parser.parse_args()
    names = args.only or [name for name, one in COMMANDS.items() if one.gpus == args.gpus]
    if args.list:
        for name in names:
            print(f"{name}: python {COMMANDS[name].arguments.format(COMMANDS[name].file)}")
        return 0
    args.folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names:
        began = time.perf_counter()
        wrong = run(COMMANDS[name], args.folder.resolve())
        print(f"== {name}: {wrong or 'ok'}, {time.perf_counter() - began:.0f} s", flush=True)
        if wrong:
            failed.append(f"{name} {wrong}")
    print("\n".join(failed) or "all ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
