"""``--json FILE``: looked at before the work begins; a table is printed whatever happens."""

import os
from pathlib import Path

import pytest

from outrider.frontend.flags import UsageError
from outrider.frontend.json_file import JsonFile


def test_a_file_is_only_written_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    target = JsonFile("--json", str(file))
    assert not file.exists()
    target.write_beside({"a": 1}, "table")
    assert file.read_text() == '{\n  "a": 1\n}\n'
    assert capsys.readouterr().out == "table\n"
    JsonFile("--json", None).write_beside({"a": 1}, "table")
    assert capsys.readouterr().out == "table\n"


def test_a_dash_is_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    JsonFile("--json", "-").write_beside([1], "table")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("[\n  1\n]\n", "table\n")
    assert not Path("-").exists()


def test_the_table_is_printed_when_writing_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    target = JsonFile("--json", str(folder / "x"))
    folder.rmdir()
    with pytest.raises(OSError, match="No such file"):
        target.write_beside([1], "table")
    assert capsys.readouterr().out == "table\n"


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path, "it is a folder"),
        (tmp_path / "none" / "x", "does not exist"),
    ):
        with pytest.raises(UsageError, match=f"--out: cannot write .*{words}"):
            JsonFile("--out", str(path))
    if os.getuid() == 0:
        return  # may write everything
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="may not be written"):
        JsonFile("--out", str(tmp_path / "x"))
