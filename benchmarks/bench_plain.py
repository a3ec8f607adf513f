"""Plain decoding at batch 1 against transformers' generate: same prompts, dtype and one thread.

Both sides run float32 on one thread with a KV cache (transformers with sdpa under inference
mode), are warmed up, take turns prompt by prompt, and generate the same number of tokens. The
time includes the prompt's prefill and, on Outrider's side, its whole path: the offline ``LLM``
class, the engine-core process, tokenization and detokenization.

    python benchmarks/bench_plain.py --json benchmarks/results/plain-cpu.json
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "pycoder-11m"
PROMPTS = ROOT / "benchmarks" / "prompts" / "pycoder_prompts.jsonl"


def load_prompts(count: int) -> list[str]:
    """The first ``count`` completion prompts."""
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    return [row["prompt"] for row in rows if row["kind"] == "completion"][:count]


def summary(rates: list[float]) -> dict[str, float]:
    """Median and range of tokens/s over the repeats."""
    return {
        "median": round(statistics.median(rates), 1),
        "min": round(min(rates), 1),
        "max": round(max(rates), 1),
    }


def main() -> int:
    """Run the comparison and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    peer = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="sdpa"
    )
    peer.train(False)
    peer.generation_config.eos_token_id = None
    prompts = load_prompts(args.prompts)
    params = SamplingParams(temperature=0.0, max_new_tokens=args.max_new_tokens, ignore_eos=True)

    def run_peer(prompt: str) -> list[int]:
        batch = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            full = peer.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=args.max_new_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
            )
        ids: list[int] = full[0, batch["input_ids"].shape[1] :].tolist()
        tokenizer.decode(ids)
        return ids

    rates: dict[str, list[float]] = {"transformers": [], "outrider": []}
    equal = 0
    with LLM(model="pycoder", num_threads=1, disable_radix_cache=True) as llm:

        def run_outrider(prompt: str) -> list[int]:
            return list(llm.generate([prompt], params)[0].output_ids)

        for prompt in prompts[:2]:
            run_peer(prompt)
            run_outrider(prompt)
        for _ in range(args.repeats):
            seconds = {"transformers": 0.0, "outrider": 0.0}
            for prompt in prompts:
                outputs = {}
                for name, run in (("transformers", run_peer), ("outrider", run_outrider)):
                    start = time.perf_counter()
                    outputs[name] = run(prompt)
                    seconds[name] += time.perf_counter() - start
                equal += outputs["transformers"] == outputs["outrider"]
            for name, spent in seconds.items():
                rates[name].append(len(prompts) * args.max_new_tokens / spent)
    ratio = [b / a for a, b in zip(rates["transformers"], rates["outrider"], strict=True)]
    report = {
        "command": "python benchmarks/bench_plain.py " + " ".join(sys.argv[1:]),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "prompts": len(prompts),
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
        "threads": 1,
        "dtype": "float32",
        "tokens_per_second": {name: summary(values) for name, values in rates.items()},
        "speedup": summary(ratio),
        "equal_outputs": f"{equal} of {len(prompts) * args.repeats}",
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
