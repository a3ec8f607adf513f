"""The native endpoints: /generate, management, metrics, corpora, tokens, docs."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from outrider.frontend.http import ServerState

from .fake_core import TOKENIZER, expected_text
from .live_server import LiveServer, eventually, live_server, post

META_KEYS = {
    "id",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "e2e_latency",
    "num_retractions",
    "spec_accept_length",
    "spec_accept_rate",
    "spec_verify_ct",
    "spec_verify_length",
    "spec_num_correct_drafts",
    "spec_num_proposed_drafts",
    "spec_correct_drafts_histogram",
    "spec_plain_steps",
    "spec_off_reason",
}


def stream(server: LiveServer, body: Mapping[str, object]) -> list[dict[str, object]]:
    with server.http.stream("POST", "/generate", json={**body, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_generate(server: LiveServer) -> None:
    body = {"text": "def f(x):", "sampling_params": {"max_new_tokens": 9}, "rid": "one"}
    answer = post(server, "/generate", body).json()
    meta = answer["meta_info"]
    assert answer["text"] == expected_text("def f(x):", 9)
    assert len(answer["output_ids"]) == 9
    assert set(meta) == META_KEYS
    assert meta["id"] == "one"
    assert meta["finish_reason"] == {"type": "length", "length": 9}
    assert (meta["spec_accept_length"], meta["spec_accept_rate"]) == (2.5, 0.5)
    assert (meta["cached_tokens"], meta["num_retractions"]) == (2, 1)
    assert meta["spec_correct_drafts_histogram"] == [1, 0, 3]


def test_generate_stream_is_cumulative(server: LiveServer) -> None:
    body = {"text": "a b c d", "sampling_params": {"max_new_tokens": 9}}
    chunks = stream(server, body)
    assert len(chunks) == 3
    assert chunks[-1]["text"] == expected_text("a b c d", 9)
    assert [len(c["output_ids"]) for c in chunks] == [3, 6, 9]  # type: ignore[arg-type]


def test_generate_stream_of_deltas(short_folder: Path) -> None:
    with live_server(short_folder, state=ServerState("p", cumulative_streams=False)) as live:
        chunks = stream(live, {"text": "a b c d", "sampling_params": {"max_new_tokens": 9}})
    assert "".join(str(c["text"]) for c in chunks) == expected_text("a b c d", 9)


def test_generate_batch(server: LiveServer) -> None:
    body = {
        "text": ["a b", "c d"],
        "sampling_params": [{"max_new_tokens": 3}, {"max_new_tokens": 5}],
        "rid": "batch",
    }
    answers = post(server, "/generate", body).json()
    assert [a["text"] for a in answers] == [expected_text("a b", 3), expected_text("c d", 5)]
    assert [a["meta_info"]["id"] for a in answers] == ["batch_0", "batch_1"]


def test_generate_batch_stream_has_indexes(server: LiveServer) -> None:
    chunks = stream(
        server, {"text": ["a b", "c d"], "sampling_params": {"max_new_tokens": 4, "n": 2}}
    )
    last = {chunk["index"]: chunk["text"] for chunk in chunks}
    assert last == {i: expected_text(p, 4) for i, p in enumerate(("a b", "a b", "c d", "c d"))}


def test_generate_logprobs(server: LiveServer) -> None:
    body = {
        "input_ids": TOKENIZER.encode("a b"),
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    meta = post(server, "/generate", body).json()["meta_info"]
    assert [(lp, text) for lp, _, text in meta["output_token_logprobs"]] == [
        (-0.5, "a"),
        (-0.5, " b"),
    ]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2]
    refused = post(server, "/generate", body | {"return_logprob": False, "top_logprobs_num": 0})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "return_text_in_logprobs"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/generate", {"text": "a", "min_tokens": 1}, "use sampling_params.min_new_tokens"),
        ("/generate", {"text": "a", "sampling_params": {"logprobs": 1}}, "use return_logprob"),
        ("/v1/completions", {"prompt": "a", "max_new_tokens": 1}, "use max_tokens instead"),
        ("/v1/completions", {"prompt": "a", "top_logprobs": 1}, "not by this endpoint"),
    ],
)
def test_misplaced_fields_name_the_one_to_use(
    server: LiveServer, path: str, body: dict[str, object], message: str
) -> None:
    refused = post(server, path, body)
    assert refused.status_code == 400
    assert message in refused.json()["error"]["message"]


def test_stop_token_is_trimmed_but_reported(server: LiveServer) -> None:
    a, b = TOKENIZER.encode("a b")
    body = {"input_ids": [a, b], "sampling_params": {"stop_token_ids": [b]}}
    answer = post(server, "/generate", body).json()
    assert answer["text"] == "a"
    assert answer["output_ids"] == [a, b]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": b}


def test_zero_tokens_are_a_prefill(server: LiveServer) -> None:
    answer = post(server, "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 0}})
    assert answer.json()["text"] == ""
    assert answer.json()["meta_info"]["completion_tokens"] == 0


def test_null_fields_mean_defaults(server: LiveServer) -> None:
    body = {"text": "a", "lora_path": None, "sampling_params": {"regex": None, "stop": None}}
    assert post(server, "/generate", body).status_code == 200


def test_abort_by_id_and_duplicate_ids(short_folder: Path) -> None:
    with live_server(short_folder) as live:
        live.core.slow = 0.2
        body = {"text": "a", "rid": "same", "stream": True}
        with live.http.stream("POST", "/generate", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            twice = post(live, "/generate", {"text": "a", "rid": "same"})
            assert twice.status_code == 400
            assert "in flight" in twice.json()["error"]["message"]
            assert post(live, "/abort_request", {"rid": "sam"}).json()["aborted"] == 0
            assert post(live, "/abort_request", {"rid": "same"}).json()["aborted"] == 1
            rest = [line for line in lines if line]
        assert json.loads(rest[-2][6:])["meta_info"]["finish_reason"]["type"] == "abort"
        assert live.service.open_requests == 0


def test_abort_all(short_folder: Path) -> None:
    with live_server(short_folder) as live:
        live.core.slow = 0.2
        body = {"text": ["a", "b", "c"], "stream": True}
        with live.http.stream("POST", "/generate", json=body) as answer:
            lines = answer.iter_lines()  # a dropped generator would close the connection
            next(lines)
            assert post(live, "/flush_cache", None).status_code == 400
            assert post(live, "/abort_request", {"abort_all": True}).json()["aborted"] == 3
        assert eventually(lambda: live.service.open_requests == 0)
        assert live.http.get("/flush_cache?timeout=2").status_code == 200


def test_health_and_readiness(server: LiveServer) -> None:
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/ready").status_code == 200


def test_starting_server_is_unhealthy(server: LiveServer) -> None:
    server.state.phase = "starting"
    try:
        assert server.http.get("/health").status_code == 503
        assert server.http.get("/ready").status_code == 503
        assert post(server, "/generate", {"text": "a"}).status_code == 503
    finally:
        server.state.phase = "up"


def test_vanished_process_is_noticed(short_folder: Path) -> None:
    with live_server(short_folder) as live:
        live.core_alive = False
        assert eventually(lambda: live.http.get("/health").status_code == 503)


def test_metrics(server: LiveServer) -> None:
    post(server, "/generate", {"text": "a b", "sampling_params": {"max_new_tokens": 8}})
    text = server.http.get("/metrics").text
    for line in (
        "outrider:spec_decode_num_drafts_total 10.0",
        "outrider:spec_decode_num_draft_tokens_total 40.0",
        "outrider:spec_decode_num_accepted_tokens_total 20.0",
        'outrider:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 8.0',
        "outrider:spec_accept_length 3.0",
        "outrider:spec_accept_rate 0.5",
        "outrider:max_total_num_tokens 4096.0",
    ):
        assert line in text
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert f"outrider:{name}_bucket" in text


def test_information(server: LiveServer) -> None:
    info = server.http.get("/server_info").json()
    assert info["internal_states"][0]["avg_spec_accept_length"] == 3.0
    assert info["drafter"] == "NGRAM"
    assert server.http.get("/model_info").json()["is_generation"] is True
    answer = server.http.get("/v1/capabilities").json()
    assert "capabilities" in answer
    assert {"NGRAM", "EAGLE3"} <= {drafter["name"] for drafter in answer["drafters"]}


def test_tokens_round_trip(server: LiveServer) -> None:
    found = post(server, "/tokenize", {"prompt": "x = '🙂'"}).json()
    assert found["tokens"] == TOKENIZER.encode("x = '🙂'")
    assert found["count"] == len(found["tokens"])
    assert post(server, "/detokenize", {"tokens": found["tokens"]}).json()["text"] == "x = '🙂'"


def test_corpora(server: LiveServer, tmp_path: Path) -> None:
    documents = ["def f():\n    pass\n", "", "x = 1\n"]
    count = sum(len(TOKENIZER.encode(d)) for d in documents) + 1
    body = {"corpus_id": "inline", "documents": documents, "tenant": "t"}
    added = post(server, "/add_external_corpus", body)
    assert added.status_code == 200
    assert added.json()["success"] is True
    assert added.json()["loaded_token_count"] == count
    assert server.core.corpora["inline"] == (count, "t")

    file = tmp_path / "corpus.jsonl"
    file.write_text('"a b c"\n\n"d e"\n')
    from_file = post(server, "/add_external_corpus", {"file_path": str(file), "name": "file"})
    assert from_file.json()["success"] is True

    unnamed = post(server, "/add_external_corpus", {"documents": ["a"]}).json()
    assert len(unnamed["corpus_id"]) == 32

    counts = server.http.get("/list_external_corpora").json()["corpus_token_counts"]
    assert set(counts) == {"inline", "file", unnamed["corpus_id"]}
    for _ in range(2):  # an unknown id succeeds
        removed = post(server, "/remove_external_corpus", {"corpus_id": "inline"})
        assert (removed.status_code, removed.json()["success"]) == (200, True)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "file_path or documents"),
        ({"documents": []}, "no token"),
        ({"documents": [""]}, "no token"),
        ({"file_path": "/nowhere.jsonl"}, "/nowhere.jsonl"),
    ],
)
def test_bad_corpora(server: LiveServer, body: dict[str, object], message: str) -> None:
    answer = post(server, "/add_external_corpus", body)
    assert answer.status_code == 400
    assert answer.json()["success"] is False
    assert message in answer.json()["message"]


def test_inline_corpus_over_the_cap_is_cut(short_folder: Path) -> None:
    with live_server(short_folder, state=ServerState("p", corpus_max_tokens=5)) as live:
        body = {"documents": ["a b c", "d e f g h"], "corpus_id": "cut"}
        answer = post(live, "/add_external_corpus", body).json()
        assert answer["success"] is True
        assert answer["loaded_token_count"] == 3
        assert "Truncated" in answer["message"]


def test_api_key(short_folder: Path) -> None:
    with live_server(short_folder, state=ServerState("p", api_key="k")) as live:
        assert live.http.get("/health").status_code == 200
        assert live.http.get("/metrics").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "k"}):
            refused = live.http.get("/v1/models", headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        allowed = live.http.get("/v1/models", headers={"authorization": "Bearer k"})
        assert allowed.status_code == 200


def test_openapi_and_docs(server: LiveServer) -> None:
    document = server.http.get("/openapi.json").json()
    schema = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]
    name = schema["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert "prompt" in document["components"]["schemas"][name]["properties"]
    page = server.http.get("/docs").text
    for path in document["paths"]:
        assert path.split("{")[0] in page
    assert "http://" not in page
    assert "https://" not in page
