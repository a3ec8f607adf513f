"""Ask a process of the engine one question: a line in, a line out, its messages on stderr."""

import os
import subprocess
import sys

from .errors import LaunchError


def ask_child(module: str, line: bytes) -> tuple[bytes, int]:
    """Standard output and exit status of ``python -m module`` with ``line`` on standard input.

    ``-P`` keeps the working folder off its import path. Raises LaunchError if it cannot start.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", module],
            input=line,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            check=False,
        )
    except OSError as error:
        raise LaunchError(f"{module} could not be started: {error}") from None
    return done.stdout, done.returncode
