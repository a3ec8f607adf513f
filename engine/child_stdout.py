"""Standard output of a child process, kept for the line that its parent reads."""

import os
import sys
from typing import BinaryIO


def take_stdout() -> BinaryIO:
    """Standard output as bytes; whatever else prints from now on goes to standard error."""
    kept = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return kept
