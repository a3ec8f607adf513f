"""What a user is told of an engine whose accept lengths are forced."""

import sys

from ..engine_core.messages import CoreInfo

SIMULATED = "simulated: accept lengths are forced (--simulate-accept-length); texts mean nothing"


def warn_if_simulated(info: CoreInfo) -> None:
    """Say so on standard error, for commands that show or write texts."""
    if info.simulated:
        print(f"outrider: {SIMULATED}", file=sys.stderr, flush=True)
