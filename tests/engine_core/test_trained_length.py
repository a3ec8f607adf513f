"""Contexts beyond the texts that a block draft was trained on: config.json, note and finding."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.engine_core.config import EngineConfig
from outrider.engine_core.draft_checks import check_draft
from outrider.engine_core.draft_config_json import load_draft_config
from outrider.engine_core.draft_source import find_draft
from outrider.engine_core.model_config import ModelConfigError, load_model_config
from outrider.engine_core.trained_length import trained_length

from ..engine.block_checkpoints import write_block
from ..engine.draft_checkpoints import write_eagle3
from ..engine.tiny import write_checkpoint

CONTEXT = 512  # of the target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), 40, layers=4)


def draft(folder: Path, target: Path, length: object = 64, **fields: Any) -> Path:
    shape = {"steps": 3, "topk": 1, "num_draft_tokens": 4, "trained_length": length}
    return write_block(folder, target, outrider=shape, **fields)


def asked(target: Path, folder: Path, algorithm: str = "DFLASH", **fields: Any) -> EngineConfig:
    return EngineConfig(
        model=str(target),
        speculative_algorithm=algorithm,
        speculative_draft_model_path=str(folder),
        **fields,
    )


def notes(config: EngineConfig) -> list[str]:
    found = find_draft(config, load_model_config(Path(config.model)))
    assert found is not None
    return [note for note in found.notes if note.startswith("speculative_draft_window_size")]


@pytest.mark.parametrize(
    ("fields", "reach"),
    [
        ({}, CONTEXT),
        ({"context_length": 65}, 65),
        ({"context_length": 64}, None),
        ({"speculative_draft_window_size": 64}, None),
        ({"speculative_draft_window_size": 100}, 100),
        ({"speculative_draft_window_size": 100, "context_length": 64}, None),
    ],
)
def test_a_context_beyond_training_is_told_at_the_start_and_by_the_doctor(
    target: Path, tmp_path: Path, fields: dict[str, Any], reach: int | None
) -> None:
    assert load_model_config(target).context_length == CONTEXT
    config = asked(target, draft(tmp_path, target), **fields)
    [finding] = [f for f in check_draft(config) if f.check == "trained length"]
    if reach is None:
        assert (finding.level, finding.remedy, notes(config)) == ("ok", "", [])
        return
    assert finding.level == "warning"
    assert f"sees up to {reach} tokens, but was trained on texts of 64," in finding.found
    assert "--speculative-draft-window-size 64, or train" in finding.remedy
    assert "--sequence-length" in finding.remedy
    [note] = notes(config)
    assert note == f"speculative_draft_window_size: {finding.found}; {finding.remedy}"


@pytest.mark.parametrize("said", [None, {"steps": 3, "topk": 1, "num_draft_tokens": 4}])
def test_drafts_that_do_not_say_are_fine(target: Path, tmp_path: Path, said: object) -> None:
    config = asked(target, write_block(tmp_path, target, outrider=said))
    assert "trained length" not in {finding.check for finding in check_draft(config)}
    assert not notes(config)


def test_other_drafts_are_not_asked(target: Path, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path, target)
    path = folder / "config.json"
    shape = {"steps": 2, "topk": 1, "num_draft_tokens": 3, "trained_length": 64}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"outrider": shape}))
    config = asked(target, folder, "EAGLE3")
    assert "trained length" not in {finding.check for finding in check_draft(config)}
    assert not notes(config)


def test_layers_that_all_slide_see_no_further_than_their_windows(
    target: Path, tmp_path: Path
) -> None:
    def reach(*types: str) -> int:
        folder = draft(tmp_path, target, layer_types=list(types), sliding_window=32)
        config = load_draft_config(folder, load_model_config(target), "DFLASH")
        found = trained_length(config, CONTEXT, None)
        assert found is not None
        return found.reach

    assert reach("sliding_attention", "sliding_attention") == 32
    assert reach("sliding_attention", "full_attention") == CONTEXT


@pytest.mark.parametrize(
    ("length", "says"),
    [(0, "must be 1 or more, is 0; write the --seq"), ("long", 'got `str`, is "long"; correct')],
)
def test_a_length_that_cannot_be_is_refused(
    target: Path, tmp_path: Path, length: object, says: str
) -> None:
    folder = draft(tmp_path, target, length)
    with pytest.raises(ModelConfigError, match=f"outrider.trained_length: .*{says}"):
        load_draft_config(folder, load_model_config(target), "DFLASH")


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_the_embedded_drafts_say_it(algorithm: str) -> None:
    config = EngineConfig(model="pycoder", speculative_algorithm=algorithm)
    [finding] = [f for f in check_draft(config) if f.check == "trained length"]
    assert finding.level == "warning"
    assert "--speculative-draft-window-size 1024" in finding.remedy
