"""The example processors, a package outside of the repository's, on the import path."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "plugins" / "example_processors"


@contextmanager
def example_processors() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(EXAMPLES))
        yield
