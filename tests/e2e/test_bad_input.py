"""Bad command lines, config files, batch lines and model folders.

Each gives one message that names what is at fault, the documented exit status, and no traceback.
Frames are in test_bad_frames.py, HTTP bodies in tests/frontend/test_bad_http.py.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from outrider.engine.build import build_worker
from outrider.engine_core.assembly import load_tail
from outrider.engine_core.config import EngineConfig
from outrider.engine_core.model_path import resolve_model
from outrider.engine_core.refusal import RefusedError
from outrider.frontend import cli
from outrider.frontend.engine_handle import load_tokenizer
from outrider.frontend.tokenizer import Tokenizer

from ..engine.tiny import write_checkpoint

BASE = ["generate", "--model", "pycoder", "--prompt", "x"]
NGRAM = ["--speculative-algorithm", "NGRAM"]
EAGLE3 = ["--speculative-algorithm", "EAGLE3"]
SPECULATIVE = "--speculative-config"


class Answer(NamedTuple):
    status: int
    message: str


def outrider(args: list[str], capsys: pytest.CaptureFixture[str]) -> Answer:
    """Run a command line that must fail; its last paragraph of standard error."""
    try:
        status = cli.main(args)
    except SystemExit as leave:  # argparse
        status = int(str(leave.code))
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    _, found, message = err.rpartition("error: ")
    assert found, err
    return Answer(status, message)


FLAGS: list[tuple[list[str], str, str]] = [
    (["--page-size", "7"], "page_size", "1, 16, 32 or 64"),
    (["--page-size", "16.0"], "--page-size", "invalid int"),
    (["--speculative-num-draft-tokens", "4"], "speculative_num_draft_tokens", "leave this out"),
    ([*NGRAM, "--speculative-num-draft-tokens", "65"], "num_draft_tokens", "between 2 and 64"),
    ([*NGRAM, "--speculative-num-draft-tokens", "0"], "num_draft_tokens", "got 0"),
    ([*NGRAM, "--speculative-num-draft-tokens", "1"], "num_draft_tokens", "leaves no draft"),
    ([*NGRAM, "--speculative-num-draft-tokens", "-1"], "num_draft_tokens", "got -1"),
    ([*NGRAM, "--speculative-ngram-min-bfs-breadth", "0"], "min_bfs_breadth", "max_bfs_breadth"),
    ([*NGRAM, "--speculative-ngram-min-bfs-breadth", "11"], "min_bfs_breadth", "= 10, got 11"),
    ([*NGRAM, "--speculative-ngram-max-bfs-breadth", "0"], "max_bfs_breadth", "between 1"),
    ([*NGRAM, "--speculative-ngram-max-bfs-breadth", "9999999999"], "max_bfs_breadth", "between"),
    ([*NGRAM, "--speculative-ngram-max-trie-depth", "1"], "max_trie_depth", "between 2 and 64"),
    ([*NGRAM, "--speculative-ngram-max-trie-depth", "65"], "max_trie_depth", "between 2 and 64"),
    ([*NGRAM, "--speculative-ngram-capacity", "18"], "ngram_capacity", "trie depth of 18"),
    ([*NGRAM, "--speculative-ngram-capacity", "9999999999"], "ngram_capacity", "2147483647"),
    ([*NGRAM, "--speculative-ngram-match-type", "bfs"], "match-type", "'BFS', 'PROB'"),
    ([*NGRAM, "--speculative-ngram-external-sam-budget", "12"], "sam_budget", "between 0 and"),
    ([*NGRAM, "--speculative-ngram-external-sam-budget", "-1"], "sam_budget", "between 0 and"),
    ([*NGRAM, "--speculative-ngram-external-corpus-path", "x"], "sam_budget", "must be 1 or more"),
    ([*NGRAM, "--speculative-ngram-external-corpus-max-tokens", "0"], "max_tokens", "1 or more"),
    (["--speculative-ngram-capacity", "100"], "ngram_capacity", "--speculative-algorithm NGRAM"),
    (["--speculative-ngram-external-corpus-path", "x"], "corpus_path", "needs"),
    (
        ["--speculative-algorithm", "MAGIC"],
        "speculative_algorithm",
        "choose one of DFLASH, ",
    ),
    (["--speculative-algorithm", ""], "speculative_algorithm", "must not be empty"),
    (["--speculative-algorithm", "none"], "speculative_algorithm", "leave it out"),
    (["--speculative-algorithm", "NextN"], "speculative_algorithm", "not built yet"),
    ([SPECULATIVE, "{"], "speculative_config", "JSON object"),
    ([SPECULATIVE, ""], "speculative_config", "JSON object"),
    ([SPECULATIVE, "[1]"], "speculative_config", "JSON object"),
    ([SPECULATIVE, "{}"], "speculative_config", 'needs "method"'),
    ([SPECULATIVE, '{"method": "ngram", "method": "eagle"}'], "speculative_config", "twice"),
    ([SPECULATIVE, '{"method": 5}'], "speculative_config", "method must be a string"),
    ([SPECULATIVE, '{"method": "mtp"}'], "speculative_algorithm", "MTP is not built"),
    ([SPECULATIVE, '{"method": "eagle3", "model": "/none"}'], "draft_model_path", "not found"),
    ([SPECULATIVE, '{"method": "eagle3", "revision": "v1"}'], "draft_model_revision", "needs"),
    ([SPECULATIVE, '{"method": "eagle3", "model": 1}'], "speculative_config", "model must be"),
    ([SPECULATIVE, '{"method": "ngram", "model": "m"}'], "draft_model_path", "NGRAM does not"),
    ([*EAGLE3, "--speculative-eagle-topk", "4"], "speculative_eagle_topk", "num-steps beside it"),
    ([*EAGLE3, "--speculative-num-steps", "64"], "speculative_num_steps", "between 1 and 63"),
    ([*EAGLE3, "--tp-size", "2"], "tp_size", "one rank so far"),
    ([*EAGLE3, "--speculative-token-map", "x.json"], "speculative_token_map", "d2t"),
    ([*EAGLE3, "--speculative-draft-load-format", "gguf"], "draft-load-format", "'dummy'"),
    ([*NGRAM, "--speculative-num-steps", "3"], "speculative_num_steps", "leave it out"),
    ([*NGRAM, "--speculative-draft-model", "x"], "draft_model_path", "leave it out"),
    (["--speculative-draft-model-path", "x"], "draft_model_path", "needs --speculative-algorithm"),
    ([SPECULATIVE, '{"method": "ngram", "x": [1]}'], "speculative_config", "'x'"),
    ([SPECULATIVE, '{"method": "ngram", "num_speculative_tokens": 64}'], "draft_tokens", "got 65"),
    ([SPECULATIVE, '{"method": "ngram", "num_speculative_tokens": true}'], "config", "whole"),
    ([SPECULATIVE, '{"method": "ngram"}', *NGRAM], "speculative_config", "leave one out"),
    (["--mem-fraction-static", "nan"], "mem_fraction_static", "between 0 and 1"),
    (["--max-running-requests", "0"], "max_running_requests", "between 1 and 65536"),
    (["--max-running-requests", "1000000000"], "max_running_requests", "between 1 and 65536"),
    (["--max-queued-requests", "0"], "max_queued_requests", "leave it out"),
    (["--chunked-prefill-size", "0"], "chunked_prefill_size", "-1 (no chunks)"),
    (["--chunked-prefill-size", "9999999999"], "chunked_prefill_size", "2147483647"),
    (["--context-length", "1"], "context_length", "2 or more"),
    (["--stream-interval", "0"], "stream_interval", "1 or more"),
    (["--num-threads", "0"], "num_threads", "leave it out"),
    (["--max-total-tokens", "1"], "max_total_tokens", "one page"),
    (["--max-total-tokens", "9" * 30], "max_total_tokens", "64 bits"),
    (["--random-seed", "9" * 30], "random_seed", "64 bits"),
    (["--priority-preemption-threshold", "-1"], "priority_preemption_threshold", "0 or more"),
    (["--served-model-name", ""], "served_model_name", "must not be empty"),
    (["--dtype", "int8"], "--dtype", "'float32'"),
    (["--device", "tpu"], "--device", "'cpu'"),
    (["--device", "cpu", "--dtype", "bfloat16"], "dtype", "a CPU computes in float32"),
    (["--device", "cpu", "--disable-cuda-graph"], "disable_cuda_graph", "no CUDA graphs"),
    (["--simulate-accept-length", "2"], "simulate_accept_length", "needs --speculative"),
    ([*NGRAM, "--simulate-accept-length", "0.5"], "simulate_accept_length", "between 1 and"),
    (["--skip-tokenizer-init"], "--skip-tokenizer-init", "token ids"),
    (["--load-format", "gguf"], "--load-format", "'dummy'"),
    (["--revision", "main"], "revision", "leave revision out"),
    (["--tokenizer-path", "/none"], "tokenizer_path", "not a folder"),
    (["--no-such-flag"], "--no-such-flag", "unrecognized"),
    (["--temperature", "nan"], "temperature", "between 0 and"),
    (["--logit-bias", "{"], "logit_bias", "JSON object"),
    (["--bad-words-ids", "[1]"], "bad_words_ids", "JSON list of lists"),
    (["--allowed-token-ids", "-1"], "allowed_token_ids", "outside the vocabulary"),
    (["--stop-token-ids", "x"], "--stop-token-ids", "invalid int"),
    (["--top-k", "0"], "top_k", "-1 (all)"),
    (["--logprobs", "2"], "--logprobs", "add --json"),
    (["--prompt-file", "x"], "--prompt-file", "not allowed with"),
]


@pytest.mark.parametrize(("args", "field", "words"), FLAGS, ids=lambda value: str(value)[:60])
def test_flags(args: list[str], field: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = outrider([*BASE, *args], capsys)
    assert field in answer.message
    assert words in answer.message
    assert answer.status == 2


CONFIGS: list[tuple[str, bytes, str, str]] = [
    ("yaml", b"page_sise: 16", "'page_sise'", "did you mean 'page_size'"),
    ("yaml", b"temperature: 1", "'temperature'", "unknown key"),
    ("yaml", b"page_size: '16'", "page_size", "Expected `int`, got `str`"),
    ("yaml", b"page_size: 1.5", "page_size", "Expected `int`, got `float`"),
    ("yaml", b"page_size: null", "page_size", "Expected `int`, got `null`"),
    ("yaml", b"page_size: {a: 1}", "page_size", "Expected `int`, got `object`"),
    ("yaml", b"page_size: 17", "page_size", "1, 16, 32 or 64"),
    ("yaml", b"disable_radix_cache: 1", "disable_radix_cache", "Expected `bool`"),
    ("yaml", b"dtype: int8", "dtype", "Invalid enum value 'int8'"),
    ("yaml", b"a: [", "config.yaml", "one mapping"),
    ("yaml", b"- a", "config.yaml", "got `array`"),
    ("yaml", b"", "config.yaml", "one mapping"),
    ("yaml", b"\xff\xfe\x00", "config.yaml", "one mapping"),
    ("yaml", b"a: 1\n---\nb: 2", "config.yaml", "one mapping"),
    ("yaml", b"!!python/object/apply:os.getcwd []", "config.yaml", "one mapping"),
    ("yaml", b"[" * 3000, "config.yaml", "one mapping"),
    ("yaml", b"page-size: 16\npage_size: 1", "page_size", "mean the same"),
    ("yaml", b"speculative_config: [1]", "speculative_config", "JSON object"),
    ("yaml", b"speculative_config: {method: ngram, k: 1}", "speculative_config", "'k'"),
    ("json", b"{", "config.json", "truncated"),
    ("json", b"[]", "config.json", "got `array`"),
    ("json", b"\xff", "config.json", "one mapping"),
    ("json", b"[" * 100_000, "config.json", "one mapping"),
    ("json", b'{"page_size": 16} x', "config.json", "one mapping"),
]


@pytest.mark.parametrize(
    ("suffix", "content", "field", "words"), CONFIGS, ids=lambda value: str(value)[:40]
)
def test_config_files(
    suffix: str,
    content: bytes,
    field: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / f"config.{suffix}"
    file.write_bytes(content)
    answer = outrider([*BASE, "--config", str(file)], capsys)
    assert answer.status == 2
    assert field in answer.message
    assert words in answer.message


def test_paths_of_a_batch_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n')
    other = tmp_path / "notes.json"
    for content in ('{"prompt": "mine"}', "my notes", '{"id": 1}\n{"n": 5'):
        other.write_text(content)
        args = ["run", "--model", "pycoder", "--input", str(source), "--output", str(other)]
        answer = outrider(args, capsys)
        assert answer.status == 1
        assert "is not an output of outrider run" in answer.message
        assert "give another --output" in answer.message
        assert other.read_text() == content, "what is not ours must stay as it is"
    for args, field in (
        (["--input", str(source)], "--output"),
        (["--input", "/none", "--output", str(other)], "--input"),
        (["--input", str(tmp_path), "--output", str(other)], "--input"),
        (["--input", str(source), "--output", str(source)], "--output"),
        (["--input", str(source), "--output", str(tmp_path)], "--output"),
        (["--input", str(source), "--output", "/none/x"], "--output"),
        (["--input", str(source), "--output", str(other), "--summary-json", "/none/x"], "summary"),
    ):
        answer = outrider(["run", "--model", "pycoder", *args], capsys)
        assert answer.status == 2
        assert field in answer.message


# (line, words of the error; None: it is answered)
LINES: list[tuple[str | bytes, str | None]] = [
    ('{"prompt": "def f(", "max_new_tokens": 3, "id": "good"}', None),
    ("not json", "not a JSON object"),
    ('{"prompt": "x"', "truncated"),
    ('{"prompt": "x"} {"prompt": "y"}', "trailing"),
    ("[]", "Expected `object`, got `array`"),
    ('"x"', "Expected `object`, got `str`"),
    ("5", "got `int`"),
    ("null", "got `null`"),
    (b"\xff\xfe\x00", "not a JSON object"),
    (b'{"prompt": "\xff"}', "UTF-8"),
    ("[" * 50_000, "not a JSON object"),
    ('{"prompt": ' + "[" * 50_000, "not a JSON object"),
    ("{}", "prompt: is missing"),
    ('{"text": "x"}', "prompt: is missing"),
    ('{"prompt": null}', "prompt: "),
    ('{"prompt": 5}', "prompt: "),
    ('{"prompt": {"a": 1}}', "prompt: "),
    ('{"prompt": ["a"]}', "prompt"),
    ('{"prompt": [1.5]}', "prompt"),
    ('{"prompt": ""}', "prompt: is empty"),
    ('{"prompt": []}', "prompt: is empty"),
    ('{"prompt": [-1]}', "outside the vocabulary"),
    ('{"prompt": [8192]}', "outside the vocabulary"),
    ('{"prompt": [99999999999999999999]}', "prompt"),
    (json.dumps({"prompt": "x = 1\n" * 400}), "shorten it"),
    ('{"prompt": "x", "max_new_tokens": 600}', "ask for at most"),
    ('{"prompt": "x", "max_new_tokens": "many"}', "max_new_tokens: "),
    ('{"prompt": "x", "max_new_tokens": -1}', "max_new_tokens: "),
    ('{"prompt": "x", "max_tokens": 1, "max_new_tokens": 1}', "means the same"),
    ('{"prompt": "x", "temprature": 1}', "temprature: unknown field"),
    ('{"prompt": "x", "temperature": 1e300}', "temperature: "),
    ('{"prompt": "x", "top_k": 99999999999}', "top_k: "),
    ('{"prompt": "x", "stop": [5]}', "stop"),
    ('{"prompt": "x", "stop": ""}', "stop: "),
    ('{"prompt": "x", "stop_token_ids": [9000]}', "stop_token_ids: "),
    ('{"prompt": "x", "logit_bias": {"x": 1}}', "logit_bias"),
    ('{"prompt": "x", "logit_bias": {"9000": 1}}', "logit_bias: "),
    ('{"prompt": "x", "seed": 1e99}', "seed: "),
    ('{"prompt": "x", "n": 0}', "n: "),
    ('{"prompt": "x", "priority": 1, "max_new_tokens": 1}', "--enable-priority-scheduling"),
    ('{"prompt": "x", "cache_salt": 5}', "cache_salt: "),
    ('{"prompt": "x", "speculative": "no"}', "speculative: "),
    ('{"prompt": "x", "regex": "a("}', "regex: "),
    ('{"prompt": "x", "id": [1]}', "id: "),
    ('{"prompt": "x", "id": "good"}', "used by an earlier line"),
    ('{"prompt": "\\ud800"}', ""),
    ('{"url": "/v1/completions", "body": {"prompt": "x"}}', "custom_id"),
    ('{"custom_id": 5, "url": "/v1/completions", "body": {}}', "custom_id"),
    ('{"custom_id": "a", "url": "/v1/images", "body": {}}', "url: must be /v1/completions"),
    ('{"custom_id": "b", "url": "/v1/completions"}', "body"),
    ('{"custom_id": "c", "url": "/v1/completions", "body": 5}', "body: "),
    ('{"custom_id": "d", "url": "/v1/completions", "body": {"stream": true}}', "cannot stream"),
    ('{"custom_id": "e", "url": "/v1/completions", "body": {}, "x": 1}', "`x`"),
    ('{"custom_id": "f", "url": "/v1/completions", "body": {"model": "pycoder"}}', "prompt"),
    ('{"custom_id": "g", "method": "GET", "url": "/v1/completions", "body": {}}', "method: "),
    ('{"prompt": "def g(", "max_new_tokens": 3, "id": "last"}', None),
]


def test_batch_lines_through_a_real_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    raw = [line if isinstance(line, bytes) else line.encode() for line, _ in LINES]
    source.write_bytes(b"\n".join(raw))
    small = ["--context-length", "512", "--max-total-tokens", "2048", "--num-threads", "1"]
    paths = ["--input", str(source), "--output", str(target), "--no-progress"]
    assert cli.main(["run", "--model", "pycoder", *paths, *small]) == 0
    assert "Traceback" not in capsys.readouterr().err
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(records) == len(LINES)
    texts = [json.dumps(record, ensure_ascii=False) for record in records]
    for (line, words), shown in zip(LINES, raw, strict=True):
        if words:
            quoted = json.dumps(words, ensure_ascii=False)[1:-1]
            assert any(quoted in text and "error" in text for text in texts), (line, words, shown)
    good = {r["id"]: r for r in records if r.get("finish_reason")}
    assert set(good) == {"good", "last"}
    errors = [r for r in records if r["id"] not in good or "error" in r]
    assert len(errors) == len(LINES) - 2


# --- model folders --------------------------------------------------------------------------------

Break = Callable[[Path], None]


def edit(**fields: object) -> Break:
    """Set fields of config.json."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def write(name: str, content: bytes) -> Break:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


def remove(name: str) -> Break:
    return lambda folder: (folder / name).unlink()


def cut(keep: int) -> Break:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Break:
    """Rewrite the tensors of the checkpoint."""

    def rewrite(folder: Path) -> None:
        file = folder / "model.safetensors"
        held = load_file(file)
        change(held)
        save_file(held, file)

    return rewrite


def shards(*names: str) -> Break:
    """Replace the single file by an index that names these shards for every tensor."""

    def change(folder: Path) -> None:
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            held = list(file.keys())
        (folder / "model.safetensors").rename(folder / "part-1.safetensors")
        weight_map = {name: names[i % len(names)] for i, name in enumerate(held)}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))

    return change


NORM = "model.norm.weight"
ROPE = {"rope_type": "yarn", "factor": 4.0}
FOLDERS: dict[str, tuple[Break, str]] = {
    "weights cut in the data": (cut(-100), "truncated"),
    "weights cut in the header": (cut(40), "truncated"),
    "weights of no bytes": (cut(0), "truncated"),
    "weights that are text": (write("model.safetensors", b"version https://git-lfs"), "truncated"),
    "no weights": (remove("model.safetensors"), "has neither model.safetensors nor"),
    "a missing shard": (shards("part-1.safetensors", "part-2.safetensors"), "part-2.safetensors"),
    "a shard elsewhere": (shards("../part-1.safetensors"), "not a plain file name"),
    "a broken index": (write("model.safetensors.index.json", b"{"), "index.json"),
    "a missing tensor": (tensors(lambda t: t.__delitem__(NORM)), f"lacks tensor '{NORM}'"),
    "an extra tensor": (
        tensors(lambda t: t.update({"model.extra": t[NORM].clone()})),
        "'model.extra'",
    ),
    "a wrong shape": (
        tensors(lambda t: t.update({NORM: t[NORM][:3].clone()})),
        f"'{NORM}' has shape [3]",
    ),
    "a wrong type": (
        tensors(lambda t: t.update({NORM: t[NORM].int()})),
        f"'{NORM}' is torch.int32",
    ),
    "no config": (remove("config.json"), "has no config.json"),
    "a broken config": (write("config.json", b'{"architectures": ['), "config.json"),
    "a config that is a list": (write("config.json", b"[]"), "config.json"),
    "another architecture": (edit(architectures=["MambaForCausalLM"]), "'MambaForCausalLM'"),
    "no architecture": (edit(architectures=None), "architectures"),
    "another activation": (edit(hidden_act="gelu"), "hidden_act: 'gelu'"),
    "another rope": (edit(rope_scaling=ROPE), "yarn"),
    "a quantized checkpoint": (edit(quantization_config={"bits": 4}), "quantization_config"),
    "experts": (edit(num_experts=8), "num_experts"),
    "a size of text": (edit(hidden_size="16"), "hidden_size"),
    "no layers": (edit(num_hidden_layers=0), "num_hidden_layers"),
    "a layer too many": (edit(num_hidden_layers=3), "lacks tensor 'model.layers.2"),
    "a layer too few": (edit(num_hidden_layers=1), "'model.layers.1"),
    "another vocabulary": (edit(vocab_size=41), "config.json asks for [41"),
    "heads that do not divide": (edit(num_key_value_heads=3), "num_key_value_heads"),
    "an end token outside": (edit(eos_token_id=40), "eos_token_id: 40"),
    "a broken generation config": (write("generation_config.json", b"{"), "generation_config"),
}  # fmt: skip


def engine_config(folder: Path, **fields: object) -> EngineConfig:
    values: dict[str, object] = {"model": str(folder), "num_threads": 1, "max_total_tokens": 512}
    return EngineConfig(**values | fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", FOLDERS)
def test_model_folders(what: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", 40)
    change, words = FOLDERS[what]
    change(folder)
    with pytest.raises(RefusedError) as caught:
        build_worker(engine_config(folder)).shutdown()
    assert caught.value.refused.field == "model"
    assert words in caught.value.refused.reason


@contextlib.contextmanager
def tokenizer_refused(words: str) -> Iterator[None]:
    with pytest.raises(RefusedError) as caught:
        yield
    assert caught.value.refused.field in ("tokenizer_path", "chat_template")
    assert words in caught.value.refused.reason


TOKENIZERS: dict[str, tuple[Break, str]] = {
    "none": (remove("tokenizer.json"), "has no tokenizer.json"),
    "garbage": (write("tokenizer.json", b"\x00\x01"), "cannot be read"),
    "an empty object": (write("tokenizer.json", b"{}"), "cannot be read"),
    "a cut file": (write("tokenizer.json", b'{"version": "1.0"'), "cannot be read"),
    "a broken configuration": (write("tokenizer_config.json", b"{"), "not valid JSON"),
    "a configuration of Latin-1": (write("tokenizer_config.json", b'{"a": "\xe9"}'), "not valid"),
    "a configuration that is a list": (write("tokenizer_config.json", b"[]"), "JSON object"),
    "a broken template": (
        write("tokenizer_config.json", b'{"chat_template": "{% if"}'), "does not compile"
    ),
    "a template of Latin-1": (write("chat_template.jinja", b"\xe9"), "UTF-8"),
    "templates that are no objects": (
        write("tokenizer_config.json", b'{"chat_template": ["x"]}'), "not objects"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", TOKENIZERS)
def test_tokenizers(what: str, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((resolve_model("pycoder") / name).read_bytes())
    change, words = TOKENIZERS[what]
    change(tmp_path)
    with tokenizer_refused(words):
        Tokenizer(tmp_path)


def test_a_tokenizer_path_is_a_folder(tmp_path: Path) -> None:
    with tokenizer_refused("is not a folder"):
        load_tokenizer(engine_config(tmp_path, tokenizer_path="no/such"))
    with pytest.raises(ValueError, match="tokenizer_path"):
        load_tail(engine_config(tmp_path, tokenizer_path="no/such"))


def test_a_tokenizer_of_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ids reach beyond the model's vocabulary; found before anything is generated."""
    folder = write_checkpoint(tmp_path / "model", 40)
    pycoder = str(resolve_model("pycoder"))
    args = ["generate", "--model", str(folder), "--tokenizer-path", pycoder, "--prompt", "x"]
    answer = outrider([*args, "--num-threads", "1"], capsys)
    assert answer.status == 2
    assert "tokenizer_path" in answer.message
    assert "the model has 40 tokens" in answer.message


def test_a_broken_folder_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal of the core process reaches the terminal."""
    folder = write_checkpoint(tmp_path / "model", 8192)
    cut(-100)(folder)
    pycoder = str(resolve_model("pycoder"))
    args = ["generate", "--model", str(folder), "--tokenizer-path", pycoder, "--prompt", "x"]
    answer = outrider(args, capsys)
    assert answer.status == 2
    assert "model.safetensors: is truncated" in answer.message
