"""One server over the fake core for the tests that leave it as they found it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with tempfile.TemporaryDirectory(prefix="out-") as folder, live_server(Path(folder)) as live:
        yield live


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="out-") as folder:
        yield Path(folder)
