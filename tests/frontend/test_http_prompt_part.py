"""What completions and /generate repeat of their prompts, over the scripted core."""

import json
from typing import Any

import pytest

from outrider.engine_core.plan import TokenLogprobs
from outrider.frontend.http.answers import Collected, best_samples
from outrider.frontend.meta_info import running_meta_info
from outrider.frontend.service import Delta

from .fake_core import TOKENIZER, expected_text
from .live_server import LiveServer, post

PROMPT = "def f(x):"
IDS = TOKENIZER.encode(PROMPT)
PIECES = [TOKENIZER.token_text(token) for token in IDS]


def completion(server: LiveServer, **body: object) -> Any:
    answer = post(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 4, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(server: LiveServer, **body: object) -> list[Any]:
    sent = {"prompt": PROMPT, "max_tokens": 7, "stream": True, **body}
    answer = post(server, "/v1/completions", sent)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [json.loads(line)["choices"][0] for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("prompt", [PROMPT, IDS, [PROMPT, PROMPT], [IDS, IDS]], ids=str)
def test_echo_puts_the_prompt_before_the_text(server: LiveServer, prompt: object) -> None:
    choices = completion(server, prompt=prompt, echo=True, n=2)["choices"]
    text = PROMPT + expected_text(PROMPT, 4)
    count = 4 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 2
    assert [choice["text"] for choice in choices] == [text] * count
    assert choices[0]["logprobs"] is None


def test_echoed_logprobs_begin_with_those_of_the_prompt(server: LiveServer) -> None:
    [choice] = completion(server, echo=True, logprobs=2)["choices"]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["tokens"][: len(IDS)] == PIECES
    assert found["token_logprobs"] == [None] + [-0.5] * (len(IDS) + 3)
    assert [top and len(top) for top in found["top_logprobs"]] == [None] + [2] * (len(IDS) + 3)
    lengths = [len(piece) for piece in found["tokens"]]
    assert found["text_offset"] == [sum(lengths[:i]) for i in range(len(lengths))]


def test_echo_may_score_a_prompt_without_an_answer(server: LiveServer) -> None:
    [choice] = completion(server, echo=True, logprobs=0, max_tokens=0)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * (len(IDS) - 1)
    assert choice["logprobs"]["top_logprobs"] == [None] + [{}] * (len(IDS) - 1)
    refused = post(server, "/v1/completions", {"prompt": "a", "max_tokens": 0})
    assert refused.json()["error"]["param"] == "max_tokens"


def test_a_streamed_echo_comes_once_and_first(server: LiveServer) -> None:
    parts = chunks(server, echo=True, logprobs=1, return_token_ids=True)
    assert len(parts) > 1
    assert str(parts[0]["text"]).startswith(PROMPT)
    assert "".join(str(part["text"]) for part in parts) == PROMPT + expected_text(PROMPT, 7)
    tokens = [token for part in parts for token in part["logprobs"]["tokens"]]
    assert tokens[: len(IDS)] == PIECES
    assert len(tokens) == len(IDS) + 7
    offsets = [at for part in parts for at in part["logprobs"]["text_offset"]]
    assert offsets == sorted(offsets)
    assert parts[0]["prompt_token_ids"] == IDS
    assert all("prompt_token_ids" not in part for part in parts[1:])
    assert sum(len(part["token_ids"]) for part in parts) == 7


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_characters_of_the_text(server: LiveServer, stream: bool) -> None:
    """Of characters in several tokens, and of special tokens, which are not shown by default."""
    text = 'é😀 = "日本"'
    ids = TOKENIZER.encode(text)
    special = min(TOKENIZER.special_ids)
    ids = [*ids[:3], special, *ids[3:]]
    asked: dict[str, object] = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": len(ids)}
    parts = chunks(server, **asked) if stream else completion(server, **asked)["choices"]
    offsets = [at for part in parts for at in part["logprobs"]["text_offset"]]
    answer = "".join(part["text"] for part in parts)
    assert answer == text + text  # the engine of these tests repeats its prompt
    both = ids + ids
    assert offsets == [len(TOKENIZER.decode(both[:i]).rstrip("\ufffd")) for i in range(len(both))]
    assert len(set(offsets)) < len(offsets) - 5
    shown = completion(server, **asked, skip_special_tokens=False)["choices"][0]
    before = TOKENIZER.decode(ids, skip_special=False)
    assert shown["logprobs"]["text_offset"][len(ids)] == len(before)


def test_prompt_logprobs_have_vllms_form(server: LiveServer) -> None:
    [choice] = completion(server, prompt_logprobs=1, max_tokens=0)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(IDS) - 1
    for token, entry in zip(IDS[1:], rest, strict=True):
        assert entry[str(token)] == {
            "logprob": -0.5, "rank": 7, "decoded_token": TOKENIZER.token_text(token)
        }  # fmt: skip
        assert entry["100"]["rank"] == 1
    both = completion(server, prompt_logprobs=3, logprobs=1, echo=True)["choices"][0]
    assert len(both["prompt_logprobs"][1]) == 4
    assert len(both["logprobs"]["top_logprobs"][1]) == 1
    bare = completion(server)["choices"][0]
    assert not {"prompt_logprobs", "token_ids", "prompt_token_ids"} & bare.keys()


def test_token_ids_come_where_they_are_asked_for(server: LiveServer) -> None:
    [choice] = completion(server, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == IDS
    assert choice["token_ids"] == (IDS * 4)[:4]


CHAT = {"messages": [{"role": "user", "content": "def f(x):"}], "max_tokens": 5}
RENDERED = TOKENIZER.encode("<|im_start|>user\ndef f(x):<|im_end|>\n<|im_start|>assistant\n", False)


def test_chat_repeats_its_rendered_prompt(chat_server: LiveServer) -> None:
    body = CHAT | {"prompt_logprobs": 1, "return_token_ids": True, "n": 2}
    found = post(chat_server, "/v1/chat/completions", body).json()
    assert found["prompt_token_ids"] == RENDERED
    assert [choice["token_ids"] for choice in found["choices"]] == [RENDERED[:5]] * 2
    first, *rest = found["prompt_logprobs"]
    assert first is None
    assert [entry[str(token)]["logprob"] for token, entry in zip(RENDERED[1:], rest, strict=True)]
    assert all(entry["100"]["rank"] == 1 for entry in rest)
    bare = post(chat_server, "/v1/chat/completions", CHAT).json()
    assert not {"prompt_logprobs", "prompt_token_ids"} & bare.keys()
    assert "token_ids" not in bare["choices"][0]


def test_streamed_chat_gives_the_ids_of_its_prompt_first(chat_server: LiveServer) -> None:
    body = CHAT | {"return_token_ids": True, "stream": True, "n": 2}
    answer = post(chat_server, "/v1/chat/completions", body)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if "{" in line]
    first, *rest = map(json.loads, lines)
    assert first["prompt_token_ids"] == RENDERED
    assert not any("prompt_token_ids" in chunk for chunk in rest)
    ids: dict[int, list[int]] = {0: [], 1: []}
    for chunk in rest:
        for choice in chunk["choices"]:
            ids[choice["index"]] += choice.get("token_ids", [])
    assert ids == {0: RENDERED[:5], 1: RENDERED[:5]}


def test_best_of_draws_more_than_it_returns(server: LiveServer) -> None:
    answer = completion(server, prompt=["a", "b"], best_of=3, n=2, seed=1, logprobs=None)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in choices)
    assert answer["usage"]["completion_tokens"] == 2 * 3 * 4
    assert [r.params.logprobs for r in server.core.requests[-6:]] == [0] * 6


def test_the_likeliest_samples_are_kept_in_order() -> None:
    values = [[-1.0], [-0.25, -0.75], [-0.1, -3.0], [], [-2.0], [-0.5]]
    sequences = []
    for index, some in enumerate(values):
        entries = tuple(TokenLogprobs(1, value, b"", b"") for value in some)
        sequence = Collected()
        sequence.add(
            Delta(
                index=index,
                rid="r",
                text=str(index),
                tokens=[1] * len(some),
                logprobs=entries,
                finish=None,
                meta_info=running_meta_info("r", 1, 1),
            )
        )
        sequences.append(sequence)
    assert [one.joined() for one in best_samples(sequences, 3, 2)] == ["1", "0", "5", "4"]
    assert [one.joined() for one in best_samples(sequences, 6, 1)] == ["1"]


@pytest.mark.parametrize("start", [0, 1, 3, len(IDS)])
def test_generate_scores_a_prompt_from_where_it_is_told(server: LiveServer, start: int) -> None:
    body = {
        "text": PROMPT,
        "sampling_params": {"max_new_tokens": 3},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": start,
    }
    meta = post(server, "/generate", body).json()["meta_info"]
    found = meta["input_token_logprobs"]
    assert [token for _, token, _ in found] == IDS[start:]
    # SGLang's answer: null for the first of them, wherever they start.
    scored = len(IDS) - start - 1
    assert [value for value, _, _ in found] == ([None, *[-0.5] * scored] if scored >= 0 else [])
    assert len(meta["output_token_logprobs"]) == 3
    tops = [top and len(top) for top in meta["input_top_logprobs"]]
    assert tops == ([None, *[2] * scored] if scored >= 0 else [])
    bare = post(server, "/generate", body | {"logprob_start_len": -1}).json()["meta_info"]
    assert "input_token_logprobs" not in bare


def test_a_cumulative_stream_repeats_the_scores(server: LiveServer) -> None:
    body = {
        "input_ids": IDS,
        "sampling_params": {"max_new_tokens": 7},
        "return_logprob": True,
        "logprob_start_len": 0,
        "stream": True,
    }
    lines = post(server, "/generate", body).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
    lengths = [event["meta_info"]["input_token_logprobs_length"] for event in events]
    assert len(events) > 1
    assert set(lengths) == {len(IDS)}
