"""Work that may never come back: a device that hangs, a rank that is gone."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

_POLL_S = 0.05


def bounded(work: Callable[[], object], seconds: float) -> bool:
    """Run ``work`` in a thread; False if it takes longer and is left behind."""
    thread = threading.Thread(target=work, name="outrider-bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def unless(work: Callable[[], None], stopped: Callable[[], bool]) -> bool:
    """Run ``work`` in a thread; False if ``stopped()`` says so first and it is left behind.

    Raises what ``work`` raises.
    """
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    threading.Thread(target=run, name="outrider-unless", daemon=True).start()
    while not wait([outcome], _POLL_S).done:
        if stopped():
            return False
    outcome.result()
    return True
