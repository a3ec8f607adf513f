"""Servers of the embedded model for the served matrix: one a drafter, and one without."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from exactness import CHAIN, DEAR, TREE
from load_http import serve

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "pycoder-11m"
FLAGS = ("--device", "cpu", "--dtype", "float32", "--num-threads", "1",
         "--max-running-requests", "8", "--chunked-prefill-size", "64",
         "--enable-priority-scheduling", "--priority-preemption-threshold", "2",
         "--tool-call-parser", "hermes",
         "--context-length", "256", "--max-total-tokens", "512",
         "--logits-processors", "served_processor:Unlike")  # fmt: skip
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}\n{% endif %}"
)


def _shape(shape: tuple[int, int, int]) -> tuple[str, ...]:
    steps, topk, nodes = map(str, shape)
    return ("--speculative-num-steps", steps, "--speculative-eagle-topk", topk,
            "--speculative-num-draft-tokens", nodes)  # fmt: skip


_RAGGED = ("--speculative-dspark-sps-table-path", str(DEAR), "--speculative-ragged-verify-mode")
# Name: the algorithm, its flags.
DRAFTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "NGRAM": ("NGRAM", ()),
    "STANDALONE": ("STANDALONE", _shape(CHAIN)),
    "STANDALONE tree": ("STANDALONE", _shape(TREE)),
    "EAGLE": ("EAGLE", _shape(CHAIN)),
    "EAGLE tree": ("EAGLE", _shape(TREE)),
    "EAGLE3": ("EAGLE3", _shape(CHAIN)),
    "EAGLE3 tree": ("EAGLE3", _shape(TREE)),
    "DFLASH": ("DFLASH", ()),
    "DSPARK": ("DSPARK", ()),
    "DSPARK cap-accept": ("DSPARK", (*_RAGGED, "cap-accept")),
    "DSPARK compact": ("DSPARK", (*_RAGGED, "compact")),
}
CHAINS = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "DFLASH", "DSPARK")


@contextlib.contextmanager
def server(drafter: str | None, template: Path) -> Iterator[str]:
    """The URL of a server with a drafter, or with none. ``template``: a tokenizer that chats."""
    flags = [*FLAGS, "--tokenizer-path", str(template), "--log-level", "warning"]
    if drafter is not None:
        algorithm, more = DRAFTERS[drafter]
        flags += ["--speculative-algorithm", algorithm, "--speculative-length-policy", "fixed"]
        flags += more
    with serve(*flags, modules=Path(__file__).parent) as (url, _):
        yield url


@contextlib.contextmanager
def chat_tokenizer() -> Iterator[Path]:
    """A folder with the embedded model's tokenizer and a chat template, which it has none of."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODEL / file, folder)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        yield folder
