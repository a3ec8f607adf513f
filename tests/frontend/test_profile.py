"""``outrider profile``: tables from logits and from measured steps, and what is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.engine_core.sps_table import AdditiveTable, StepTable, read_sps
from outrider.engine_core.step_bench import StepRow
from outrider.engine_core.sts_table import fit_sts, read_sts
from outrider.frontend import cli
from outrider.frontend.profiling.costs import batch_sizes, cells_of

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
DUMMY = ("--load-format", "dummy", "--device", "cpu", "--num-threads", "1", "--page-size", "16")


def run(*args: object) -> int:
    return cli.main(["profile", *map(str, args)])


def samples(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n)
    logits = rng.normal(1.0, 2.0, (n, 3)).astype(np.float32)
    held = np.cumprod(rng.random((n, 3)) < 0.7, axis=1)
    return {"logits": logits, "prefix_mask": held.astype(np.float32)}


def save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    given: dict[str, Any] = dict(arrays)
    np.savez(path, **given)


def test_temperatures_are_fitted_to_all_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, out = tmp_path / "one.npz", tmp_path / "two.npz", tmp_path / "sts.json"
    save(one, samples(50))
    save(two, samples(30))
    assert run("sts", "--logits", one, two, "--out", out, "--gamma", 3, "--dataset", "x") == 0
    shown = capsys.readouterr().out
    both = {k: np.concatenate([samples(50)[k], samples(30)[k]]) for k in samples(1)}
    wanted = fit_sts(both["logits"], both["prefix_mask"], dataset="x")
    assert read_sts(str(out), 3) == wanted
    assert "80 samples of 3 draft positions" in shown
    assert f"{wanted.temperatures[2]:.4f}" in shown
    assert run("sts", "--logits", one, "--out", "-", "--num-bins", 5) == 0
    written = capsys.readouterr()
    assert json.loads(written.out)["num_samples"] == 50
    assert "temperature" in written.err


def test_samples_that_are_none_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = samples(4)
    text, array, out = tmp_path / "a.txt", tmp_path / "a.npy", tmp_path / "sts.json"
    text.write_text("logits")
    np.save(array, good["logits"])
    cases: list[tuple[object, str]] = [
        (tmp_path / "none.npz", "none.npz': No such file"),
        (text, "a.txt' is no .npz file"),
        (array, "a.npy' holds one array"),
        ({"logits": good["logits"]}, "prefix_mask: missing"),
        (good | {"prefix_mask": good["prefix_mask"][:, :2]}, "are [4, 3] and [4, 2]"),
        (good | {"logits": np.array([["x"] * 3] * 4)}, "logits: cannot be read"),
        (good | {"logits": np.full((4, 3), np.nan)}, "logits: some are not finite"),
        (good | {"prefix_mask": np.array([[0, 1, 1]] * 4)}, "prefix_mask: each row must be"),
        ({k: v[:0] for k, v in good.items()}, "logits: there are no samples"),
        (good | {"logits": np.array([{}], dtype=object)}, "logits: cannot be read"),
    ]
    for i, (given, words) in enumerate(cases):
        path = given if isinstance(given, Path) else tmp_path / f"{i}.npz"
        if isinstance(given, dict):
            save(path, given)
        assert run("sts", "--logits", path, "--out", out) == 2
        shown = capsys.readouterr().err
        assert "error: --logits: " in shown
        assert words in shown
    save(tmp_path / "good.npz", good)
    save(tmp_path / "two.npz", {k: v[:, :2] for k, v in good.items()})
    both = ("--logits", tmp_path / "good.npz", tmp_path / "two.npz", "--out", out)
    assert run("sts", *both) == 2
    assert "two.npz: logits: is [4, 2]; there must be [3] positions" in capsys.readouterr().err
    assert run("sts", *both[:2], *both[3:], "--gamma", 7) == 2
    assert "good.npz: logits: is [4, 3]; there must be [7]" in capsys.readouterr().err
    assert run("sts", *both[:3], "--out", tmp_path / "none" / "x") == 2
    assert "--out: cannot write" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (20, (1, 2, 4, 8, 16, 20)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (320, (*batch_sizes(64), 80, 96, 112, 128, 160, 192, 224, 256, 320)),
    ],
)
def test_the_batch_sizes(most: int, sizes: tuple[int, ...]) -> None:
    assert batch_sizes(most) == sizes


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


@pytest.mark.parametrize(("form", "kind"), [("additive", AdditiveTable), ("step", StepTable)])
def test_costs_are_measured_and_written(
    tiny: str, tmp_path: Path, form: str, kind: type, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sps.json"
    sizes = ("--max-batch-size", 3, "--gamma", 2, "--context", 20, "--steps", 4)
    status = run("sps", "--model", tiny, "--out", out, "--form", form, *sizes, *DUMMY)
    shown = capsys.readouterr()
    assert status == 0, shown.err
    table = read_sps(str(out))
    assert isinstance(table, kind)
    if isinstance(table, AdditiveTable):
        assert table.bs_probes == (1, 2, 3)
        assert table.m_probes == (1, 2, 3, 4, 6, 9)
    else:
        assert table.sample_batch_tokens == (1, 2, 3, 4, 6, 9)
    for requests, drafts in ((1, 0), (3, 6)):
        assert 1e-6 < table.seconds(requests, requests + drafts) < 1.0
    assert "the table is off by" in shown.out
    assert len(shown.out.splitlines()) == 11
    assert "max_total_tokens=" in shown.err


DRAFT = TINY | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 32,
    "target_hidden_size": 32,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0]},
}


def test_what_drafting_takes_counts(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft, out = tmp_path / "draft", tmp_path / "sps.json"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(DRAFT))
    rounds = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model", draft)
    shape = ("--speculative-num-steps", 3, "--simulate-accept-length", 1.0)
    sizes = ("--max-batch-size", 2, "--context", 20, "--steps", 4, "--form", "step")
    status = run("sps", "--model", tiny, "--out", out, *rounds, *shape, *sizes, *DUMMY)
    shown = capsys.readouterr()
    assert status == 0, shown.err
    table = read_sps(str(out))
    assert isinstance(table, StepTable)
    assert table.sample_batch_tokens == (1, 2, 3, 4, 6, 8)  # gamma is the draft's
    assert "speculative_algorithm=unset" in shown.err  # of the verify steps


def test_a_round_adds_what_it_takes_over_its_verify_step() -> None:
    def row(batch: int, drafts: int, wall: float) -> StepRow:
        given: dict[str, Any] = dict.fromkeys(StepRow.__struct_fields__)
        given |= {"batch_size": batch, "draft_length": drafts, "wall_ms": wall}
        return StepRow(**given)

    steps = [row(n, k, 1.0 + n * k) for n in (1, 2) for k in (0, 1, 2)]
    rounds = [row(1, 2, 5.0), row(2, 2, 4.5)]
    assert [cell[:2] for cell in cells_of(steps, rounds)] == [
        *((1, 1), (1, 2), (1, 3), (2, 2), (2, 4), (2, 6))
    ]
    found = [round(cell.seconds * 1e3, 9) for cell in cells_of(steps, rounds)]
    assert found == [3.0, 4.0, 5.0, 1.0, 3.0, 5.0]
    assert [round(cell.seconds * 1e3, 9) for cell in cells_of(steps, [])] == [1, 2, 3, 1, 3, 5]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--speculative-algorithm", "NGRAM"), "verifies random drafts"),
        (("--speculative-algorithm", "EAGLE3", "--gamma", "3"), "--gamma: a draft model drafts"),
        (("--speculative-algorithm", "EAGLE3"), "speculative_draft_model_path: EAGLE3 needs one"),
        (("--speculative-length-policy", "fixed"), "`profile sps` drafts in every step"),
        (("--speculative-config", '{"method": "ngram"}'), "verifies random drafts"),
        (("--max-running-requests", "3"), "`profile sps` sets it by itself"),
        (("--tokenizer-path", "x"), "`profile sps` runs on token ids"),
        (("--context", "300"), "past the model's 256"),
        (("--out", "/none/x"), "--out: cannot write"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tiny: str, args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("sps", "--model", tiny, "--out", "-", *DUMMY, *args) == 2
    assert words in capsys.readouterr().err


def test_too_few_cells_make_no_table(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--max-batch-size", 1, "--gamma", 1, "--context", 20, "--steps", 2)
    assert run("sps", "--model", tiny, "--out", "-", *sizes, *DUMMY) == 1
    shown = capsys.readouterr()
    assert "make no table: cells: 2 were measured; at least 4 are needed" in shown.err
    assert not shown.out


def test_what_is_to_be_made_must_be_said() -> None:
    for args in ((), ("spf",)):
        with pytest.raises(SystemExit) as ended:
            run(*args)
        assert ended.value.code == 2
    with pytest.raises(SystemExit):
        run("sps", "--model", "pycoder", "--out", "-", "--gamma", "64")
