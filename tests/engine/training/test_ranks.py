"""Two processes train one draft: rank 0's clock ends the run, and rank 0 alone writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from ..tiny import write_checkpoint

VOCAB = 64


def test_two_ranks_end_at_the_same_step_with_the_same_draft(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "target", VOCAB)
    np.save(tmp_path / "text.npy", np.random.default_rng(0).integers(1, VOCAB, size=8_000))
    output = tmp_path / "draft"
    names = [tmp_path / name for name in ("store", "target", "text.npy", "draft")]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank.py")), rank, *map(str, names)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        for rank in ("0", "1")
    ]
    try:
        ends = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in ends)
    steps, seconds = first["position"]
    assert (first.pop("failed"), second.pop("failed")) == ("RefusedError", "RuntimeError")
    assert first == second
    assert seconds >= 0.02 * 60
    assert first["tokens"] == steps * 2 * 4 * 32
    # A line of the log for each step, and one at the end: rank 1 wrote none.
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, steps + 1), steps]
    assert load_file(output / "model.safetensors")
    assert "EAGLE3" in ends[0][1]
    assert "EAGLE3" not in ends[1][1]
