"""Structural tags: free text, and behind a trigger nothing but a structure."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.engine_core.grammar_compiler import GrammarCompiler
from outrider.engine_core.grammar_spec import GrammarSpec
from outrider.engine_core.grammar_text import llguidance_grammar
from outrider.engine_core.model_path import resolve_model
from outrider.engine_core.refusal import Refused
from outrider.engine_core.structural_tag import StructuralTag, TagStructure
from outrider.frontend.tokenizer import Tokenizer

EOS, VOCAB = 0, 8192
FOLDER = resolve_model("pycoder")
NUMBER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
ONE = TagStructure(begin='<call>{"f":', schema=NUMBER, end="}</call>")
ANY = TagStructure(begin="<call>g ", schema={"type": "object"}, end="</call>")
BOTH = StructuralTag(structures=[ONE, ANY], triggers=["<call>"])
GOOD = '<call>{"f":{"a":1}}</call>'
OTHER = '<call>g {"x":[1,"y"]}</call>'


def spec(tag: StructuralTag) -> GrammarSpec:
    return GrammarSpec("structural_tag", msgspec.json.encode(tag).decode())


@pytest.fixture(scope="module", params=["plain", "token", "special token"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pycoder's tokenizer, also with tokens for the tags."""
    if request.param == "plain":
        return FOLDER
    made = tmp_path_factory.mktemp("tokens")
    tokenizer: dict[str, Any] = json.loads((FOLDER / "tokenizer.json").read_text())
    special = request.param == "special token"
    for token, text in zip(tokenizer["added_tokens"][-2:], ("<call>", "</call>"), strict=True):
        del tokenizer["model"]["vocab"][token["content"]]
        tokenizer["model"]["vocab"][text] = token["id"]
        token |= {"content": text, "special": special}
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    return made


def accepts(folder: Path, tag: StructuralTag, text: str, ids: list[int] | None = None) -> bool:
    compiler = GrammarCompiler(folder / "tokenizer.json", VOCAB, (EOS,))
    matcher = compiler.matcher(spec(tag))
    tokens = ids or Tokenizer(folder).encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("", True),
        ("free text, {} <cal", True),
        (GOOD, True),
        (f"before {GOOD} between\n{OTHER}{GOOD}\nbehind", True),
        ("<|im_start|>some <|im_end|> tokens" + GOOD, True),
        ("<call>", False),
        ('<call>{"f":{"b":1}}</call>', False),
        ('<call>{"f":{"a": 1}}</call>', False),
        ("<call>h", False),
        ('x <call>{"f":{"a":1}}</cal', False),
    ],
)
def test_structures_in_free_text(folder: Path, text: str, good: bool) -> None:
    assert accepts(folder, BOTH, text) is good


def test_a_trigger_that_is_a_token_may_not_be_spelled_around(folder: Path) -> None:
    plain = Tokenizer(FOLDER)
    for text, good in ((f"a {GOOD}", True), ("a <call> b", False), ("a <call", True)):
        ids = plain.encode(text, add_special_tokens=False)
        if folder != FOLDER and "</call>" in text:
            continue  # there the end is one token
        assert accepts(folder, BOTH, text, ids) is good


@pytest.mark.parametrize("at_least_one", [False, True])
@pytest.mark.parametrize("stop_after_first", [False, True])
def test_how_many(folder: Path, at_least_one: bool, stop_after_first: bool) -> None:
    tag = msgspec.structs.replace(
        BOTH, at_least_one=at_least_one, stop_after_first=stop_after_first
    )
    for text in ("", "a", GOOD, f"a{GOOD}", f"{GOOD}b", f"{GOOD}{OTHER}", f"a{GOOD}b{OTHER}c"):
        count = text.count("<call>")
        enough = count > 0 or not at_least_one
        stopped = count == 0 or (count == 1 and text.endswith("</call>"))
        good = enough and (stopped or not stop_after_first)
        assert accepts(folder, tag, text) is good, text


def test_white_space_is_the_schemas_own() -> None:
    loose = NUMBER | {"x-guidance": {"whitespace_flexible": True}}
    tag = StructuralTag(structures=[TagStructure(begin="(", schema=loose, end=")")], triggers=["("])
    assert accepts(FOLDER, tag, 'x({"a": 1})')
    assert accepts(FOLDER, tag, 'x({"a":1})')


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "truncated"),
        ('{"structures":[],"triggers":["a"]}', "at least one"),
        ('{"structures":[{"begin":"a","schema":{},"end":""}],"triggers":[""]}', "none empty"),
        ('{"structures":[{"begin":"a","schema":{},"end":""}],"triggers":["b"]}', "none of"),
        (
            '{"structures":[{"begin":"a","schema":{},"end":""}],"triggers":["a","b"]}',
            "no structure begins",
        ),
        ('{"structures":[{"begin":"a","schema":{"maxLenght":1},"end":""}],"triggers":["a"]}',
         "maxLength"),
        ('{"structures":[{"begin":"a","schema":{"uniqueItems":true,"type":"array"},"end":""}],'
         '"triggers":["a"]}', "uniqueItems"),
        ('{"structures":[{"begin":"a","schema":' + '{"not":' * 1100 + "{}" + "}" * 1100
         + ',"end":""}],"triggers":["a"]}', "recursion"),
    ],
)  # fmt: skip
def test_what_is_no_tag(text: str, words: str) -> None:
    found = llguidance_grammar(GrammarSpec("structural_tag", text, "field"))
    assert isinstance(found, Refused)
    assert found.field == "field"
    assert found.reason.startswith("is no structural tag that works here: ")
    assert words in found.reason


def test_a_trigger_may_begin_with_a_special_token_but_hold_none_later() -> None:
    def tag(trigger: str) -> StructuralTag:
        one = TagStructure(begin=trigger, schema=NUMBER, end="<|im_end|>")
        return StructuralTag(structures=[one], triggers=[trigger])

    for text, good in (
        ('x<|im_start|>call {"a":1}<|im_end|>y', True),
        ("x<|im_end|>y", True),
        ("x<|im_start|>user", False),
    ):
        assert accepts(FOLDER, tag("<|im_start|>call "), text) is good
    compiler = GrammarCompiler(FOLDER / "tokenizer.json", VOCAB, (EOS,))
    refused = compiler.refuse(spec(tag("call <|im_start|>")))
    assert refused is not None
    assert "within the trigger" in refused.reason
