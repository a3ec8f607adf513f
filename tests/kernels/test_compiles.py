"""Kernels also compile, the interpreted ones and the one that no interpreter runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("script", "last"), [("compile_drafts.py", "_expand_tree"), ("compile_stream.py", "split=2")]
)
def test_kernels_compile_without_a_gpu(script: str, last: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    path = Path(__file__).with_name(script)
    done = subprocess.run(
        [sys.executable, path], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert last in done.stdout
