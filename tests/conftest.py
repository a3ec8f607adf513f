"""Shared set-up: invariant checks on, the Triton interpreter without a GPU, quiet hypothesis."""

import os
from pathlib import Path

os.environ.setdefault("OUTRIDER_CHECK", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "0" if Path("/dev/nvidia0").exists() else "1")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "outrider",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("outrider")
