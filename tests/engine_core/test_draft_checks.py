"""What is said of a draft's files before anything is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine_core.config import EngineConfig
from outrider.engine_core.draft_checks import algorithm_of, check_draft
from outrider.engine_core.draft_finding import Finding
from outrider.engine_core.model_path import ModelNotFound
from outrider.engine_core.refusal import RefusedError
from outrider.engine_core.tokenizer_match import match_tokenizers

from ..engine.block_checkpoints import write_block
from ..engine.draft_checkpoints import write_eagle, write_eagle3, write_standalone
from ..engine.tiny import write_checkpoint

VOCAB = 40


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), VOCAB, layers=4)


def check(target: Path, draft: Path, algorithm: str, **fields: object) -> dict[str, Finding]:
    """Findings by check; each is made once."""
    values: dict[str, object] = {
        "model": str(target),
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(draft),
        **fields,
    }
    found = list(check_draft(EngineConfig(**values)))  # type: ignore[arg-type]
    by_check = {finding.check: finding for finding in found}
    assert len(by_check) == len(found)
    return by_check


def edit(draft: Path, **fields: Any) -> Path:
    path = draft / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return draft


def test_a_draft_that_fits_is_ok_in_every_check(target: Path, tmp_path: Path) -> None:
    three = check(target, write_eagle3(tmp_path / "e3", target), "EAGLE3")
    assert {finding.level for finding in three.values()} == {"ok"}
    assert set(three) == {
        "tokenizer", "vocabulary", "end of text", "hidden width", "captured layers", "positions",
        "types", "shape",
    }  # fmt: skip
    assert "of which the draft knows 20 (50%)" in three["vocabulary"].found
    assert three["captured layers"].found == (
        "the embedding and outputs of layers 1, 3, of 4 counted from 0"
    )
    assert "3 steps of topk 1" in three["shape"].found
    one = check(target, write_eagle(tmp_path / "e1", target), "EAGLE")
    assert one["captured layers"].found == "the target's final hidden state"
    alone = check(target, write_standalone(tmp_path / "s", target), "standalone")
    assert alone["tokenizer"].level == "warning"


def test_types_are_those_of_the_file_that_is_loaded(target: Path, tmp_path: Path) -> None:
    """The draft's own load format decides, whatever the target's is."""
    draft = write_eagle3(tmp_path, target)
    dummy, auto = {"load_format": "dummy"}, {"speculative_draft_load_format": "auto"}
    assert "types" in check(target, draft, "EAGLE3", **dummy, **auto)
    assert "types" not in check(target, draft, "EAGLE3", **dummy)
    assert "types" not in check(target, draft, "EAGLE3", speculative_draft_load_format="dummy")


def test_a_context_that_the_target_lacks_is_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"context_length: .* exceeds the model"):
        check(target, write_eagle3(tmp_path, target), "EAGLE3", context_length=1 << 20)


def test_a_drafter_without_a_model_has_nothing_to_check() -> None:
    assert not list(check_draft(EngineConfig(model="pycoder", speculative_algorithm="NGRAM")))


def test_a_draft_that_is_not_there_is_no_finding(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="speculative_draft_model_path"):
        check(target, tmp_path / "absent", "EAGLE3")


@pytest.mark.parametrize(
    ("fields", "name", "found"),
    [
        ({"vocab_size": 50}, "vocabulary", "50 is not the target's 40"),
        ({"target_hidden_size": 24}, "hidden width", "24"),
        ({"max_position_embeddings": 64}, "positions", "shorter than the target's context"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}},
            "captured layers",
            "[2, 3, 10]",
        ),
        ({"quantization_config": {"bits": 4}}, "types", "quantized checkpoints"),
        ({"architectures": ["BertModel"]}, "architecture", "BertModel"),
        ({"hidden_size": "wide"}, "hidden width", 'Expected `int`, got `str`, is "wide"'),
    ],
)
def test_what_misfits_fails_by_name_and_says_what_to_do(
    target: Path, tmp_path: Path, fields: dict[str, Any], name: str, found: str
) -> None:
    draft = edit(write_eagle3(tmp_path / "d", target), **fields)
    finding = check(target, draft, "EAGLE3")[name]
    assert finding.level == "failed"
    assert found in finding.found
    assert finding.remedy


def test_all_that_misfits_is_found_at_once(target: Path, tmp_path: Path) -> None:
    draft = edit(write_eagle3(tmp_path / "d", target), vocab_size=50, max_position_embeddings=64)
    found = check(target, draft, "EAGLE3")
    bad = {name for name, finding in found.items() if finding.level == "failed"}
    assert bad == {"vocabulary", "positions"}
    assert "shape" not in found


def test_a_shorter_context_lets_a_shorter_draft_pass(target: Path, tmp_path: Path) -> None:
    draft = edit(write_eagle3(tmp_path / "d", target), max_position_embeddings=64)
    assert check(target, draft, "EAGLE3", context_length=64)["positions"].level == "ok"


def test_what_starting_would_refuse_is_found(target: Path, tmp_path: Path) -> None:
    draft = edit(
        write_eagle3(tmp_path / "d", target),
        outrider={"steps": 60, "topk": 8, "num_draft_tokens": 64},
    )
    failed = [f for f in check(target, draft, "EAGLE3").values() if f.level == "failed"]
    assert len(failed) == 1
    assert "outrider" in failed[0].found


def test_types_are_read_from_the_headers(target: Path, tmp_path: Path) -> None:
    draft = write_eagle3(tmp_path / "d", target)
    tensors = load_file(draft / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)
    save_file(tensors, draft / "model.safetensors")
    types = check(target, draft, "EAGLE3")["types"]
    assert types.level == "failed"
    assert "'fc.weight' is I8" in types.found
    (draft / "model.safetensors").write_bytes(b"no header")
    assert check(target, draft, "EAGLE3")["types"].level == "failed"
    (draft / "model.safetensors").unlink()
    assert "no *.safetensors" in check(target, draft, "EAGLE3")["types"].found


def test_another_end_of_text_is_a_warning(target: Path, tmp_path: Path) -> None:
    draft = edit(write_eagle3(tmp_path / "d", target), eos_token_id=7)
    end = check(target, draft, "EAGLE3")["end of text"]
    assert end.level == "warning"
    assert "[7]" in end.found


def test_a_drafts_tensors_say_what_it_is(target: Path, tmp_path: Path) -> None:
    assert algorithm_of(write_eagle3(tmp_path / "a", target)) == "EAGLE3"
    assert algorithm_of(write_eagle3(tmp_path / "f", target, uses_final=True)) == "EAGLE3"
    assert algorithm_of(write_eagle(tmp_path / "b", target)) == "EAGLE"
    assert algorithm_of(write_standalone(tmp_path / "c", target)) == "STANDALONE"


def tokenizer(folder: Path, vocab: Any, merges: Any = (), added: Any = ()) -> Path:
    folder.mkdir(exist_ok=True)
    made = {
        "model": {"type": "BPE", "vocab": vocab, "merges": list(merges)},
        "added_tokens": [{"id": token, "content": text} for text, token in added],
    }
    (folder / "tokenizer.json").write_text(json.dumps(made))
    return folder


VOCABULARY = {"a": 0, "b": 1, "ab": 2}


@pytest.mark.parametrize(
    ("vocab", "merges", "added", "level", "found"),
    [
        (VOCABULARY, ["a b"], [("<s>", 3)], "ok", "4 ids and the merges"),
        (VOCABULARY, [["a", "b"]], [("<s>", 3)], "ok", "4 ids and the merges"),
        (VOCABULARY, [["b", "a"]], [("<s>", 3)], "warning", "other merges"),
        (
            {"a": 0, "b": 1},
            [],
            [("<s>", 3)],
            "warning",
            "1 tokens that the draft's tokenizer lacks",
        ),
        ({"b": 0, "a": 1, "ab": 2}, ["a b"], [("<s>", 3)], "failed", "2 of the draft's 4 tokens"),
        ({**VOCABULARY, "c": 9}, ["a b"], [], "failed", "'c' is no token and 9"),
        ([["a", -1.0], ["b", -2.0], ["ab", -3.0]], [], [("<s>", 3)], "warning", "other merges"),
    ],
)
def test_tokenizers_are_compared_token_by_token(
    tmp_path: Path, vocab: Any, merges: Any, added: Any, level: str, found: str
) -> None:
    own = tokenizer(tmp_path / "own", VOCABULARY, ["a b"], [("<s>", 3)])
    other = tokenizer(tmp_path / "other", vocab, merges, added)
    finding = match_tokenizers(own, other, drafts_text=True)
    assert (finding.level, found in finding.found) == (level, True), finding


def test_a_tokenizer_that_is_absent_or_damaged(tmp_path: Path) -> None:
    own = tokenizer(tmp_path / "own", VOCABULARY)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert match_tokenizers(own, empty, drafts_text=False).level == "ok"
    assert match_tokenizers(own, empty, drafts_text=True).level == "warning"
    assert match_tokenizers(empty, own, drafts_text=True).level == "warning"
    (empty / "tokenizer.json").write_text("{")
    assert "cannot be read" in match_tokenizers(own, empty, drafts_text=True).found


def test_block_drafts(target: Path, tmp_path: Path) -> None:
    folder = write_block(tmp_path / "a", target, layer_ids=(2, 0))
    found = check(target, folder, "DFLASH")
    assert {finding.level for finding in found.values()} == {"ok"}
    assert found["captured layers"].found == "outputs of layers 0, 2, of 4 counted from 0"
    assert found["block"].found == (
        "4 rows of which 3 draft, each the token at its own position; mask token 39"
    )
    assert "3 steps of topk 1; a row verifies 4 nodes" in found["shape"].found
    folder = write_block(tmp_path / "b", target, "DSPARK", markov="rnn", num_target_layers=9)
    found = check(target, folder, "DSPARK")
    assert found["block"].level == "warning"
    assert "each the next token; mask token 39, a rnn Markov head" in found["block"].found
    assert "trained for a target of 9 layers" in found["block"].found
    wrong = edit(folder, target_layer_ids=[4])
    assert check(target, wrong, "DSPARK")["captured layers"].level == "failed"
    assert check(target, edit(wrong, mask_token_id=None), "DSPARK")["captured layers"].remedy
    unknown = check(target, edit(wrong, target_layer_ids=[1, 2, 3]), "DSPARK")["block"]
    assert (unknown.level, "write the id" in unknown.remedy) == ("failed", True)


def test_a_block_drafts_tensors_say_what_it_is(target: Path, tmp_path: Path) -> None:
    assert algorithm_of(write_block(tmp_path / "a", target)) == "DFLASH"
    prefixed = write_block(tmp_path / "b", target, "DSPARK", exporter="prefixed")
    assert algorithm_of(prefixed) == "DSPARK"
