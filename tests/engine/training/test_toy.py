"""Whole runs on the CPU: the accept length rises, a cut run goes on as if it had not been cut."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from outrider.engine.training.run import train_draft
from outrider.engine_core.refusal import RefusedError
from outrider.engine_core.train_spec import TrainSpec

from ..tiny import write_checkpoint

VOCAB = 64
ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE", "DFLASH", "DSPARK")
BLOCK: dict[str, object] = {
    "unroll": None,
    "block_size": 4,
    "num_hidden_layers": 1,
    "mask_token_id": 0,
    "anchors": 8,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write_checkpoint(folder / "target", VOCAB)
    np.save(folder / "text.npy", np.random.default_rng(0).integers(1, VOCAB, size=20_000))
    return folder


def spec(place: Path, output: Path, algorithm: str, **fields: object) -> TrainSpec:
    made = TrainSpec(
        algorithm=algorithm,
        model=str(place / "target"),
        data=(str(place / "text.npy"),),
        output=str(output),
        device="cpu",
        sequence_length=32,
        on_policy_rows=256,
        on_policy_tokens=16,
        on_policy_source="dense",
        on_policy_cache=str(place / "rows"),
        selection_rows=64,
        batch_size=16,
        unroll=3,
        steps=150,
        log_every=50,
    )
    fields = {**BLOCK, **fields} if algorithm in ("DFLASH", "DSPARK") else fields
    return msgspec.structs.replace(made, **fields)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_accept_length_rises(algorithm: str, place: Path, tmp_path: Path) -> None:
    before = train_draft(spec(place, tmp_path / "a", algorithm, steps=1)).outcome.selection
    after = train_draft(spec(place, tmp_path / "b", algorithm)).outcome.selection
    assert before is not None
    assert after is not None
    assert after.projected > before.projected + 0.1
    assert before.walked is not None
    assert after.walked is not None
    assert after.walked > before.walked + 0.1
    log = (tmp_path / "b" / "log.jsonl").read_text().splitlines()
    assert len(log) == 4
    assert (tmp_path / "b" / "README.md").read_text().startswith("# A draft for")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_that_was_cut_goes_on(algorithm: str, place: Path, tmp_path: Path) -> None:
    whole = spec(place, tmp_path / "whole", algorithm, steps=12, ema=0.5)
    train_draft(whole)
    cut = msgspec.structs.replace(whole, output=str(tmp_path / "cut"))
    first = train_draft(msgspec.structs.replace(cut, max_minutes=1e-9))
    assert not first.outcome.finished
    assert first.outcome.position.step == 1
    second = train_draft(msgspec.structs.replace(cut, resume=True))
    assert second.outcome.finished
    assert second.outcome.position.step == 12
    expected, found = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "cut"))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    states = [
        torch.load(tmp_path / name / "training.pt", weights_only=True)["parameters"]
        for name in ("whole", "cut")
    ]
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name], atol=1e-6, rtol=0)


def test_kept_rows_are_those_of_this_text(place: Path, tmp_path: Path) -> None:
    cache = {"on_policy_cache": str(tmp_path / "rows"), "steps": 1}
    train_draft(spec(place, tmp_path / "a", "EAGLE3", **cache))
    kept = (tmp_path / "rows" / "own_rows.npz").read_bytes()
    train_draft(spec(place, tmp_path / "b", "EAGLE", **cache))
    assert (tmp_path / "rows" / "own_rows.npz").read_bytes() == kept
    np.save(tmp_path / "other.npy", np.random.default_rng(1).integers(1, VOCAB, size=20_000))
    other = spec(place, tmp_path / "c", "EAGLE3", **cache, data=(str(tmp_path / "other.npy"),))
    with pytest.raises(RefusedError, match=r"own_rows\.npz: was made with"):
        train_draft(other)


def test_a_run_goes_on_only_as_what_it_was(place: Path, tmp_path: Path) -> None:
    begun = spec(place, tmp_path, "EAGLE3", steps=2)
    train_draft(begun)
    other = msgspec.structs.replace(begun, resume=True, intermediate_size=8)
    with pytest.raises(RefusedError, match="intermediate_size"):
        train_draft(other)
    with pytest.raises(RefusedError, match="resume"):
        train_draft(msgspec.structs.replace(begun, output=str(tmp_path / "new"), resume=True))


# Without the target's own text.
ALONE: dict[str, object] = {
    "on_policy_rows": 0,
    "on_policy_tokens": 192,
    "on_policy_prompts": (),
    "on_policy_source": "engine",
    "on_policy_cache": None,
}


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("algorithm", {"algorithm": "NGRAM", "data": ("/nowhere",)}),
        ("draft_vocab_size", {"algorithm": "EAGLE", "draft_vocab_size": 9}),
        ("own_head", {"algorithm": "EAGLE", "own_head": True}),
        ("own_head", {"algorithm": "STANDALONE", "own_head": True}),
        ("feature_layers", {"algorithm": "STANDALONE", "feature_layers": (1,)}),
        ("draft_vocab_size", {"algorithm": "EAGLE3", "draft_vocab_size": 900}),
        ("feature_layers", {"algorithm": "EAGLE3", "feature_layers": (2, 1)}),
        ("num_hidden_layers", {"algorithm": "EAGLE3", "num_hidden_layers": 2}),
        ("hidden_size", {"algorithm": "EAGLE", "hidden_size": 8}),
        ("on_policy_tokens", {"on_policy_tokens": 2}),
        ("on_policy_prompts", {"on_policy_prompts": (8, 17)}),
        ("on_policy_prompts", {**ALONE, "on_policy_prompts": (8,)}),
        ("on_policy_prompts", {"on_policy_prompts": (8,) * 257}),
        ("selection_rows", {"on_policy_prompts": (8,) * 4, "selection_rows": 3}),
        ("minutes", {"steps": None}),
        ("steps", {"minutes": 1.0}),
        ("data", {"data": ("/nowhere",)}),
        ("model", {"model": "/nowhere"}),
        ("sequence_length", {"sequence_length": 4096}),
        ("prompt_weight", {"prompt_weight": 0.0}),
        ("hard_weight", {"hard_weight": 1.5}),
        ("unroll", {"unroll": 0}),
        ("sequence_length", {"unroll": None, "sequence_length": 6, **ALONE}),
        ("hidden_size", {"algorithm": "STANDALONE", "hidden_size": 0}),
        ("num_key_value_heads", {"num_attention_heads": 3, "num_key_value_heads": 2}),
        ("head_dim", {"algorithm": "STANDALONE", "head_dim": 7}),
        ("seed", {"seed": -1}),
        ("ema", {"ema": 1.0}),
        ("decay", {"warmup": 0.5}),
        ("excluded_bytes", {"excluded_bytes": (256,)}),
        ("selection_bytes", {"selection_bytes": (7, 8)}),
        ("num_draft_tokens", {"topk": 4}),
        ("num_draft_tokens", {"num_draft_tokens": 9}),
        ("num_draft_tokens", {"topk": 2, "draft_steps": 2, "num_draft_tokens": 40}),
        ("draft_steps", {"draft_steps": 64}),
        ("on_policy_share", {**ALONE, "on_policy_share": 0.5}),
        ("on_policy_cache", {**ALONE, "on_policy_cache": "rows"}),
        ("weight_decay", {"optimizer": "adamw", "weight_decay": 0.1}),
        ("feature_weight", {"feature_weight": 0.2}),
        ("block_size", {"block_size": 4}),
        ("anchors", {"anchors": 4}),
        ("mask_token_id", {"mask_token_id": 4}),
        ("block_weighting", {"block_weighting": "decay"}),
        ("block_size", {"algorithm": "DFLASH", "block_size": 1}),
        ("block_size", {"algorithm": "DSPARK", "block_size": 64, "sequence_length": 96, **ALONE}),
        ("sequence_length", {"algorithm": "DSPARK", "block_size": 31}),
        ("on_policy_tokens", {"algorithm": "DSPARK", "block_size": 16}),
        ("unroll", {"algorithm": "DFLASH", "unroll": 3}),
        ("step_decay", {"algorithm": "DFLASH", "step_decay": 0.5}),
        ("feature_weight", {"algorithm": "DFLASH", "feature_weight": 0.5}),
        ("draft_steps", {"algorithm": "DFLASH", "draft_steps": 3}),
        ("topk", {"algorithm": "DSPARK", "topk": 2, "num_draft_tokens": 8}),
        ("markov_rank", {"algorithm": "DFLASH", "markov_rank": 8}),
        ("markov_head", {"algorithm": "DFLASH", "markov_head": "rnn"}),
        ("confidence_greedy", {"algorithm": "DFLASH", "confidence_greedy": 0.0}),
        ("loss", {"algorithm": "DSPARK", "loss": "lk"}),
        ("l1_weight", {"algorithm": "DSPARK", "ce_weight": 0.0, "l1_weight": 0.0}),
        ("ce_weight", {"algorithm": "DSPARK", "ce_weight": -1.0}),
        ("decay_gamma", {"algorithm": "DFLASH", "decay_gamma": 3.0}),
        ("dpace_alpha", {"algorithm": "DSPARK", "dpace_alpha": 0.3}),
        ("sliding_layers", {"algorithm": "DFLASH", "sliding_layers": (0,)}),
        ("sliding_layers", {"algorithm": "DFLASH", "sliding_window": 8, "sliding_layers": (1,)}),
        ("own_head", {"algorithm": "DFLASH", "own_head": True}),
        ("draft_vocab_size", {"algorithm": "DSPARK", "draft_vocab_size": 9}),
        ("hidden_size", {"algorithm": "DFLASH", "hidden_size": 8}),
        ("feature_layers", {"algorithm": "DFLASH", "feature_layers": (3,)}),
        ("feature_layers", {"algorithm": "DFLASH", "num_hidden_layers": 2}),
        ("mask_token_id", {"algorithm": "DFLASH", "mask_token_id": None}),
        ("mask_token_id", {"algorithm": "DSPARK", "mask_token_id": VOCAB}),
    ],
)
def test_what_cannot_be_trained_is_refused(
    field: str, fields: dict[str, object], place: Path, tmp_path: Path
) -> None:
    """Before the target's own text is made, which may take most of a run."""
    if "on_policy_cache" not in fields:
        fields = {"on_policy_cache": str(tmp_path / "rows"), **fields}
    with pytest.raises(RefusedError) as refused:
        train_draft(spec(place, tmp_path, **{"algorithm": "EAGLE3", **fields}))  # type: ignore[arg-type]
    assert refused.value.refused.field == field
    assert not (tmp_path / "rows").exists()
