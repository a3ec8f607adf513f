"""Kernels that the interpreter has run also compile."""

import os
import subprocess
import sys
from pathlib import Path


def test_the_kernels_of_drafts_compile_without_a_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_drafts.py")
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "_expand_tree" in done.stdout
