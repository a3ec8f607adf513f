"""Work that may never come back: a device that hangs, a rank that is gone."""

import threading
from collections.abc import Callable


def bounded(work: Callable[[], None], seconds: float) -> bool:
    """Run ``work`` in a thread; False if it takes longer and is left behind."""
    thread = threading.Thread(target=work, name="outrider-bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
