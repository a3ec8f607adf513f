"""A draft model is found and checked before anything is loaded."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.engine_core import model_path
from outrider.engine_core.config import EngineConfig
from outrider.engine_core.draft_config import SpecShape
from outrider.engine_core.draft_source import DraftSource, find_draft
from outrider.engine_core.model_config import ModelConfig, load_model_config
from outrider.engine_core.refusal import Refused, RefusedError

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
QWEN = load_model_config(CONFIGS / "qwen3-8b")
EAGLE3 = CONFIGS / "qwen3-8b-eagle3"
PATH = "speculative_draft_model_path"


def find(
    algorithm: str | None, target: ModelConfig = QWEN, **fields: Any
) -> DraftSource | Refused | None:
    given = {"model": "m", "load_format": "dummy", **fields}
    config = EngineConfig(speculative_algorithm=algorithm, **given)
    try:
        return find_draft(config, target)
    except RefusedError as error:
        return error.refused


def found(algorithm: str, **fields: Any) -> DraftSource:
    draft = find(algorithm, **fields)
    assert isinstance(draft, DraftSource), draft
    return draft


def refused(algorithm: str, **fields: Any) -> Refused:
    draft = find(algorithm, **fields)
    assert isinstance(draft, Refused), draft
    return draft


def eagle(folder: Path, **fields: Any) -> str:
    """The config of an EAGLE draft for ``QWEN``."""
    folder.mkdir(exist_ok=True)
    raw = json.loads((EAGLE3 / "config.json").read_text())
    raw = {k: v for k, v in raw.items() if k not in ("draft_vocab_size", "eagle_config")}
    raw |= {"architectures": ["LlamaForCausalLMEagle"], **fields}
    (folder / "config.json").write_text(json.dumps(raw))
    return str(folder)


def test_a_folder_is_taken_as_it_is() -> None:
    draft = found("EAGLE3", speculative_draft_model_path=str(EAGLE3))
    assert draft.folder == EAGLE3
    assert (draft.config.feature_size, draft.config.draft_vocab_size) == (3 * 4096, 32_000)
    assert draft.shape == SpecShape(3, 1, 4)
    assert (draft.load_format, draft.stored, draft.token_map) == ("dummy", {}, None)
    assert find(None) is None
    assert find("NGRAM") is None


def test_a_drafts_own_shape_is_its_default(tmp_path: Path) -> None:
    own = {"steps": 5, "topk": 4, "num_draft_tokens": 16}
    path = eagle(tmp_path, outrider=own)
    assert found("EAGLE", speculative_draft_model_path=path).shape == SpecShape(5, 4, 16)
    steps = found("EAGLE", speculative_draft_model_path=path, speculative_num_steps=2)
    assert steps.shape == SpecShape(2, 1, 3)
    path = eagle(tmp_path, outrider={"steps": 5, "topk": 1, "num_draft_tokens": 16})
    assert "16 is not steps + 1" in refused("EAGLE", speculative_draft_model_path=path).reason


def test_the_embedded_targets_draft_is_found_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package" / "engine_core"
    package.mkdir(parents=True)
    monkeypatch.setattr(model_path, "__file__", str(package / "model_path.py"))
    models = package.parent / "models"
    models.mkdir()
    answer = refused("EAGLE", model="pycoder")
    assert answer.field == PATH
    assert "EAGLE needs one; no draft of it ships with 'pycoder'" in answer.reason
    eagle(models / "pycoder-11m-eagle")
    assert found("EAGLE", model="pycoder").folder == models / "pycoder-11m-eagle"
    assert refused("EAGLE3", model="pycoder").field == PATH
    # A folder is no embedded target, whatever its name.
    assert refused("EAGLE", model=str(models / "pycoder-11m")).field == PATH
    other = eagle(tmp_path / "other")
    path = found("EAGLE", model="pycoder", speculative_draft_model_path=other).folder
    assert path == Path(other)


@pytest.mark.parametrize(
    ("path", "revision", "field", "words"),
    [
        ("/none/here", None, PATH, "was not found"),
        (__file__, None, PATH, "is a file; give the folder"),
        ("nobody/no-such-draft", "v1", PATH, "nobody/no-such-draft at v1"),
        (str(EAGLE3), "v1", "speculative_draft_model_revision", "has no revisions"),
        (str(CONFIGS), None, PATH, "has no config.json"),
    ],
)
def test_a_draft_that_is_not_there_names_its_flag(
    path: str, revision: str | None, field: str, words: str
) -> None:
    answer = refused(
        "EAGLE3", speculative_draft_model_path=path, speculative_draft_model_revision=revision
    )
    assert (answer.field, words in answer.reason) == (field, True), answer


def test_a_draft_that_does_not_fit_its_target_is_refused(tmp_path: Path) -> None:
    short = eagle(tmp_path, max_position_embeddings=2048)
    answer = refused("EAGLE", speculative_draft_model_path=short)
    assert answer.field == PATH
    assert "--context-length 2048" in answer.reason
    assert found("EAGLE", speculative_draft_model_path=short, context_length=2048)
    vocab = eagle(tmp_path, vocab_size=1000)
    assert "vocab_size" in refused("EAGLE", speculative_draft_model_path=vocab).reason
    assert refused("EAGLE", speculative_draft_model_path=str(EAGLE3)).field == PATH
    wide = msgspec.structs.replace(QWEN, hidden_size=5120)
    draft = find("EAGLE3", wide, speculative_draft_model_path=str(EAGLE3))
    assert isinstance(draft, Refused)


def test_a_branch_more_than_the_draft_has_tokens(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text("[5, 2, 9]")
    fields: dict[str, Any] = {
        "speculative_draft_model_path": eagle(tmp_path),
        "speculative_token_map": str(tmp_path / "map.json"),
        "speculative_num_steps": 2,
        "speculative_num_draft_tokens": 6,
    }
    draft = found("EAGLE", speculative_eagle_topk=3, **fields)
    assert draft.token_map == (5, 2, 9)
    assert (draft.config.draft_vocab_size, draft.config.hot_tokens) == (3, True)
    answer = refused("EAGLE", speculative_eagle_topk=4, **fields)
    assert answer.field == "speculative_eagle_topk"
    assert answer.reason == "4 exceeds the 3 tokens that the draft knows; ask for no more"


def test_hot_tokens_need_their_map(tmp_path: Path) -> None:
    path = eagle(tmp_path, hot_vocab_size=4)
    answer = refused("EAGLE", speculative_draft_model_path=path)
    assert answer.field == "speculative_token_map"
    (tmp_path / "map.json").write_text("[1, 2, 3]")
    fields = {"speculative_draft_model_path": path}
    file = str(tmp_path / "map.json")
    assert "names 3 tokens" in refused("EAGLE", speculative_token_map=file, **fields).reason
    (tmp_path / "map.json").write_text("[1, 2, 3, 0]")
    assert found("EAGLE", speculative_token_map=file, **fields).token_map == (1, 2, 3, 0)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("map.pt", "[1]", "is a pickle"),
        ("map.json", "{}", "must hold a JSON list"),
        ("map.json", "[1.5]", "must hold a JSON list"),
        ("map.json", "[", "must hold a JSON list"),
        ("map.json", "[]", "names no token"),
        ("map.json", "[1, 151936]", "151936 is no id of the target's 151936 tokens; give a map"),
        ("map.json", "[-1]", "-1 is no id"),
        ("map.json", "[1, 2, 1]", "names a token twice"),
        ("map.json", None, "cannot be read"),
    ],
)
def test_a_token_map_is_a_json_list(
    tmp_path: Path, name: str, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    answer = refused(
        "EAGLE",
        speculative_draft_model_path=eagle(tmp_path / "draft"),
        speculative_token_map=str(tmp_path / name),
    )
    assert answer.field == "speculative_token_map"
    assert words in answer.reason


def test_the_draft_has_a_load_format_of_its_own() -> None:
    for draft_format, expected in ((None, "dummy"), ("auto", "auto")):
        draft = found(
            "EAGLE3",
            speculative_draft_model_path=str(EAGLE3),
            speculative_draft_load_format=draft_format,
        )
        assert draft.load_format == expected
