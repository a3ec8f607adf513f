"""The list of GPU results: commands that the CLI accepts, and failures that are told."""

import shlex
from pathlib import Path

import gpu_results
import pytest
from gpu_results import COMMANDS, Command

from outrider.frontend import cli


def test_every_result_has_a_file_of_its_own() -> None:
    files = [command.file for command in COMMANDS.values()]
    assert len(set(files)) == len(files)
    for command in COMMANDS.values():
        script = command.arguments.split()[0]
        assert script == "-m" or (gpu_results.ROOT / script).is_file()
        assert command.arguments.endswith("--json {}")


@pytest.mark.parametrize("name", [n for n, c in COMMANDS.items() if c.arguments[:2] == "-m"])
def test_the_command_line_knows_its_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(COMMANDS[name].arguments.format("x.json"))[2:]
    with pytest.raises(SystemExit):
        cli.main([*words, "--no-such-flag"])
    assert "unrecognized arguments: --no-such-flag\n" in capsys.readouterr().err


def test_what_fails_or_takes_too_long_is_told(tmp_path: Path) -> None:
    def one(code: str, limit: int) -> str:
        return gpu_results.run(Command("x.json", f"-c {shlex.quote(code)} {{}}", limit), tmp_path)

    assert one("import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('1')", 60) == ""
    assert (tmp_path / "x.json").read_text() == "1"
    assert one("raise SystemExit(3)", 60) == "ended with 3"
    assert one("import time; time.sleep(60)", 1) == "took more than 1 s"
