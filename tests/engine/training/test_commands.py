"""Commands of one run, one after the other: what is refused, what goes on, what is left alone."""

import json
import re
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.training import run
from outrider.engine.training.export import CONFIG, WEIGHTS
from outrider.engine.training.progress import Progress
from outrider.engine.training.run import train_draft
from outrider.engine_core.refusal import RefusedError
from outrider.engine_core.train_spec import TrainSpec

from ..tiny import write_checkpoint

VOCAB, LENGTH = 64, 16


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    write_checkpoint(folder / "target", VOCAB)
    for name, seed in (("text", 0), ("other", 1)):
        ids = np.random.default_rng(seed).integers(1, VOCAB, size=60 * LENGTH)
        np.save(folder / f"{name}.npy", ids)
    return folder


@pytest.fixture
def spec(place: Path, tmp_path: Path) -> TrainSpec:
    return TrainSpec(
        algorithm="EAGLE3",
        model=str(place / "target"),
        data=(str(place / "text.npy"),),
        output=str(tmp_path / "draft"),
        device="cpu",
        sequence_length=LENGTH,
        selection_rows=4,
        batch_size=4,
        unroll=2,
        steps=2,
    )


def refusal(spec: TrainSpec, **fields: object) -> str:
    with pytest.raises(RefusedError) as refused:
        train_draft(msgspec.structs.replace(spec, **fields))
    return str(refused.value)


@pytest.mark.parametrize("tokens", [0, 5, LENGTH, 2 * LENGTH - 1])
def test_too_little_data_is_refused(tokens: int, spec: TrainSpec, tmp_path: Path) -> None:
    np.save(tmp_path / "few.npy", np.ones(tokens, dtype=np.int32))
    said = refusal(spec, data=(str(tmp_path / "few.npy"),))
    assert said == f"data: {tokens} tokens are too few for rows of {LENGTH} and a selection"


def test_too_small_a_selection_of_its_own_is_refused(spec: TrainSpec, tmp_path: Path) -> None:
    np.save(tmp_path / "few.npy", np.ones(LENGTH - 1, dtype=np.int32))
    said = refusal(spec, selection_data=(str(tmp_path / "few.npy"),))
    assert said == f"selection_data: {LENGTH - 1} tokens are too few for rows of {LENGTH}"
    assert refusal(spec, selection_data=("/nowhere",)).startswith("selection_data: '/nowhere'")


def test_a_finished_run_has_nothing_left_to_do(
    spec: TrainSpec, capfd: pytest.CaptureFixture[str]
) -> None:
    train_draft(spec)
    weights = Path(spec.output) / "model.safetensors"
    written = weights.stat().st_mtime_ns
    for steps in (2, 1):
        capfd.readouterr()
        report = train_draft(msgspec.structs.replace(spec, steps=steps, resume=True))
        assert "already has 2 steps; nothing to do" in capfd.readouterr().err
        assert report.outcome.finished
        assert weights.stat().st_mtime_ns == written
    # Another shape to serve with is something to do, and so is a draft that was never written.
    train_draft(msgspec.structs.replace(spec, steps=1, resume=True, draft_steps=1))
    assert '"steps": 1' in (weights.parent / "config.json").read_text()
    weights.unlink()
    train_draft(msgspec.structs.replace(spec, resume=True))
    assert weights.is_file()


@pytest.mark.parametrize("damage", ["junk", "empty", "truncated", "other", "shapes"])
def test_a_damaged_state_is_named(damage: str, spec: TrainSpec) -> None:
    train_draft(spec)
    path = Path(spec.output) / "training.pt"
    state = torch.load(path, weights_only=True)
    if damage == "junk":
        path.write_bytes(b"junk" * 100)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:3000])
    elif damage == "other":
        torch.save({"something": 1}, path)
    else:
        state["parameters"]["norm.weight"] = torch.ones(5)
        torch.save(state, path)
    said = refusal(spec, resume=True, steps=3)
    assert said.startswith(f"resume: {str(path)!r} is damaged")
    assert "\n" not in said


def test_a_begun_folder_is_not_begun_again(spec: TrainSpec) -> None:
    folder = Path(spec.output)
    folder.mkdir()
    (folder / "log.jsonl").write_text("of a run that never saved\n")
    train_draft(spec)
    assert "never saved" not in (folder / "log.jsonl").read_text()
    said = refusal(spec)
    assert said.startswith("output: ")
    assert "--resume" in said
    (folder / "training.pt").unlink()
    assert "holds a model already" in refusal(spec)


def test_a_run_goes_on_with_its_own_data_only(spec: TrainSpec, place: Path, tmp_path: Path) -> None:
    other = (str(place / "other.npy"),)
    moved = tmp_path / "moved.npy"
    moved.write_bytes((place / "text.npy").read_bytes())
    train_draft(spec)
    further = msgspec.structs.replace(spec, resume=True, steps=3)
    assert refusal(further, data=other).startswith("data: is not what the run in")
    assert refusal(further, selection_data=other).startswith("selection_data: is not what")
    report = train_draft(msgspec.structs.replace(further, data=(str(moved),)))
    assert report.outcome.position.step == 3
    apart = msgspec.structs.replace(
        spec, output=str(tmp_path / "apart"), selection_data=(str(place / "text.npy"),)
    )
    train_draft(apart)
    apart = msgspec.structs.replace(apart, resume=True, steps=3)
    assert refusal(apart, selection_data=other).startswith("selection_data: is not what")
    assert refusal(apart, selection_data=()).startswith("selection_data: is not what")


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("algorithm", {"algorithm": "NGRAM"}),
        ("resume", {"resume": True}),
        ("feature_layers", {"feature_layers": (99,)}),
        ("draft_vocab_size", {"draft_vocab_size": 900}),
        ("num_key_value_heads", {"num_attention_heads": 3, "num_key_value_heads": 2}),
        ("num_key_value_heads", {"num_key_value_heads": 3}),
        ("num_key_value_heads", {"algorithm": "STANDALONE", "num_key_value_heads": 3}),
        ("own_head", {"algorithm": "STANDALONE", "own_head": True}),
        ("sequence_length", {"sequence_length": 4096}),
        ("output", {"output": __file__}),
        ("output", {"output": f"{__file__}/below"}),
        (
            "on_policy_cache",
            {"on_policy_rows": 4, "on_policy_tokens": 8, "on_policy_cache": __file__},
        ),
    ],
)
def test_refused_before_anything_is_loaded(
    field: str, fields: dict[str, object], spec: TrainSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(run, "DenseTarget", loaded)
    monkeypatch.setattr(run, "read_split", loaded)
    assert refusal(spec, **fields).startswith(f"{field}: ")
    assert not Path(spec.output).exists()


@pytest.mark.parametrize("heads", [{"num_attention_heads": 3}, {"num_key_value_heads": 2}])
def test_heads_of_its_own(heads: dict[str, int], spec: TrainSpec) -> None:
    """Beside the target's 2 query heads and 1 KV head of size 8 in a hidden size of 16."""
    assert train_draft(msgspec.structs.replace(spec, **heads)).outcome.finished


def test_the_bar_moves_between_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with Progress(tmp_path, "toy", 40.0, 0.0, "steps", fresh=True) as progress:
        progress.move(7.0)
        time.sleep(0.7)
        progress.move(50.0)
    with Progress(tmp_path, "toy", 1.0, 0.0, "min", fresh=False) as progress:
        progress.move(0.5)
        time.sleep(0.7)
    said = capsys.readouterr().err
    assert re.search(r"0\.5[01]\d+/1 min", said)  # half a second later, within the same step
    assert "7/40 steps" in said
    assert "40/40 steps" in said
    assert not any(thread.name == "progress" for thread in threading.enumerate())


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE", "STANDALONE", "DFLASH", "DSPARK"])
def test_a_draft_can_be_the_first_weights(algorithm: str, spec: TrainSpec, tmp_path: Path) -> None:
    block: dict[str, object] = {"unroll": None, "mask_token_id": 1, "num_hidden_layers": 1}
    fields = block if algorithm in ("DFLASH", "DSPARK") else {}
    spec = msgspec.structs.replace(spec, algorithm=algorithm, **fields)
    first = train_draft(spec).folder
    # A learning rate that moves nothing in bfloat16.
    still = {"matrix_lr": 1e-12, "adam_lr": 1e-12, "steps": 1}
    again = msgspec.structs.replace(
        spec, initial_draft=str(first), output=str(tmp_path / "again"), **still
    )
    train_draft(again)
    before, after = (load_file(folder / WEIGHTS) for folder in (first, tmp_path / "again"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        # fc is learnt beside the sizes of its features, and so divided and multiplied again.
        torch.testing.assert_close(tensor, after[name], atol=0, rtol=0.01 * (name == "fc.weight"))


def test_a_block_draft_grows(
    spec: TrainSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Further layers say nothing at first; another Markov head begins anew."""
    small: dict[str, object] = {
        "algorithm": "DSPARK", "unroll": None, "mask_token_id": 1, "num_hidden_layers": 1,
        "markov_head": "gated", "markov_rank": 8, "feature_layers": (1, 2),
    }  # fmt: skip
    spec = msgspec.structs.replace(spec, **small)
    first = train_draft(spec).folder
    still = {"matrix_lr": 1e-12, "adam_lr": 1e-12, "steps": 1}
    large = {
        "num_hidden_layers": 2, "markov_head": "rnn", "initial_draft": str(first),
        "output": str(tmp_path / "large"), **still,
    }  # fmt: skip
    capsys.readouterr()
    made = load_file(train_draft(msgspec.structs.replace(spec, **large)).folder / WEIGHTS)
    said = capsys.readouterr().err
    assert f"begun with {first}; new are layers.1, the Markov and confidence heads" in said
    before = load_file(first / WEIGHTS)
    for name, tensor in before.items():
        if not name.startswith(("markov_head", "confidence_head")):
            torch.testing.assert_close(tensor, made[name], atol=0, rtol=0.01 * (name[:2] == "fc"))
    # Zero, but for a step at that rate.
    for name in ("layers.1.self_attn.o_proj", "layers.1.mlp.down_proj", "markov_head.markov_w2"):
        assert made[f"{name}.weight"].abs().max() < 1e-9
    assert made["layers.1.mlp.up_proj.weight"].abs().max() > 0.1
    assert before["markov_head.markov_w2.weight"].abs().max() > 1e-3
    shrunk = {"initial_draft": str(tmp_path / "large"), "output": str(tmp_path / "small")}
    assert "has num_hidden_layers 2, this run 1" in refusal(spec, **shrunk)
    # A folder that is not what its config.json says.
    config = json.loads((tmp_path / "large" / CONFIG).read_bytes())
    config |= {"num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}
    (tmp_path / "large" / CONFIG).write_text(json.dumps(config))
    grown = {**large, "initial_draft": str(tmp_path / "large"), "output": str(tmp_path / "lied")}
    assert "has a tensor layers.1." in refusal(spec, **grown)
    config |= {"markov_rank": None}
    (tmp_path / "large" / CONFIG).write_text(json.dumps(config))
    assert "has markov_rank None, this run 8" in refusal(spec, **grown)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE", "STANDALONE", "DFLASH"])
def test_mlps_can_be_narrower(
    algorithm: str, spec: TrainSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They keep the neurons that weigh most, and in a block draft that grows, too."""
    block: dict[str, object] = {"unroll": None, "mask_token_id": 1, "num_hidden_layers": 1}
    fields = {**block, "feature_layers": (1, 2)} if algorithm == "DFLASH" else {}
    spec = msgspec.structs.replace(spec, algorithm=algorithm, intermediate_size=48, **fields)
    first = train_draft(spec).folder
    before = load_file(first / WEIGHTS)
    gates = [name for name in before if name.endswith("mlp.gate_proj.weight")]
    assert gates
    for name in gates:  # three that say next to nothing, each by another of its vectors
        for neuron, part in ((3, "gate"), (17, "up"), (40, "down")):
            tensor = before[name.replace("gate", part)]
            (tensor[:, neuron] if part == "down" else tensor[neuron]).mul_(1e-6)
    save_file(before, first / WEIGHTS)
    narrow: dict[str, object] = {
        "intermediate_size": 45, "initial_draft": str(first), "output": str(tmp_path / "narrow"),
        "matrix_lr": 1e-12, "adam_lr": 1e-12, "steps": 1,
    }  # fmt: skip
    if algorithm == "DFLASH":
        narrow["num_hidden_layers"] = 2
    capsys.readouterr()
    made = load_file(train_draft(msgspec.structs.replace(spec, **narrow)).folder / WEIGHTS)
    new = "new are layers.1; " if algorithm == "DFLASH" else ""
    assert f"begun with {first}; {new}MLPs keep 45 of 48 neurons" in capsys.readouterr().err
    kept = [neuron for neuron in range(48) if neuron not in (3, 17, 40)]
    for name, tensor in before.items():
        of_mlp = "mlp." in name
        expected = tensor if not of_mlp else tensor[:, kept] if "down" in name else tensor[kept]
        torch.testing.assert_close(expected, made[name], atol=0, rtol=0.01 * (name == "fc.weight"))


def test_a_draft_of_another_form_is_refused(spec: TrainSpec, tmp_path: Path) -> None:
    first = train_draft(spec).folder

    def said(**fields: object) -> str:
        fields = {"initial_draft": str(first), "output": str(tmp_path / "other"), **fields}
        return refusal(spec, **fields)

    assert "has no config.json; give a draft's folder" in said(initial_draft=str(tmp_path))
    assert "has architectures ['LlamaForCausalLMEagle3']" in said(algorithm="EAGLE")
    assert re.search(r"has intermediate_size \d+, this run 4096", said(intermediate_size=4096))
    assert "has draft_vocab_size None, this run 64" in said(own_head=True)
    own = {"draft_vocab_size": 32, "output": str(tmp_path / "own")}
    reduced = train_draft(msgspec.structs.replace(spec, **own)).folder
    tensors = load_file(reduced / WEIGHTS)
    kept = tensors.pop("d2t")
    save_file(tensors, reduced / WEIGHTS)
    fields = {"initial_draft": str(reduced), "draft_vocab_size": 32}
    assert "lacks the tensor d2t" in said(**fields)
    save_file({**tensors, "d2t": kept + 1}, reduced / WEIGHTS)
    assert "has another draft vocabulary (d2t)" in said(**fields)
    save_file({**tensors, "d2t": kept, "norm.weight": torch.ones(3)}, reduced / WEIGHTS)
    assert "norm.weight is (3,)" in said(**fields)
    (reduced / WEIGHTS).write_bytes(b"no tensors")
    assert "is no draft of outrider train" in said(**fields)
