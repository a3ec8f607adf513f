"""benchmarks/train_pycoder.sh: the command lines of its stages, without running them."""

import shlex
import subprocess
from pathlib import Path

import pytest

from outrider.engine_core.train_checks import refuse_train
from outrider.engine_core.train_spec import TrainSpec
from outrider.frontend.commands.train import _parser, spec_from

ROOT = Path(__file__).parents[1]


def stage(work: Path, name: str, **variables: str) -> TrainSpec:
    """What a stage asks ``outrider train`` for."""
    python = work / "python"
    python.write_text(
        f'#!/bin/sh\nfor a; do printf "%s\\n" "$a"; done > {shlex.quote(str(work))}/args\n'
    )
    python.chmod(0o755)
    command = [str(ROOT / "benchmarks/train_pycoder.sh"), str(work), name]
    given = {"PATH": "/usr/bin:/bin", "PYTHON": str(python), **variables}
    subprocess.run(["sh", *command], env=given, check=True, capture_output=True, timeout=30)
    module, package, train, *flags = (work / "args").read_text().splitlines()
    assert (module, package, train) == ("-m", "outrider", "train")
    return spec_from(_parser().parse_args(flags))


@pytest.mark.parametrize("name", ["EAGLE3", "EAGLE", "STANDALONE", "DFLASH", "DSPARK"])
def test_every_stage_is_a_command_line_that_trains(tmp_path: Path, name: str) -> None:
    spec = stage(tmp_path, name)
    assert refuse_train(spec) is None
    assert (spec.algorithm, spec.initial_draft, spec.on_policy_tokens) == (name, None, 128)
    block = name in ("DFLASH", "DSPARK")
    length = 512 if name == "STANDALONE" else 1024
    assert spec.on_policy_cache == str(tmp_path / f"rows-{length}")
    assert spec.sequence_length == length
    assert spec.on_policy_prompts == (48, 64, 80, 96, 128, 160, 192, 224, 320)
    assert spec.batch_size == (24 if block else 128 if name == "STANDALONE" else 48)


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE3", "DFLASH", "DSPARK"])
def test_a_draft_may_begin_with_the_embedded_one(tmp_path: Path, name: str) -> None:
    spec = stage(tmp_path, name, INITIAL="1", LENGTH="768", PROMPTS="48 600", FLAGS="--seed 3")
    assert spec.initial_draft is not None
    assert spec.batch_size == (32 if name in ("DFLASH", "DSPARK") else 64)
    assert (Path(spec.initial_draft) / "config.json").is_file()
    assert (spec.matrix_lr, spec.seed, spec.sequence_length) == (0.01, 3, 768)
    assert spec.on_policy_prompts == (48, 600)
    assert spec.on_policy_cache == str(tmp_path / "rows-768")
    (tmp_path / f"pycoder-11m-{name.lower()}").mkdir()
    (tmp_path / f"pycoder-11m-{name.lower()}" / "training.pt").write_bytes(b"")
    assert stage(tmp_path, name, INITIAL="1").resume
