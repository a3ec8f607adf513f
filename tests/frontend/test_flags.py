"""Flags, config files and sampling values: layers, names and clear refusals."""

import argparse
import json
from pathlib import Path

import pytest

from outrider.engine_core.config import EngineConfig
from outrider.engine_core.refusal import RefusedError
from outrider.engine_core.sampling_params import SamplingParams
from outrider.frontend.flags import (
    UsageError,
    add_engine_flags,
    add_flags,
    engine_config,
    print_config,
    resolve_engine,
    resolve_server,
)
from outrider.frontend.flags_page import docs_table
from outrider.frontend.sampling_flags import add_sampling_flags, params_from, params_from_flags
from outrider.frontend.server_config import ServerConfig, is_local_endpoint

DOCS = Path(__file__).parents[2] / "docs" / "flags.md"


def engine(*args: str) -> EngineConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_engine_flags(parser)
    return resolve_engine(parser.parse_args(args))


def server(*args: str) -> ServerConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, ServerConfig, "server")
    add_engine_flags(parser)
    return resolve_server(parser.parse_args(["--model", "m", *args]))[1]


def test_docs_table_is_current() -> None:
    assert DOCS.read_text() == docs_table(), (
        "run: python -m outrider.frontend.flags_page > docs/flags.md"
    )


def test_every_field_is_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    known = {a.dest for a in parser._actions}
    assert set(EngineConfig.__struct_fields__) <= known
    assert all(f"`--{n.replace('_', '-')}`" in docs_table() for n in ServerConfig.__struct_fields__)


def test_both_names_of_the_number_of_ranks() -> None:
    assert engine("--model", "m", "--tp-size", "2").tp_size == 2
    assert engine("--model", "m", "--tensor-parallel-size", "4").tp_size == 4


def test_every_name_of_a_flag_is_a_key_and_a_keyword(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    names = {"model-path": "m", "tensor-parallel-size": 2, "tokenizer": "t"}
    file.write_text(json.dumps(names))
    by_file = engine("--config", str(file))
    assert (by_file.model, by_file.tp_size, by_file.tokenizer_path) == ("m", 2, "t")
    assert engine("--config", str(file), "--tp-size", "4").tp_size == 4
    assert (
        engine_config({"model_path": "m", "tensor_parallel_size": 2, "tokenizer": "t"}) == by_file
    )
    same = {"model": "m", "tp_size": 2, "tensor_parallel_size": 2}
    assert engine_config(same).tp_size == 2
    with pytest.raises(UsageError, match="tp_size and tensor_parallel_size are both set"):
        engine_config({**same, "tp_size": 4})
    file.write_text(json.dumps({"model": "m", "model-path": "n"}))
    with pytest.raises(UsageError, match=r"model and model-path are both set in .*c\.json"):
        engine("--config", str(file))
    with pytest.raises(UsageError, match="did you mean 'tensor_parallel_size'"):
        engine_config({"model": "m", "tensor_paralel_size": 2})


def test_sglang_spellings() -> None:
    config = engine(
        *("--model-path", "m", "--speculative-algorithm", "ngram", "--page-size", "1"),
        *("--speculative-num-draft-tokens", "8", "--disable-radix-cache", "--dtype", "float32"),
        *("--no-disable-overlap-schedule", "--mem-fraction-static", "0.25"),
    )
    assert config == EngineConfig(
        model="m",
        speculative_algorithm="ngram",
        speculative_num_draft_tokens=8,
        page_size=1,
        disable_radix_cache=True,
        dtype="float32",
        mem_fraction_static=0.25,
    )


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_config_file_lies_below_the_command_line(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"c.{suffix}"
    values = {"model-path": "m", "page_size": 64, "disable-radix-cache": True, "num_threads": None}
    file.write_text(json.dumps(values))  # JSON is YAML
    config = engine("--config", str(file), "--page-size", "16", "--no-disable-radix-cache")
    assert (config.model, config.page_size, config.disable_radix_cache) == ("m", 16, False)
    assert engine("--config", str(file)).page_size == 64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("page_sice: 16", "unknown key 'page_sice'.*did you mean 'page_size'"),
        ("port: 1", "unknown key 'port'"),
        ("- a\n- b", "must hold one mapping"),
        ("a: [", "must hold one mapping"),
        ("page-size: 16\npage_size: 1", "page-size and page_size are both set"),
        ("model: m\npage_size: many", "page_size: Expected `int"),
        ("model: m\npage_size: true", "page_size: Expected `int"),
        ("model: m\ndevice: tpu", "device: "),
        ("page_size: 16", "--model is required"),
        (
            "model: m\nspeculative_config: {method: ngram}\nspeculative_algorithm: NGRAM",
            "both set",
        ),
        ("", "must hold one mapping"),
    ],
)
def test_config_file_errors_are_clear(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(UsageError, match=message):
        engine("--config", str(file))
    with pytest.raises(UsageError, match="cannot read"):
        engine("--config", str(tmp_path / "none.yaml"))


def test_speculative_config_takes_vllms_keys(tmp_path: Path) -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 7}'
    config = engine("--model", "m", "--speculative-config", text)
    assert config.speculative_algorithm == "NGRAM"
    assert config.speculative_num_draft_tokens == 8
    file = tmp_path / "c.yaml"
    file.write_text("model: m\nspeculative-config: {method: ngram, num_speculative_tokens: 3}\n")
    assert engine("--config", str(file)).speculative_num_draft_tokens == 4
    over = engine("--config", str(file), "--speculative-config", text)
    assert over.speculative_num_draft_tokens == 8
    drafts = '"model": "d", "revision": "v1", "num_speculative_tokens": 5'
    for method, algorithm in (
        ("eagle", "EAGLE"),
        ("eagle3", "EAGLE3"),
        ("draft_model", "STANDALONE"),
    ):
        given = '{"method": "%s", %s}' % (method, drafts)  # noqa: UP031
        config = engine("--model", "m", "--speculative-config", given)
        assert config == EngineConfig(
            model="m",
            speculative_algorithm=algorithm,
            speculative_draft_model_path="d",
            speculative_draft_model_revision="v1",
            speculative_num_steps=5,
        )
    tree = '{"method": "eagle", "draft_tensor_parallel_size": 1}'
    with pytest.raises(RefusedError, match="supported: method, model, num_speculative_tokens"):
        engine("--model", "m", "--speculative-config", tree)
    for wrong in ("{", "[]", '{"model": "x"}', '{"num_speculative_tokens": 3}'):
        with pytest.raises(RefusedError, match="speculative_config"):
            engine("--model", "m", "--speculative-config", wrong)
    twice = '{"method": "ngram", "num_speculative_tokens": 3, "num_speculative_tokens": 5}'
    with pytest.raises(RefusedError, match="'num_speculative_tokens' twice; give it once"):
        engine("--model", "m", "--speculative-config", twice)
    lookup = '{"method": "ngram", "prompt_lookup_max": 5}'
    with pytest.raises(RefusedError, match="--speculative-ngram-max-trie-depth"):
        engine("--model", "m", "--speculative-config", lookup)
    with pytest.raises(UsageError, match="leave one out"):
        engine("--model", "m", "--speculative-config", text, "--speculative-algorithm", "NGRAM")


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (["--page-size", "7"], "page_size"),
        (["--speculative-num-draft-tokens", "4"], "speculative_num_draft_tokens"),
        (["--speculative-length-policy", "fixed"], "speculative_length_policy"),
        (["--priority-preemption-threshold", "3"], "priority_preemption_threshold"),
        (["--speculative-algorithm", "magic"], "speculative_algorithm"),
        (["--speculative-algorithm", "NEXTN"], "speculative_algorithm"),
        (["--max-running-requests", "0"], "max_running_requests"),
    ],
)
def test_wrong_values_name_their_field(args: list[str], field: str) -> None:
    with pytest.raises(RefusedError) as caught:
        engine("--model", "m", *args)
    assert caught.value.refused.field == field


def test_keyword_arguments() -> None:
    config = engine_config({"model": "m", "speculative_config": {"method": "ngram"}})
    assert config.speculative_algorithm == "NGRAM"
    with pytest.raises(UsageError, match="unknown engine option 'page_sise' in the arguments; did"):
        engine_config({"model": "m", "page_sise": 16})
    with pytest.raises(UsageError, match="page_size: Expected"):
        engine_config({"model": "m", "page_size": "16"})


# --- the server's part ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (["--port", "70000"], "port"),
        (["--drain-timeout", "-1"], "drain_timeout"),
        (["--drain-timeout", "nan"], "drain_timeout"),
        (["--api-key", ""], "api_key"),
        (["--zmq-token", ""], "zmq_token"),
        (["--zmq-endpoint", "inproc://x"], "zmq_endpoint"),
        (["--zmq-endpoint", "tcp://127.0.0.1"], "zmq_endpoint"),
        (["--zmq-endpoint", "tcp://127.0.0.1:99999"], "zmq_endpoint"),
        (["--zmq-endpoint", "tcp://0.0.0.0:5555"], "zmq_endpoint"),
        (["--zmq-endpoint", "tcp://*:5555"], "zmq_endpoint"),
        (["--zmq-endpoint", "tcp://10.1.2.3:5555"], "zmq_endpoint"),
        (["--zmq-endpoint", "tcp://some.host:5555"], "zmq_endpoint"),
        (["--zmq-curve-secret-key-file", "x"], "zmq_curve_clients_dir"),
        (["--zmq-curve-clients-dir", "x"], "zmq_curve_secret_key_file"),
        (
            ["--zmq-curve-clients-dir", "/", "--zmq-curve-secret-key-file", "/none"],
            "zmq_curve_secret_key_file",
        ),
    ],
)
def test_server_flags_are_checked(args: list[str], field: str) -> None:
    with pytest.raises(RefusedError) as caught:
        server(*args)
    assert caught.value.refused.field == field


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--zmq-endpoint", "ipc:///tmp/x"],
        ["--zmq-endpoint", "tcp://127.0.0.1:5555"],
        ["--zmq-endpoint", "tcp://[::1]:5555"],
        ["--zmq-endpoint", "tcp://localhost:*"],
        ["--zmq-endpoint", "tcp://0.0.0.0:5555", "--zmq-token", "secret"],
    ],
)
def test_server_flags_that_are_fine(args: list[str]) -> None:
    server(*args)


def test_only_this_host_is_local() -> None:
    assert is_local_endpoint("tcp://127.9.9.9:1")
    assert not is_local_endpoint("tcp://0.0.0.0:1")
    assert not is_local_endpoint("udp://127.0.0.1:1")


def test_secrets_are_not_printed() -> None:
    text = print_config(EngineConfig(model="m"), ServerConfig(api_key="KEY", zmq_token="TOK"))
    assert "KEY" not in text
    assert "TOK" not in text
    assert "page_size=16" in text


# --- sampling ------------------------------------------------------------------------------------


def sampling(*args: str) -> SamplingParams:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_sampling_flags(parser)
    return params_from_flags(parser.parse_args(args))


def test_sampling_flags() -> None:
    params = sampling(
        *("--max-new-tokens", "9", "--temperature", "0.5", "--seed", "-3", "--stop", "a"),
        *("--stop", "b", "--stop-token-ids", "7", "--ignore-eos", "--no-skip-special-tokens"),
        *("--logit-bias", '{"17": -5}', "--logprobs", "2", "--top-k", "4"),
    )
    assert params == SamplingParams(
        max_new_tokens=9,
        temperature=0.5,
        seed=-3,
        stop=("a", "b"),
        stop_token_ids=(7,),
        ignore_eos=True,
        skip_special_tokens=False,
        logit_bias={17: -5.0},
        logprobs=2,
        top_k=4,
    )
    assert sampling() == SamplingParams()
    assert sampling("--no-stop-trim").no_stop_trim
    with pytest.raises(SystemExit):
        sampling("--no-no-stop-trim")
    for wrong in ("{", '{"a": 1}', "[1]"):
        with pytest.raises(RefusedError, match="logit_bias"):
            sampling("--logit-bias", wrong)


def test_loose_sampling_values() -> None:
    base = SamplingParams(temperature=0.0)
    found = params_from({"stop": "x", "max_tokens": 5, "top_p": None}, base)
    assert found == SamplingParams(temperature=0.0, stop=("x",), max_new_tokens=5)
    one = SamplingParams(stop="self")  # type: ignore[arg-type]
    assert params_from({}, one).stop == ("self",)
    assert params_from({"stop": "x"}, one).stop == ("x",)
    assert params_from({"logit_bias": {"5": 1}}).logit_bias == {5: 1.0}
    assert params_from({"best_of": 1, "json_schema": None}) == SamplingParams()
    for values, field in (
        ({"temprature": 1}, "temprature"),
        ({"json_schema": "{"}, "json_schema"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 1, "max_new_tokens": 1}, "max_new_tokens"),
        ({"stream": True}, "stream"),
        ({"stop": [1]}, "stop[0]"),
    ):
        with pytest.raises(RefusedError) as caught:
            params_from(values)
        assert caught.value.refused.field == field


def test_a_baseline_of_any_speculation_is_a_valid_configuration() -> None:
    ours = ["--speculative-num-draft-tokens", "4", "--speculative-length-policy", "fixed"]
    config = engine("--model", "m", "--speculative-algorithm", "NGRAM", *ours)
    assert config.without_speculation() == engine("--model", "m")
    ours = ["--speculative-draft-model", "d", "--speculative-num-steps", "4"]
    config = engine("--model", "m", "--speculative-algorithm", "EAGLE3", *ours)
    assert config.speculative_draft_model_path == "d"
    assert config.without_speculation() == engine("--model", "m")
