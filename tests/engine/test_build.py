"""Building an engine: sizes from the configuration, and a refusal for each flag at fault."""

import json
from pathlib import Path

import pytest

from outrider.engine.build import build_worker
from outrider.engine_core.host_memory import free_memory
from outrider.engine_core.refusal import RefusedError

from .cores import running_engine, tiny_config
from .tiny import write_checkpoint

VOCAB = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", VOCAB)


def test_sizes_follow_the_configuration(folder: Path) -> None:
    with running_engine(
        tiny_config(folder, "NGRAM", page_size=32, max_total_tokens=1000, context_length=300)
    ) as engine:
        info, sizes = engine.info, engine.worker.info()
    assert (sizes.vocab_size, sizes.context_length, sizes.eos_ids) == (VOCAB, 512, (0,))
    assert (sizes.num_pages, sizes.page_size) == (1000 // 32, 32)
    assert sizes.max_slots >= info.max_running_requests == 8
    assert (info.context_length, info.num_draft_tokens) == (300, 12)
    assert info.max_total_tokens == 31 * 32
    assert (info.drafter, info.device, info.dtype) == ("NGRAM", "cpu", "float32")
    assert sizes.kv_bytes_per_token == 2 * 2 * 8 * 4
    assert sizes.weight_bytes > 4 * VOCAB * 16 * 2


def test_the_pool_is_sized_by_need_without_a_wish(folder: Path) -> None:
    with running_engine(tiny_config(folder, max_total_tokens=None)) as engine:
        assert engine.info.max_total_tokens == 8 * 1024


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"model": "no/such/model"}, "model", "not found"),
        ({"num_threads": 4096}, "num_threads", "available cores"),
        ({"num_threads": 0}, "num_threads", "1 or more"),
        ({"page_size": 3}, "page_size", "1, 16, 32 or 64"),
        ({"context_length": 513}, "context_length", "exceeds the model's 512"),
        ({"mem_fraction_static": 1e-9}, "mem_fraction_static", "leaves no room"),
        ({"max_total_tokens": 2**40}, "max_total_tokens", "do not fit"),
        ({"speculative_algorithm": "NEXTN"}, "speculative_algorithm", "not built yet"),
        ({"tokenizer_path": "BROKEN"}, "tokenizer_path", "is not a tokenizer.json"),
    ],
)
def test_a_flag_at_fault_is_named(
    folder: Path, tmp_path: Path, fields: dict[str, object], field: str, reason: str
) -> None:
    if fields.get("tokenizer_path"):
        (tmp_path / "tokenizer.json").write_text("{}")
        fields = {"tokenizer_path": str(tmp_path)}
    config = tiny_config(folder)
    values = {name: getattr(config, name) for name in config.__struct_fields__}
    with pytest.raises(RefusedError) as caught, running_engine(type(config)(**values | fields)):
        pass
    assert caught.value.refused.field == field
    assert reason in caught.value.refused.reason


def test_broken_model_files_are_refused(folder: Path, tmp_path: Path) -> None:
    broken = write_checkpoint(tmp_path / "broken", VOCAB)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(RefusedError, match="model"):
        build_worker(tiny_config(broken))
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(RefusedError, match="model"):
        build_worker(tiny_config(broken))
    (broken / "config.json").write_text("{")
    with pytest.raises(RefusedError, match="model"):
        build_worker(tiny_config(broken))


def test_a_trace_file_that_cannot_be_written_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_TRACE", "/no/such/folder/trace")
    with (
        pytest.raises(RefusedError, match="OUTRIDER_TRACE"),
        running_engine(tiny_config(folder)),
    ):
        pass


def test_free_memory_is_plausible() -> None:
    assert 2**24 < free_memory() < 2**50
