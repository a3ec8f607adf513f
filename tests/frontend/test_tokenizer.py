"""The tokenizer: agreement with transformers, chat templates, broken folders."""

import json
from pathlib import Path

import pytest

from outrider.engine_core.refusal import RefusedError
from outrider.frontend.sampling_defaults import load_sampling_defaults
from outrider.frontend.tokenizer import Tokenizer

from .fake_core import MODEL, TOKENIZER

MESSAGES: list[dict[str, object]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi <b> 🙂"},
]


def folder_with(path: Path, config: dict[str, object], template: str | None = None) -> Path:
    (path / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


@pytest.mark.parametrize("text", ["def f(x):\n    return x", "你好🙂é", "", "<|im_start|>user"])
def test_round_trip_and_bytes(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids, skip_special=False) == text
    assert b"".join(map(TOKENIZER.token_bytes, ids)) == text.encode()


def test_special_tokens_of_the_configuration() -> None:
    assert TOKENIZER.eos_token == "<|endoftext|>"
    assert TOKENIZER.decode(TOKENIZER.encode("a<|endoftext|>")) == "a"


def test_bos_follows_the_post_processor(tmp_path: Path) -> None:
    raw = json.loads((MODEL / "tokenizer.json").read_text())
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    raw["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    made = Tokenizer(tmp_path)
    assert made.encode("a b c d e")[0] == 0
    assert len(made.encode("a b c d e")) == 6  # a stored truncation is not applied
    assert made.encode("a", add_special_tokens=False) == TOKENIZER.encode("a")


@pytest.mark.parametrize("where", ["config", "list", "file"])
def test_chat_templates(tmp_path: Path, where: str) -> None:
    template = (
        "{%- for m in messages %}\n    {{- m.role + ': ' + m.content | tojson + eos_token }}\n"
        "{%- endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    config: dict[str, object] = {"eos_token": {"content": "<e>"}}
    if where == "config":
        config["chat_template"] = template
    elif where == "list":
        config["chat_template"] = [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": template},
        ]
    made = Tokenizer(folder_with(tmp_path, config, template if where == "file" else None))
    expected = 'system: "be brief"<e>user: "hi <b> 🙂"<e>assistant:'
    assert made.render_chat(MESSAGES) == expected
    assert made.render_chat(MESSAGES, False) == expected.removesuffix("assistant:")


def test_chat_agrees_with_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template = (
        "{{ bos_token }}{% for m in messages %}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% else %}  [{{ m.role }}] {{ m.content | trim }}"
        "{% endif %}\n  {% endfor %}\n{% if add_generation_prompt %}>{% endif %}"
    )
    config: dict[str, object] = {
        "bos_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template,
    }
    folder = folder_with(tmp_path, config)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    messages: list[dict[str, object]] = [*MESSAGES, {"role": "assistant", "content": " yes "}]
    assert Tokenizer(folder).render_chat(messages) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


TOOL_TEMPLATE = (
    "{{ bos_token }}{% for t in tools %}{{ t | tojson(separators=(',', ':'), sort_keys=true) }}\n"
    "{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{{ m.tool_call_id or '' }}{% endfor %}"
)


@pytest.mark.parametrize("where", ["list", "file"])
def test_tools_have_a_template_of_their_own_as_in_transformers(tmp_path: Path, where: str) -> None:
    transformers = pytest.importorskip("transformers")
    plain = "{{ messages[0].content }}{{ tools }}"
    config: dict[str, object] = {
        "bos_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if where == "list":
        config["chat_template"] = [
            {"name": "default", "template": plain},
            {"name": "tool_use", "template": TOOL_TEMPLATE},
        ]
    folder = folder_with(tmp_path, config, plain if where == "file" else None)
    if where == "file":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_TEMPLATE)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"b": "é"}}}
    messages: list[dict[str, object]] = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    tools: list[dict[str, object]] = [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    ]
    made = Tokenizer(folder)
    for given in (tools, None):
        assert made.render_chat(messages, tools=given) == theirs.apply_chat_template(
            messages, tools=given, tokenize=False, add_generation_prompt=True
        )


def test_a_template_may_refuse_and_cannot_escape(tmp_path: Path) -> None:
    template = (
        "{% if messages[0].role == 'user' %}{{ raise_exception('system first') }}{% endif %}"
        "{{ ''.__class__.__mro__ }}{{ strftime_now('%Y') }}"
    )
    made = Tokenizer(folder_with(tmp_path, {}, template))
    with pytest.raises(RefusedError, match="system first"):
        made.render_chat([{"role": "user", "content": "a"}])
    with pytest.raises(RefusedError, match="refuses"):
        made.render_chat(MESSAGES)


def test_a_base_model_refuses_chat() -> None:
    with pytest.raises(RefusedError, match="base model without a chat template; use"):
        TOKENIZER.render_chat(MESSAGES)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer.json; convert"),
        ({"tokenizer.json": "{"}, "cannot be read"),
        ({"tokenizer.json": '{"version": "1.0"}'}, "cannot be read"),
        ({"tokenizer.json": None, "tokenizer_config.json": "{"}, "not valid JSON"),
        ({"tokenizer.json": None, "tokenizer_config.json": "[]"}, "must hold a JSON object"),
        ({"tokenizer.json": None, "chat_template.jinja": "{% if %}"}, "does not compile"),
    ],
)
def test_broken_folders(tmp_path: Path, files: dict[str, str | None], message: str) -> None:
    for name, content in files.items():
        real = (MODEL / "tokenizer.json").read_text()
        (tmp_path / name).write_text(real if content is None else content)
    with pytest.raises(RefusedError, match=message) as caught:
        Tokenizer(tmp_path)
    assert caught.value.refused.field in ("tokenizer_path", "chat_template")


def test_sampling_defaults(tmp_path: Path) -> None:
    config = {"temperature": 0.6, "top_k": 0, "top_p": None, "eos_token_id": 3, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert load_sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": -1}
    assert load_sampling_defaults(tmp_path / "none") == {}
