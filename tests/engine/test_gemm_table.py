"""The table of matmul choices: what is measured, kept, ignored, and looked up."""

import os
from pathlib import Path

import msgspec
import pytest
from triton.runtime.errors import OutOfResources

from outrider.engine.gemm_table import (
    CUBLAS_MARGIN,
    MARGIN_ROWS,
    Choices,
    CublasChoice,
    GemmKey,
    GemmTable,
    Machine,
    StreamChoice,
    TritonChoice,
    cache_directory,
)
from outrider.kernels.linear_config import shortlist
from outrider.kernels.linear_gpu import LinearConfig
from outrider.kernels.stream_config import stream_shortlist

MACHINE = Machine("NVIDIA H200", "2.11.0+cu130", "3.6.0")
MIX = GemmKey(4096, 4096, 16, "bfloat16")
QKV = GemmKey(6144, 4096, 16, "bfloat16")
DOWN = GemmKey(4096, 12288, 64, "bfloat16", "residual")


def listed(key: GemmKey) -> list[LinearConfig]:
    return [*shortlist(key.n, key.k, key.m_tier)]


class Clock:
    """Made-up seconds: cuBLAS takes 10 us, the n-th configuration of a key 12 - n us."""

    def __init__(self, cublas: float = 10e-6) -> None:
        self.calls: list[tuple[GemmKey, LinearConfig | None]] = []
        self._cublas = cublas

    def __call__(self, key: GemmKey, config: LinearConfig | None, others: Choices) -> float:
        self.calls.append((key, config))
        if config is None:
            return self._cublas
        return (12 - listed(key).index(config)) * 1e-6


def test_the_fastest_is_kept_and_found_again(tmp_path: Path) -> None:
    table, clock = GemmTable(MACHINE, tmp_path), Clock()
    assert table.fill([QKV, DOWN, QKV], listed, clock) == 2
    expected = shortlist(6144, 4096, 16)[-1]
    for known in (table, GemmTable(MACHINE, tmp_path)):
        for rows in (1, 8, 16):
            assert known.config(6144, 4096, rows, "bfloat16") == expected
        assert known.config(4096, 12288, 33, "bfloat16", "residual") is not None
        assert known.config(4096, 12288, 33, "bfloat16") is None
        assert known.config(6144, 4096, 17, "bfloat16") is None
        assert known.config(6144, 4096, 4096, "bfloat16") is None
        assert known.config(6144, 4096, 0, "bfloat16") is None
        assert known.fill([DOWN, QKV], listed, Clock()) == 0
    assert [entry.cublas_microseconds for entry in table.entries()] == [10.0, 10.0]
    assert os.listdir(tmp_path) == ["NVIDIA_H200-2.11.0+cu130-3.6.0.json"]


def test_a_faster_cublas_wins_and_is_not_measured_again(tmp_path: Path) -> None:
    GemmTable(MACHINE, tmp_path).fill([QKV], listed, Clock(cublas=1e-6))
    table, clock = GemmTable(MACHINE, tmp_path), Clock()
    assert table.fill([QKV], listed, clock) == 0
    assert clock.calls == []
    assert table.entries()[0].choice == CublasChoice()
    assert table.config(6144, 4096, 8, "bfloat16") is None


@pytest.mark.parametrize(
    ("tier", "ahead", "wins"),
    [(16, 0.029, False), (16, 0.031, True), (64, 0.029, False), (128, 0.001, True)],
)
def test_cublas_wins_few_rows_by_a_margin_only(
    tmp_path: Path, tier: int, ahead: float, wins: bool
) -> None:
    key = msgspec.structs.replace(QKV, m_tier=tier)
    configs = listed(key)
    fastest = (12 - len(configs) + 1) * 1e-6
    table = GemmTable(MACHINE, tmp_path)
    table.fill([key], listed, Clock(cublas=fastest * (1 - ahead)))
    assert (CUBLAS_MARGIN, MARGIN_ROWS) == (0.03, 64)
    assert table.config(6144, 4096, tier, "bfloat16") == (None if wins else configs[-1])
    (entry,) = table.entries()
    assert entry.microseconds == pytest.approx(fastest * 1e6 * (1 - ahead * wins), abs=1e-3)
    assert entry.cublas_microseconds == pytest.approx(fastest * 1e6 * (1 - ahead), abs=1e-3)


def test_cublas_stays_where_nothing_else_runs(tmp_path: Path) -> None:
    table = GemmTable(MACHINE, tmp_path)
    table.fill([QKV], lambda _: [], Clock())
    assert table.entries()[0].choice == CublasChoice()


@pytest.mark.parametrize(
    "refusal",
    [OutOfResources(240_000, 101_376, "shared memory"), ValueError("no"), RuntimeError("no")],
    ids=["triton", "value", "runtime"],
)
def test_a_configuration_that_fails_is_left_out(tmp_path: Path, refusal: Exception) -> None:
    best = shortlist(6144, 4096, 16)[-1]
    clock = Clock()

    def measure(key: GemmKey, config: LinearConfig | None, others: Choices) -> float:
        if config == best:
            raise refusal
        return clock(key, config, others)

    table = GemmTable(MACHINE, tmp_path)
    table.fill([QKV], listed, measure)
    assert table.config(6144, 4096, 8, "bfloat16") == shortlist(6144, 4096, 16)[-2]


def test_a_key_is_measured_beside_neighbours_that_run(tmp_path: Path) -> None:
    """Until it is a neighbour's turn, the first of its configurations that runs stands for it."""
    broken = listed(DOWN)[0]
    clock, seen = Clock(), []

    def measure(key: GemmKey, config: LinearConfig | None, others: Choices) -> float:
        if broken in (config if key == DOWN else None, others.get(DOWN)):
            raise OutOfResources(240_000, 101_376, "shared memory")
        if key == QKV and others:
            seen.append(others[DOWN])
        return clock(key, config, others)

    GemmTable(MACHINE, tmp_path).fill([QKV, DOWN], listed, measure)
    assert set(seen) == {listed(DOWN)[1]}


def test_two_processes_keep_each_others_choices(tmp_path: Path) -> None:
    first, second = GemmTable(MACHINE, tmp_path), GemmTable(MACHINE, tmp_path)
    first.fill([QKV, MIX], listed, Clock())
    second.fill([DOWN], listed, Clock())
    assert {entry.key for entry in GemmTable(MACHINE, tmp_path).entries()} == {QKV, MIX, DOWN}


def test_a_choice_of_the_hopper_kernel_is_kept_too(tmp_path: Path) -> None:
    configs = stream_shortlist(4096, 4096, 16)

    def measure(_: GemmKey, config: LinearConfig | None, _others: Choices) -> float:
        return 1e-6 if config == configs[1] else 2e-6

    GemmTable(MACHINE, tmp_path).fill([MIX], lambda _: configs, measure)
    table = GemmTable(MACHINE, tmp_path)
    assert table.config(4096, 4096, 8, "bfloat16") == configs[1]
    (entry,) = table.entries()
    assert isinstance(entry.choice, StreamChoice)


def written(directory: Path) -> tuple[Path, bytes]:
    table = GemmTable(MACHINE, directory)
    table.fill([QKV], listed, Clock())
    return table.path, table.path.read_bytes()


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"version": 4', b'"version": 3', "version 3, not 4"),
        (b"NVIDIA H200", b"NVIDIA H100", "measured on"),
        (b'"kind": "triton"', b'"kind": "cutlass"', "cutlass"),
        (b'"warps": 4', b'"warps": "4"', "Expected `int`"),
        (b'"warps": 4', b'"warps": 3', "power of two"),
        (b'"warps": 4', b'"warps": 4, "color": 1', "unknown field `color`"),
        (b'"epilogue": "none"', b'"epilogue": "gelu"', "gelu"),
        (b'"entries"', b'"rows"', "unknown field `rows`"),
        (b"}", b"", "unknown field `entries`"),
        (b"NVIDIA", b"\xff\xfe", "UTF-8"),
    ],
)
def test_a_damaged_or_stale_file_is_measured_again(
    tmp_path: Path, old: bytes, new: bytes, reason: str
) -> None:
    path, content = written(tmp_path)
    assert old in content
    path.write_bytes(content.replace(old, new))
    with pytest.warns(RuntimeWarning, match=f"is ignored and measured again: .*{reason}"):
        table = GemmTable(MACHINE, tmp_path)
    assert table.fill([QKV], listed, Clock()) == 1
    assert path.read_bytes() == content


@pytest.mark.parametrize("size", [0, 1, 40])
def test_a_cut_file_is_measured_again(tmp_path: Path, size: int) -> None:
    path, content = written(tmp_path)
    path.write_bytes(content[:size])
    with pytest.warns(RuntimeWarning, match="ignored"):
        assert GemmTable(MACHINE, tmp_path).entries() == []


def test_a_failed_write_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, content = written(tmp_path)
    table = GemmTable(MACHINE, tmp_path)

    def refuse(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outrider.engine.gemm_table.os.replace", refuse)
    with pytest.warns(RuntimeWarning, match="not kept: .*No space left"):
        table.fill([DOWN], listed, Clock())
    assert table.config(4096, 12288, 64, "bfloat16", "residual") is not None
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == [path.name]


def test_a_directory_that_is_a_file_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "gemm").write_text("")
    with pytest.warns(RuntimeWarning, match="ignored"):
        table = GemmTable(MACHINE, tmp_path / "gemm")
    with pytest.warns(RuntimeWarning, match="not kept"):
        table.fill([QKV], listed, Clock())
    assert table.config(6144, 4096, 1, "bfloat16") is not None


def test_the_directory_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    assert cache_directory() == tmp_path / "gemm"
    GemmTable(MACHINE).fill([QKV], listed, Clock())
    assert os.listdir(tmp_path / "gemm") == [MACHINE.file_name()]
    monkeypatch.delenv("OUTRIDER_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "outrider" / "gemm"


def test_a_device_name_cannot_leave_the_directory() -> None:
    assert Machine("../../x y", "2", "3").file_name() == ".._.._x_y-2-3.json"


def test_the_file_reads_as_documented(tmp_path: Path) -> None:
    _, content = written(tmp_path)
    entry = msgspec.json.decode(content)["entries"][0]
    assert entry["key"] == {
        "n": 6144, "k": 4096, "m_tier": 16, "dtype": "bfloat16", "epilogue": "none",
    }  # fmt: skip
    assert entry["choice"]["kind"] == "triton"
    assert set(entry["choice"]) == {"kind", *TritonChoice.__struct_fields__}


@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_shortlist_is_short_and_runs_on_an_sm(block_m: int, itemsize: int) -> None:
    for n, k in ((6144, 4096), (4096, 12288), (151936, 4096), (384, 384)):
        found = shortlist(n, k, block_m, itemsize)
        assert len(found) <= 8
        assert len(set(found)) == len(found)
        assert all(c.shared_bytes(block_m, itemsize) < 227 * 1024 for c in found)
    assert shortlist(6144, 4096, block_m)
