"""Drafters from other packages: found by entry point, run end to end, refused when broken."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.engine.build import build_engine
from outrider.engine_core.capabilities import to_markdown
from outrider.engine_core.config import EngineConfig, refuse_config
from outrider.engine_core.drafter_loader import make_host_drafter
from outrider.engine_core.drafter_spec import (
    BUILT_IN,
    RESERVED,
    DrafterSpec,
    find_drafter,
    known_drafters,
)
from outrider.engine_core.messages import AddCorpus, RequestOutput
from outrider.engine_core.model_path import resolve_model
from outrider.engine_core.refusal import Refused
from outrider.engine_core.sampling_params import SamplingParams
from outrider.frontend.commands.capabilities import main as capabilities
from outrider.frontend.tokenizer import Tokenizer

from ..engine.cores import drive, request, running_engine, tokens_of

PACKAGE = Path(__file__).parent / "repeat_drafter"
PROMPTS = (
    "def area(self):\n    return self.width * self.height\n\ndef area(self):\n    return",
    "x = 1\nx = 1\nx = 1\n",
    "import os\n",
)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGE))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path that tests fill with a package."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("broken_drafter", None)


def add_package(folder: Path, entry_points: str, code: str = "", name: str = "broken") -> None:
    info = folder / f"{name}_drafter-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-drafter\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[outrider.drafters]\n{entry_points}\n")
    (folder / "broken_drafter.py").write_text(
        f"from outrider.engine_core.drafter_spec import DraftKV, DrafterSpec\n{code}\n"
    )


def config_of(algorithm: str | None, **fields: object) -> EngineConfig:
    values: dict[str, object] = {
        "model": "pycoder",
        "num_threads": 1,
        "max_total_tokens": 4096,
        "max_running_requests": 4,
        "speculative_algorithm": algorithm,
        "speculative_length_policy": "auto" if algorithm is None else "fixed",
        **fields,
    }
    return EngineConfig(**values)  # type: ignore[arg-type]


def outputs_of(algorithm: str | None) -> dict[str, list[RequestOutput]]:
    tokenizer = Tokenizer(resolve_model("pycoder"))
    params = SamplingParams(max_new_tokens=40, temperature=0.0)
    requests = [request(text, tokenizer.encode(text), params) for text in PROMPTS]
    with running_engine(config_of(algorithm)) as engine:
        assert engine.info.drafter == (None if algorithm is None else "REPEAT")
        return drive(engine.core, requests)


@pytest.mark.usefixtures("plugin")
def test_a_plug_in_drafts_and_the_output_is_that_of_plain_decoding() -> None:
    plain, drafted = outputs_of(None), outputs_of("repeat")
    correct = proposed = 0
    for prompt in PROMPTS:
        assert tokens_of(drafted[prompt]) == tokens_of(plain[prompt])
        stats = drafted[prompt][-1].stats
        assert stats is not None
        correct += stats.correct_drafts
        proposed += stats.proposed_drafts
    assert 10 < correct < proposed


@pytest.mark.usefixtures("plugin")
def test_a_plug_in_is_found_by_any_case_and_listed() -> None:
    for name in ("REPEAT", "repeat", "Repeat"):
        found = find_drafter(name)
        assert isinstance(found, DrafterSpec)
        assert found.name == "REPEAT"
        assert refuse_config(config_of(name)) is None
    unknown = find_drafter("REPEATS")
    assert isinstance(unknown, Refused)
    assert unknown.reason.endswith(
        "choose one of DFLASH, DSPARK, EAGLE, EAGLE3, NGRAM, REPEAT, STANDALONE"
    )
    found = find_drafter("REPEAT")
    assert isinstance(found, DrafterSpec)
    assert config_of("repeat").num_draft_tokens(found) == 6
    assert config_of("repeat", speculative_num_draft_tokens=3).num_draft_tokens(found) == 3


def test_a_plug_in_shows_among_the_capabilities(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(not drafter.package for drafter in known_drafters())
    monkeypatch.syspath_prepend(str(PACKAGE))
    add_package(package, "EAGLE = broken_drafter:SPEC", "raise RuntimeError")
    found = {(d.name, d.package): d.refused for d in known_drafters()}
    assert found.pop(("REPEAT", "repeat-drafter")) == ""
    assert "reserved name" in found.pop(("EAGLE", "broken-drafter"))
    assert {name for name, _ in found} == set(BUILT_IN)
    assert capabilities([]) == 0
    text = capsys.readouterr().out
    assert "- REPEAT (repeat-drafter)" in text
    assert text.startswith(to_markdown())
    assert "REPEAT" not in to_markdown()


def test_without_the_package_the_name_is_unknown() -> None:
    unknown = find_drafter("REPEAT")
    assert isinstance(unknown, Refused)
    assert (
        "unknown 'REPEAT'; choose one of DFLASH, DSPARK, EAGLE, EAGLE3, NGRAM, STANDALONE"
        in unknown.reason
    )


@pytest.mark.usefixtures("plugin")
def test_what_belongs_to_ngram_is_refused_with_a_plug_in() -> None:
    refused = refuse_config(config_of("repeat", speculative_ngram_max_trie_depth=5))
    assert refused is not None
    assert refused.field == "speculative_ngram_max_trie_depth"
    assert "NGRAM" in refused.reason
    engine = build_engine(config_of("repeat"))
    try:
        assert engine.assembly.proposer is None
        no_corpora = engine.assembly.control(AddCorpus(1, "c", (b"\1\0\0\0",)))
        assert no_corpora is not None
        assert "NGRAM" in no_corpora.reason
    finally:
        engine.shutdown()


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_names_cannot_be_taken(package: Path, name: str) -> None:
    add_package(package, f"{name.title()} = broken_drafter:SPEC")
    found = find_drafter(name.lower())
    assert isinstance(found, Refused)
    assert f"takes the reserved name {name}" in found.reason
    assert "broken-drafter" in found.reason
    assert isinstance(find_drafter("OTHER"), Refused)


def test_two_packages_cannot_add_the_same_name(package: Path) -> None:
    add_package(package, "twice = broken_drafter:SPEC")
    add_package(package, "TWICE = broken_drafter:SPEC", name="second")
    found = find_drafter("Twice")
    assert isinstance(found, Refused)
    assert "both add TWICE" in found.reason
    assert "broken-drafter" in found.reason
    assert "second-drafter" in found.reason


SPEC = 'SPEC = DrafterSpec(name="{}", implementation="broken_drafter:make", host=True{})'
BROKEN_SPECS = [
    ("raise RuntimeError('no licence')", "cannot be loaded: RuntimeError: no licence"),
    ("import no_such_module", "cannot be loaded: ModuleNotFoundError"),
    ("def (", "cannot be loaded: SyntaxError"),
    ("OTHER = 1", "cannot be loaded: AttributeError"),
    ("SPEC = {'name': 'BROKEN'}", "gives dict, not an outrider DrafterSpec"),
    (SPEC.format("ELSE", ""), "declares the name 'ELSE'"),
    (SPEC.format("BROKEN", ", tree=1.5"), "is not valid"),
    (SPEC.format("BROKEN", ", target_layers=(1, 2)"), "cannot be loaded: TypeError"),
    (SPEC.format("BROKEN", ", default_num_draft_tokens=65"), "default_num_draft_tokens"),
    (SPEC.format("BROKEN", ", default_num_draft_tokens=1"), "must be 2 to 64"),
    (SPEC.format("BROKEN", ", draft_kv=DraftKV.SHARED_SLOTS"), "have a KV pool"),
    (SPEC.format("BROKEN", ", shifts_tokens=True"), "a draft's own KV"),
    (SPEC.format("BROKEN", ", gives_q=True"), "drawn on the device alone"),
    (SPEC.format("BROKEN", ", gives_survival=True"), "drafted on the device"),
]


@pytest.mark.parametrize(("code", "reason"), BROKEN_SPECS)
def test_a_broken_declaration_names_the_entry_point(package: Path, code: str, reason: str) -> None:
    add_package(package, "broken = broken_drafter:SPEC", code)
    refused = refuse_config(config_of("BROKEN"))
    assert refused is not None
    assert refused.field == "speculative_algorithm"
    assert "broken = broken_drafter:SPEC of broken-drafter" in refused.reason
    assert reason in refused.reason
    assert refuse_config(config_of("NGRAM")) is None


BROKEN_MAKERS = [
    ("", "cannot be imported: AttributeError"),
    ("make = 5", "is not a function"),
    ("def make(config): pass", "failed: TypeError"),
    ("def make(config, spec): raise OSError('no table')", "failed: OSError: no table"),
    ("def make(config, spec): return object()", "made object, which is no HostDrafter"),
]


@pytest.mark.parametrize(("code", "reason"), BROKEN_MAKERS)
def test_a_broken_maker_names_the_implementation(package: Path, code: str, reason: str) -> None:
    add_package(package, "broken = broken_drafter:SPEC", SPEC.format("BROKEN", "") + "\n" + code)
    spec = find_drafter("broken")
    assert isinstance(spec, DrafterSpec)
    made = make_host_drafter(spec, config_of("broken"))
    assert isinstance(made, Refused)
    assert made.field == "speculative_algorithm"
    assert made.reason.startswith("BROKEN: broken_drafter:make ")
    assert reason in made.reason


def test_an_implementation_is_a_module_and_an_attribute() -> None:
    made = make_host_drafter(
        DrafterSpec(name="X", implementation="no_colon", host=True), config_of(None)
    )
    assert isinstance(made, Refused)
    assert "module:attribute" in made.reason
