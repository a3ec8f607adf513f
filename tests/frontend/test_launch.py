"""Core processes: start, early ends, signals, and no orphan whatever happens to the parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from outrider.engine_core.config import EngineConfig
from outrider.engine_core.private_dir import make_private_dir
from outrider.engine_core.refusal import RefusedError
from outrider.frontend.announcements import Announcement, announce, find_server
from outrider.frontend.errors import LaunchError
from outrider.frontend.launch import CoreProcess, start_core

from .fake_cli import fake_command

CONFIG = EngineConfig(model="pycoder")


def start(config: EngineConfig = CONFIG) -> CoreProcess:
    return start_core(config, command=fake_command(), timeout_s=30)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_start_and_stop_leave_nothing_behind() -> None:
    core = start()
    folder = Path(core.endpoint.removeprefix("ipc://")).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert core.info is not None
    assert core.info.pid == core.pid
    assert core.exit_status is None
    core.stop()
    core.stop()
    assert core.exit_status is not None
    assert not folder.exists()
    assert not alive(core.pid)


def test_a_killed_core_is_noticed_at_once() -> None:
    core = start()
    told = threading.Event()
    statuses: list[int] = []

    def note(status: int) -> None:
        statuses.append(status)
        told.set()

    core.on_exit(note)
    os.kill(core.pid, signal.SIGKILL)
    assert told.wait(1.0)
    core.on_exit(statuses.append)
    assert statuses == [-signal.SIGKILL] * 2
    core.stop()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise SystemExit(3)", "before it was ready .exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9"),
        ("print('hello')", "before it was ready"),
        ('print(\'{"status": "error", "message": "no luck"}\')', "no luck"),
        ("import time; time.sleep(60)", "not ready within"),
    ],
)
def test_a_core_that_does_not_start_is_a_clear_error(script: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        start_core(CONFIG, command=[sys.executable, "-c", script], timeout_s=2)


def test_other_start_errors() -> None:
    with pytest.raises(LaunchError, match="could not be started"):
        start_core(CONFIG, command=["/no/such/program"])
    with pytest.raises(RefusedError, match="page_size"):
        start_core(EngineConfig(model="pycoder", page_size=3))
    with pytest.raises(LaunchError, match="random_seed: 13 is unlucky"):
        start(EngineConfig(model="pycoder", dtype="float32", random_seed=13))


def test_no_orphan_when_the_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, time\n"
        "from outrider.engine_core.config import EngineConfig\n"
        "from outrider.frontend.launch import start_core\n"
        f"core = start_core(EngineConfig(model='pycoder'), command={fake_command()!r})\n"
        "print(core.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    core = int(parent.stdout.readline())
    assert alive(core)
    parent.kill()
    parent.communicate()
    assert gone_within(core, 2.0)


def test_announcements_find_running_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert find_server() is None
    first = announce(Announcement(endpoint="ipc://a", pid=os.getpid(), port=1, model="m"))
    os.utime(first, (1, 1))
    announce(Announcement(endpoint="ipc://b", pid=os.getpid(), port=2, model="m"))
    stale = announce(Announcement(endpoint="ipc://c", pid=2**22 - 1, port=3, model="m"))
    (stale.parent / "junk.json").write_text("{")
    for port, endpoint in ((None, "ipc://b"), (1, "ipc://a"), (2, "ipc://b")):
        found = find_server(port)
        assert found is not None
        assert found.endpoint == endpoint
    assert find_server(3) is None
    assert not stale.exists()
    stale.parent.chmod(0o777)
    assert find_server() is None
    with pytest.raises(PermissionError, match="0700"):
        announce(Announcement(endpoint="ipc://d", pid=1, port=4, model="m"))


def test_private_dirs_have_short_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    folder = make_private_dir()
    assert len(str(folder)) < 60
    folder.rmdir()
