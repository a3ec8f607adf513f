"""One server over the fake core for the tests that leave it as they found it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.frontend.tokenizer import Tokenizer

from .fake_core import MODEL
from .live_server import LiveServer, live_server

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with tempfile.TemporaryDirectory(prefix="out-") as folder, live_server(Path(folder)) as live:
        yield live


@pytest.fixture(scope="module")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("chat")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODEL / name).read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with (
        tempfile.TemporaryDirectory(prefix="out-") as short,
        live_server(Path(short), Tokenizer(folder)) as live,
    ):
        yield live


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="out-") as folder:
        yield Path(folder)
