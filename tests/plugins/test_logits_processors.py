"""Logits processors from other packages: found by name, made once, refused when broken."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.engine_core.capabilities import plugins_text, to_markdown
from outrider.engine_core.config import CoreConfig, EngineConfig, refuse_config, resolve_config
from outrider.engine_core.processor_loader import LoadedProcessor, ProcessorSet, processors_of
from outrider.engine_core.processor_names import (
    RESERVED,
    Processor,
    find_processors,
    known_processors,
)
from outrider.engine_core.refusal import Refused, RefusedError
from outrider.engine_core.worker import WorkerInfo

from ..engine.processor_package import example_processors

INFO = WorkerInfo(
    vocab_size=16, context_length=512, num_pages=64, page_size=16, max_slots=8, eos_ids=(0,),
    weight_bytes=1, kv_bytes_per_token=8, num_threads=1, device="cpu", dtype="float32",
)  # fmt: skip
GOOD = """
class Good:
    def __init__(self, context):
        self.context = context
    def request(self, arguments):
        return dict(arguments)
    def apply(self, logits, nodes):
        pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path that tests fill with a package."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("some_processors", None)


def add_package(folder: Path, entry_points: str, code: str = GOOD, name: str = "some") -> None:
    info = folder / f"{name}_processors-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}-processors\nVersion: 0.1\n"
    )
    (info / "entry_points.txt").write_text(f"[outrider.logits_processors]\n{entry_points}\n")
    (folder / "some_processors.py").write_text(code)


def resolved(asked: str | None, **fields: object) -> CoreConfig:
    config = EngineConfig(model="m", logits_processors=asked, **fields)  # type: ignore[arg-type]
    found = resolve_config(config, INFO)
    assert not isinstance(found, Refused), str(found)
    return found


def load(asked: str) -> ProcessorSet:
    found = processors_of(resolved(asked))
    assert found is not None
    return found


def broken(asked: str) -> str:
    with pytest.raises(RefusedError) as caught:
        load(asked)
    assert caught.value.refused.field == "logits_processors"
    return caught.value.refused.reason


def refused(asked: str, **fields: object) -> Refused:
    config = EngineConfig(model="m", logits_processors=asked, **fields)  # type: ignore[arg-type]
    found = refuse_config(config)
    assert found is not None
    assert found.field == "logits_processors"
    return found


def test_processors_are_named_by_entry_point_or_by_class(package: Path) -> None:
    add_package(package, "good = some_processors:Good")
    place = "some_processors:Good"
    assert find_processors("good, other=some_processors:Good,some_processors:Good") == (
        Processor("good", place, f"entry point good = {place} of some-processors"),
        Processor("other", place, place),
        Processor("Good", place, place),
    )
    loaded = load("good,other=some_processors:Good").loaded
    assert [one.name for one in loaded] == ["good", "other"]
    context = loaded[0].processor.context  # type: ignore[attr-defined]
    assert (context.vocab_size, context.eos_ids, context.device) == (16, (0,), "cpu")
    assert (context.context_length, context.model) == (512, "m")


def test_they_are_made_once_and_never_where_nobody_asks(package: Path) -> None:
    add_package(package, "good = some_processors:Good", "raise RuntimeError('imported')")
    assert processors_of(resolved(None)) is None
    assert refuse_config(EngineConfig(model="m", logits_processors="good")) is None
    assert "RuntimeError: imported" in broken("good")
    (package / "some_processors.py").write_text(GOOD)
    assert load("good") is load("good")


def test_what_a_name_may_not_be_is_refused(package: Path) -> None:
    add_package(package, "good = some_processors:Good\nlogit_bias = some_processors:Good")
    unknown = refused("bad")
    assert unknown.status == 400
    assert "no package here adds 'bad' (they add: good, logit_bias)" in unknown.reason
    assert "some-processors: logit_bias is a reserved name" in refused("logit_bias").reason
    assert "call it NAME=some_processors:Good" in refused("logit_bias").reason
    for name in RESERVED:
        assert "reserved" in refused(f"{name.title()}=some_processors:Good").reason
    assert "letters, digits" in refused("9=some_processors:Good").reason
    assert "must be NAME, module:Class" in refused("x=some_processors").reason
    assert "stands there twice" in refused("good,some_processors:Good,good").reason
    assert "is empty" in refused("good,").reason
    assert refused("").reason.startswith("must not be empty")


def test_two_packages_cannot_add_the_same_name(package: Path) -> None:
    add_package(package, "twice = some_processors:Good")
    add_package(package, "twice = some_processors:Good", name="second")
    assert "both add 'twice'; uninstall one" in refused("twice").reason
    assert "second-processors" in refused("twice").reason
    assert "keep one" in known_processors()[0].refused


def test_several_ranks_are_refused() -> None:
    found = refused("a=some_processors:Good", tp_size=2)
    assert found.status == 501
    assert "--tp-size 1" in found.reason


BROKEN = [
    ("import no_such_module", "cannot be imported: ModuleNotFoundError"),
    ("OTHER = 1", "cannot be imported: AttributeError"),
    ("Good = 5", "is no class"),
    ("class Good: pass", "has no method 'request'; see docs/logits-processors.md"),
    ("class Good:\n    def request(self, a): pass", "has no method 'apply'"),
    (GOOD.replace("self.context = context", "raise OSError('no table')"), "no table"),
]


@pytest.mark.parametrize(("code", "reason"), BROKEN)
def test_a_broken_class_names_the_entry_point(package: Path, code: str, reason: str) -> None:
    add_package(package, "good = some_processors:Good", code)
    found = broken("good")
    assert found.startswith("good: entry point good = some_processors:Good of some-processors ")
    assert reason in found


def test_what_is_wrong_with_arguments_names_the_processor() -> None:
    class Moody:
        def __init__(self, error: Exception) -> None:
            self._error = error

        def request(self, arguments: object) -> object:
            raise self._error

    class Mute(Exception):
        def __str__(self) -> str:
            raise KeyError

    for error, status, reason in (
        (
            Mute(),
            500,
            "the processor failed on its arguments: Mute: "
            "an exception whose text cannot be had (KeyError)",
        ),
        (ValueError("back: too far"), 400, "back: too far"),
        (KeyError("back"), 400, "KeyError: 'back'"),
        (TypeError("no number"), 400, "TypeError: no number"),
        (OSError("disk"), 500, "the processor failed on its arguments: OSError: disk"),
        (ValueError(501 * "x"), 400, 500 * "x" + " ..."),
    ):
        moody = ProcessorSet((LoadedProcessor("moody", Moody(error)),))
        found = moody.refuse({"moody": {}})
        assert found == Refused("logits_processors.moody", reason, status)


def test_installed_ones_show_among_the_capabilities(package: Path) -> None:
    assert "Logits processors that" not in plugins_text()
    with example_processors():
        add_package(package, "ebnf = some_processors:Good", "raise RuntimeError")
        text = plugins_text()
    assert "Logits processors that packages installed here add:" in text
    assert "- two_back (example-processors)\n" in text
    assert "- ebnf (some-processors): ebnf is a reserved name" in text
    assert "two_back" not in to_markdown()
