"""Token ids in and out: a server and an engine that have no tokenizer."""

import json
from pathlib import Path

import pytest

from outrider import LLM
from outrider.engine_core.refusal import RefusedError
from outrider.frontend.errors import RequestFailed
from outrider.frontend.no_tokenizer import NoTokenizer

from .fake_core import MODEL, TOKENIZER
from .live_server import live_server, post

IDS = [5, 6, 7]


def test_http_takes_and_gives_token_ids(short_folder: Path) -> None:
    with live_server(short_folder, NoTokenizer(MODEL)) as server:
        body: dict[str, object] = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 4}}
        answer = post(server, "/generate", body).json()
        assert (answer["text"], len(answer["output_ids"])) == ("", 4)
        ids = {"model": "pycoder", "prompt": IDS, "max_tokens": 4, "logprobs": 1}
        choice = post(server, "/v1/completions", ids).json()["choices"][0]
        assert choice["logprobs"]["tokens"] == [f"token_id:{t}" for t in answer["output_ids"]]
        stream = {**ids, "logprobs": None, "stream": True, "max_tokens": 12}
        usage = {"include_usage": True, "continuous_usage_stats": True}
        lines = post(server, "/v1/completions", {**stream, "stream_options": usage}).text
        counts = [
            json.loads(line[6:])["usage"]["completion_tokens"]
            for line in lines.split("\n\n")
            if line.startswith("data: {")
        ]
        assert counts[-1] == 12
        assert len(set(counts)) > 2  # tokens are counted as they come
        for path, refused in (
            ("/generate", {"text": "a"}),
            ("/v1/completions", {"model": "pycoder", "prompt": "a"}),
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": IDS}),
            (
                "/v1/chat/completions",
                {"model": "pycoder", "messages": [{"role": "user", "content": "a"}]},
            ),
        ):
            answer = post(server, path, refused)
            assert answer.status_code == 501, path
            assert "--skip-tokenizer-init" in answer.text, path


def test_a_folder_with_a_config_alone_runs_on_random_weights(tmp_path: Path) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    small = {"num_hidden_layers": 2, "vocab_size": 512, "eos_token_id": 0, "bos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config | small))
    with pytest.raises(RefusedError, match="--skip-tokenizer-init"):
        LLM(str(tmp_path), load_format="dummy")
    with LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, num_threads=1) as llm:
        params = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0.0}
        [result] = llm.generate(IDS, params)
        assert (result.text, len(result.token_ids)) == ("", 6)
        with pytest.raises(RefusedError, match="token ids"):
            llm.generate("text", params)
        with pytest.raises(RequestFailed, match="stop_token_ids") as failed:
            llm.generate(IDS, {"stop": ["x"]})
        assert failed.value.status == 501


def test_ids_of_tokens_stay_readable() -> None:
    nothing = NoTokenizer(MODEL)
    assert nothing.token_bytes(12) == b"token_id:12"
    assert (nothing.bos_token, nothing.eos_token, nothing.decode(IDS)) == (None, None, "")
    assert TOKENIZER.has_text
    assert not nothing.has_text
