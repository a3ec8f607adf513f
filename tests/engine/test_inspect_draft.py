"""The weights of a draft, read for ``outrider doctor``: all that is wrong is found."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.inspect_draft import inspect
from outrider.engine_core.config import EngineConfig
from outrider.engine_core.draft_finding import Finding
from outrider.engine_core.draft_inspection import DraftInspection
from outrider.engine_core.refusal import RefusedError

from .block_checkpoints import write_block
from .draft_checkpoints import Tensors, token_map, write_eagle, write_eagle3, write_standalone
from .tiny import write_checkpoint

VOCAB = 40


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), VOCAB, layers=4)


def look(target: Path, draft: Path, algorithm: str, **fields: object) -> DraftInspection:
    values: dict[str, object] = {
        "model": str(target),
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(draft),
        **fields,
    }
    return inspect(EngineConfig(**values))  # type: ignore[arg-type]


def by_check(inspection: DraftInspection) -> dict[str, Finding]:
    return {finding.check: finding for finding in inspection.findings}


def change(draft: Path, drop: tuple[str, ...] = (), **tensors: torch.Tensor) -> Path:
    """Rewrite a draft's tensors; dots are written as two underscores."""
    held: Tensors = load_file(draft / "model.safetensors")
    held = {name: tensor for name, tensor in held.items() if name not in drop}
    held |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({k: v.contiguous() for k, v in held.items()}, draft / "model.safetensors")
    return draft


def test_whole_drafts_are_ok(target: Path, tmp_path: Path) -> None:
    three = look(target, write_eagle3(tmp_path / "a", target), "EAGLE3")
    assert {finding.level for finding in three.findings} == {"ok"}
    assert "d2t and t2d agree: 20" in by_check(three)["draft vocabulary"].found
    assert three.draft_tokens is not None
    assert len(set(three.draft_tokens)) == 20
    one = look(target, write_eagle(tmp_path / "b", target), "EAGLE")
    alone = look(target, write_standalone(tmp_path / "c", target), "STANDALONE")
    for inspection in (one, alone):
        assert [finding.level for finding in inspection.findings] == ["ok"]
        assert inspection.draft_tokens is None
    assert "tensors read" in by_check(alone)["weights"].found


def test_a_shared_vocabulary_says_so(target: Path, tmp_path: Path) -> None:
    whole = look(target, write_eagle3(tmp_path / "a", target, draft_vocab=0), "EAGLE3")
    assert by_check(whole)["draft vocabulary"].found == "the target's own"
    assert whole.draft_tokens is None


def test_missing_misshapen_and_unread_tensors_are_all_named(target: Path, tmp_path: Path) -> None:
    draft = change(
        write_eagle3(tmp_path / "a", target),
        drop=("midlayer.mlp.down_proj.weight",),
        norm__weight=torch.ones(5),
        extra__weight=torch.ones(3),
    )
    weights = by_check(look(target, draft, "EAGLE3"))["weights"]
    assert weights.level == "failed"
    for part in ("mlp.down_proj.weight", "[5]", "'extra.weight'"):
        assert part in weights.found
    assert weights.remedy
    broken = change(write_standalone(tmp_path / "s", target), drop=("lm_head.weight",))
    found = by_check(look(target, broken, "STANDALONE"))["weights"].found
    assert "lm_head.weight" in found


def test_numbers_that_are_none_are_found(target: Path, tmp_path: Path) -> None:
    draft = write_eagle3(tmp_path / "a", target)
    held = load_file(draft / "model.safetensors")["fc.weight"]
    held[1, 2] = torch.nan
    weights = by_check(look(target, change(draft, fc__weight=held), "EAGLE3"))["weights"]
    assert weights.level == "failed"
    assert "NaN or infinity in model.fc.weight" in weights.found


def test_maps_that_disagree_are_found(target: Path, tmp_path: Path) -> None:
    other = token_map(torch.arange(20), VOCAB)
    draft = change(write_eagle3(tmp_path / "a", target), t2d=other["t2d"])
    vocabulary = by_check(look(target, draft, "EAGLE3"))["draft vocabulary"]
    assert vocabulary.level == "failed"
    assert "disagree" in vocabulary.found


def test_no_checkpoint_and_none_asked_for(target: Path, tmp_path: Path) -> None:
    draft = write_eagle3(tmp_path / "a", target)
    (draft / "model.safetensors").unlink()
    dummy = look(target, draft, "EAGLE3", speculative_draft_load_format="dummy")
    assert dummy == DraftInspection()
    with_names = look(target, draft, "EAGLE3")
    assert by_check(with_names)["weights"].level == "failed"


def test_what_cannot_be_used_is_refused(target: Path, tmp_path: Path) -> None:
    draft = write_eagle3(tmp_path / "a", target)
    with pytest.raises(RefusedError, match="context"):
        look(target, draft, "EAGLE3", context_length=100_000)


def test_block_drafts(target: Path, tmp_path: Path) -> None:
    whole = look(target, write_block(tmp_path / "a", target, "DSPARK"), "DSPARK")
    assert (whole.findings[0].check, whole.findings[0].level) == ("weights", "ok")
    assert whole.draft_tokens is None
    nan = torch.full((16,), torch.nan)
    draft = write_block(tmp_path / "b", target)
    change(
        draft, ("fc.weight", "layers.1.mlp.up_proj.weight"), norm__weight=nan, d2t=nan[:4].clone()
    )
    weights = [f for f in look(target, draft, "DFLASH").findings if f.check == "weights"]
    assert [finding.level for finding in weights] == ["failed", "failed"]
    for words in ("model.fc.weight", "layers.1.mlp.up_proj", "'d2t'"):
        assert words in weights[0].found
    assert "NaN or infinity in model.norm.weight" in weights[1].found
