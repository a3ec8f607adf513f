"""The ``outrider`` command over the scripted core: ``fake_cli.py PER_STEP STEP_MS args...``."""

import sys
from pathlib import Path

from outrider.frontend import launch
from outrider.frontend.cli import main

FAKE_CORE = Path(__file__).with_name("fake_core_process.py")


def fake_command(per_step: str = "2", step_ms: str = "1") -> list[str]:
    """How the scripted core is started."""
    return [sys.executable, str(FAKE_CORE), per_step, step_ms]


if __name__ == "__main__":
    command = fake_command(*sys.argv[1:3])
    launch.core_command = lambda: command
    sys.exit(main(sys.argv[3:]))
