"""Calls in text: the same for any split, none lost, nothing lost, in every format."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine_core.messages import FinishReason
from outrider.frontend.detokenizer import Detokenizer
from outrider.frontend.server_config import ServerConfig
from outrider.frontend.tool_calls.forced import named_call, required_calls
from outrider.frontend.tool_calls.parser import FORMATS, Parse, ToolParser, call_id, mistral_id
from outrider.frontend.tool_calls.reader import Arguments, CallStart, Piece, Text

from .test_detokenizer import CUTS, LENGTH, TOKENIZER, split, stopped

COMMON = settings(derandomize=True, deadline=None, max_examples=130)
NAMES = ("f", "get_weather", "a.b-c")
PARSES: dict[str, Parse] = {name: form.parse for name, form in FORMATS.items()} | {
    "named": named_call,
    "required": required_calls,
}
MARKERS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>", "; "),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
    "named": ("[", "]"),
    "required": ("[", "]"),
}
Calls = list[tuple[str, str]]


def names_of(name: str) -> Sequence[str]:
    return NAMES[:1] if name == "named" else NAMES


def joined(pieces: Sequence[Piece]) -> tuple[str, Calls]:
    """Content, and each call's name and arguments."""
    content = ""
    calls: Calls = []
    for piece in pieces:
        match piece:
            case Text(text):
                content += text
            case CallStart(name):
                calls.append((name, ""))
            case Arguments(text):
                name, before = calls[-1]
                calls[-1] = name, before + text
    return content, calls


def parsed(name: str, parts: Sequence[str], limit: int | None = None) -> tuple[str, Calls]:
    parser = ToolParser(PARSES[name], names_of(name), limit)
    pieces = [piece for part in parts for piece in parser.push(part)]
    return joined(pieces + parser.finish())


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    parts, at = [], 0
    for size in cuts:
        parts.append(text[at : at + size])
        at += size
    return [*parts, text[at:]]


# Values that Python and JSON both have, with what might be taken for syntax.
STRINGS = st.one_of(
    st.text(alphabet="ab \"'\\{}[](),:\n\té🙂\u2028", max_size=8),
    st.sampled_from([*(m for pair in MARKERS.values() for m in pair), '{"name": "f"}', "\\u0041"]),
)
VALUES: st.SearchStrategy[object] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(10**20), 10**20), STRINGS,
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
ARGUMENTS = st.dictionaries(st.sampled_from(["x", "y_1", "city"]), VALUES, max_size=3)
# Text that holds no marker but may end in what begins one, or look like a call.
WORDS = st.lists(
    st.sampled_from(
        ["Well", " ", "\n", "<", "<tool", "[TOOL", "<|py", "é🙂", "a", "}", '"', "(", "; ", "]"]
    ),
    max_size=5,
).map("".join)
STYLES = st.tuples(st.booleans(), st.sampled_from([None, (",", ":"), (" , ", " : ")]))


class Case(NamedTuple):
    """An answer, and what is in it."""

    text: str
    content: str
    calls: Calls


def as_json(value: object, style: tuple[bool, tuple[str, str] | None]) -> str:
    return json.dumps(value, ensure_ascii=style[0], separators=style[1])


def call_text(draw: Callable[..., Any], key: str) -> tuple[str, tuple[str, str]]:
    """A call as a JSON object, in any order and spacing, and what it says."""
    name, style = draw(st.sampled_from(NAMES)), draw(STYLES)
    arguments = as_json(draw(ARGUMENTS), style)
    fields = [f'"name": {json.dumps(name)}', f'"{key}":{arguments}']
    extra = draw(st.sampled_from([None, '"type": "function"', '"id":"Ab1"']))
    fields = draw(st.permutations([*fields, *([extra] if extra else [])]))
    space = draw(st.sampled_from(["", " ", "\n  "]))
    text = "{" + space + f",{space}".join(fields) + space + "}"
    return text, (name, arguments)


@st.composite
def hermes_cases(draw: Callable[..., Any]) -> Case:
    content = text = draw(WORDS).rstrip()
    calls: Calls = []
    for _ in range(draw(st.integers(1, 3))):
        inside, call = call_text(draw, draw(st.sampled_from(["arguments", "parameters"])))
        space = draw(st.sampled_from(["", "\n", " \r\n"]))
        text += f"{space}<tool_call>{space}{inside}{space}</tool_call>"
        calls.append(call)
    behind = draw(WORDS).rstrip()
    return Case(text + behind, content + (behind if behind.strip() else ""), calls)


@st.composite
def llama_cases(draw: Callable[..., Any]) -> Case:
    found = [call_text(draw, "parameters") for _ in range(draw(st.integers(1, 3)))]
    text = draw(st.sampled_from(["; ", ";", "\n", ""])).join(inside for inside, _ in found)
    content = draw(WORDS).rstrip()
    before = content + "<|python_tag|>" if content or draw(st.booleans()) else "\n"
    return Case(before + text, content, [call for _, call in found])


@st.composite
def mistral_cases(draw: Callable[..., Any]) -> Case:
    content = draw(WORDS).rstrip()
    found = [call_text(draw, "arguments") for _ in range(draw(st.integers(1, 3)))]
    calls = [call for _, call in found]
    if draw(st.booleans()):
        space = draw(st.sampled_from(["", " "]))
        text = f"[TOOL_CALLS]{space}[" + f",{space}".join(inside for inside, _ in found) + "]"
    else:
        between = draw(st.sampled_from(["", "[ARGS]"]))
        text = "".join(f"[TOOL_CALLS]{name}{between}{given}" for name, given in calls)
    return Case(content + text, content, calls)


@st.composite
def pythonic_cases(draw: Callable[..., Any]) -> Case:
    calls: Calls = []
    texts: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        name, given = draw(st.sampled_from(NAMES)), draw(ARGUMENTS)
        space = draw(st.sampled_from(["", " ", "\n"]))
        inside = f",{space}".join(f"{key}{space}={space}{value!r}" for key, value in given.items())
        texts.append(f"{name}({space}{inside}{space})")
        calls.append((name, json.dumps(given, ensure_ascii=False)))
    content = draw(WORDS).rstrip()
    before = content + "<|python_start|>" if content or draw(st.booleans()) else ""
    end = draw(st.sampled_from(["", "<|python_end|>"]))
    return Case(f"{before}[{', '.join(texts)}]{end}", content, calls)


@st.composite
def required_cases(draw: Callable[..., Any]) -> Case:
    found = [call_text(draw, "arguments") for _ in range(draw(st.integers(1, 3)))]
    return Case("[" + ",".join(inside for inside, _ in found) + "]", "", [c for _, c in found])


@st.composite
def named_cases(draw: Callable[..., Any]) -> Case:
    arguments = as_json(draw(ARGUMENTS), draw(STYLES))
    return Case(arguments, "", [("f", arguments)])


CASES: dict[str, st.SearchStrategy[Case]] = {
    "hermes": hermes_cases(),
    "llama3_json": llama_cases(),
    "mistral": mistral_cases(),
    "pythonic": pythonic_cases(),
    "named": named_cases(),
    "required": required_cases(),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_are_found_whole_and_in_any_split(name: str) -> None:
    reached: Counter[str] = Counter()

    @COMMON
    @given(case=CASES[name], cuts=CUTS)
    def check(case: Case, cuts: list[int]) -> None:
        assert parsed(name, [case.text]) == (case.content, case.calls)
        assert parsed(name, cut(case.text, cuts)) == (case.content, case.calls)
        assert parsed(name, list(case.text)) == (case.content, case.calls)
        for _, arguments in case.calls:
            assert isinstance(json.loads(arguments), dict)
        inside = "".join(arguments for _, arguments in case.calls)
        reached["several"] += len(case.calls) > 1
        reached["text"] += bool(case.content)
        reached["escape"] += "\\u" in inside
        reached["no ASCII"] += not inside.isascii()
        reached["marker in a string"] += any(marker in inside for marker in MARKERS[name])
        reached["bracket in a string"] += '"name"' in inside or "}" in inside.strip("}")
        early = case.text.find('"name"') > case.text.find('"arguments"') >= 0
        reached["arguments before the name"] += early

    check()
    absent = {"named": {"several", "text"}, "required": {"text"}}.get(name, set())
    if name not in ("hermes", "mistral", "required"):
        absent = absent | {"arguments before the name"}
    if name == "pythonic":
        absent = absent | {"escape"}  # its JSON is made here
    assert {what for what, count in reached.items() if count < 3} <= absent, reached


FRAGMENTS = (
    '{"name": "f", "arguments": {"a": "', '{"name"', ': "get_weather"', ', "arguments": ',
    '{"x": [1, {"y": null}]}', "{}", "}", "]", "[", ", ", ": ", '"', "\\", "\\u00", "e9", "\n", " ",
    "f(x=1, y='a')", "f(", ")", "f{}", "'", "'''", "tru", "-1.5e", "é", "🙂", "name", "</tool", "<",
    "[TOOL_", "CALLS]", "<|python", "_tag|>", ";", "x", '{"x":1}',
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_whatever_comes_is_the_same_in_any_split_and_nothing_is_lost(name: str) -> None:
    reached: Counter[str] = Counter()
    fragments = st.lists(st.sampled_from([*FRAGMENTS, *MARKERS[name] * 4]), max_size=10)
    damaged = st.builds(
        lambda case, at, new, skip: case.text[:at] + new + case.text[at + skip :],
        CASES[name],
        st.integers(0, 120),
        st.sampled_from(["", *FRAGMENTS]),
        st.integers(0, 5),
    )
    whole = CASES[name].map(lambda case: case.text)
    spoilt = whole.map(lambda text: text.replace('"x"', '"x" oops'))
    texts = fragments.map("".join) | damaged | spoilt | whole

    @COMMON
    @given(text=texts, cuts=CUTS, limit=st.sampled_from([None, 1, 1]))
    def check(text: str, cuts: list[int], limit: int | None) -> None:
        content, calls = parsed(name, [text], limit)
        assert parsed(name, cut(text, cuts), limit) == (content, calls)
        assert parsed(name, list(text), limit) == (content, calls)
        assert all(called in names_of(name) for called, _ in calls)
        assert limit is None or len(calls) <= limit
        if not calls:
            assert content == text
        at = 0
        for character in content:  # in order, and none invented
            at = text.index(character, at) + 1
        reached["no call"] += not calls
        reached["marker that was none"] += not calls and any(m in text for m in MARKERS[name])
        reached["call and text"] += bool(calls and content)
        reached["broken arguments"] += any(not is_json(found) for _, found in calls)
        reached["limit"] += limit == 1 and len(parsed(name, [text])[1]) > 1

    check()
    absent = {  # one call is all there can be, or is what the grammar sees to
        "pythonic": {"broken arguments"},
        "named": {"limit"},
        "required": {"limit"},
    }.get(name, set())
    assert {what for what, count in reached.items() if count < 2} <= absent, reached


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", CASES)
def test_a_cut_answer_keeps_what_there_is(name: str) -> None:
    reached: Counter[str] = Counter()

    @COMMON
    @given(case=CASES[name], at=st.floats(0, 1), cuts=CUTS)
    def check(case: Case, at: float, cuts: list[int]) -> None:
        text = case.text[: int(at * len(case.text))]
        content, calls = parsed(name, cut(text, cuts))
        assert (content, calls) == parsed(name, [text])
        for (found, arguments), (expected, whole) in zip(calls, case.calls, strict=False):
            assert found == expected
            assert whole.startswith(arguments)
        assert all(call == whole for call, whole in zip(calls[:-1], case.calls, strict=False))
        assert len(calls) <= len(case.calls)
        if not calls:
            assert content == text
        reached["in the head"] += content != case.content[: len(content)]
        reached["in the arguments"] += bool(calls) and not is_json(calls[-1][1])
        reached["behind a call"] += bool(calls) and calls[-1] == case.calls[len(calls) - 1]

    check()
    absent = {
        "pythonic": {"in the arguments"},
        "named": {"in the head", "behind a call"},
    }.get(name, set())
    assert {what for what, count in reached.items() if count < 3} <= absent, reached


@pytest.mark.parametrize("name", FORMATS)
def test_behind_the_detokenizer_and_its_stop_strings(name: str) -> None:
    reached: Counter[str] = Counter()

    @settings(COMMON, max_examples=80)
    @given(
        case=CASES[name],
        stop=st.sampled_from([*MARKERS[name], "}", '"x"', "🙂", "ll", "\n", "never"]),
        cuts=CUTS,
        keep=st.booleans(),
    )
    def check(case: Case, stop: str, cuts: list[int], keep: bool) -> None:
        ids, matched, start = stopped(TOKENIZER.encode(case.text), [stop], 0)
        text = TOKENIZER.decode(ids, False)
        if matched is not None:
            text = text[: start + len(matched) * keep]
        detokenizer = Detokenizer(
            TOKENIZER, [], stops=[stop], skip_special=False, include_stop=keep
        )
        *parts, last = [part for part in split(ids, cuts) if part] or [[]]
        finish = LENGTH if matched is None else FinishReason("stop", matched)
        shown = [detokenizer.push(part) for part in parts] + [detokenizer.push(last, finish)]
        assert not any("\ufffd" in part for part in shown)
        assert parsed(name, shown) == parsed(name, [text])
        reached["stopped"] += matched is not None
        reached["not stopped"] += matched is None
        reached["stopped within a call"] += matched is not None and "{" in text

    check()
    assert min(reached.values()) >= 5, reached


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", "a<tool_call>b<tool_call>{}", "a<tool_call>b<tool_call>{}", []),
        ("hermes", '<tool_call>{"name":"g","arguments":{}}', None, []),
        ("hermes", '<tool_call>{"name":"f","name":"f","arguments":{}}', None, []),
        ("hermes", '<tool_call>{"name":"f","arguments":[]}', None, []),
        ("hermes", '<tool_call>{"name":"f","arguments":"{}"}', None, []),
        ("hermes", '<tool_call>{"name":"\\ud800"}', None, []),
        ("hermes", '<tool_call>{"name":"f"}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name":"\\u0066","arguments":{}}', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":01}}', '1}}', [("f", '{"a":0')]),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":"\n"}}', '\n"}}', [("f", '{"a":"')]),
        ("hermes", '<tool_call>{"name":"f","arguments":{} so', " so", [("f", "{}")]),
        ("hermes", " \n ", None, []),
        ("hermes", "", "", []),
        ("llama3_json", '{"answer": 1}', None, []),
        ("llama3_json", 'x {"name":"f","parameters":{}}', None, []),
        ("mistral", '[TOOL_CALLS] [{"name":"f","arguments":{}}, no', ", no", [("f", "{}")]),
        ("mistral", "[TOOL_CALLS]nope{}", None, []),
        ("mistral", "[TOOL_CALLS]f[ARG]{}", None, []),
        ("pythonic", "[1, 2]", None, []),
        ("pythonic", "[f(1)]", None, []),
        ("pythonic", "[f(x=1, x=2)]", None, []),
        ("pythonic", "[f(**{'x': 1})]", None, []),
        ("pythonic", "[f(x=1e999)]", None, []),
        ("pythonic", "[f(x=1.5E+3, y=-1e-7)]", "", [("f", '{"x": 1500.0, "y": -1e-07}')]),
        ("pythonic", "[f(x=1+1)]", None, []),
        ("pythonic", "[f(x={1: 2})]", None, []),
        ("pythonic", "[f(x=b'a')]", None, []),
        ("pythonic", "[f(x=f'{y}')]", None, []),
        ("pythonic", "[f(x='\\ud800')]", None, []),
        ("pythonic", "[f(x=y)]", None, []),
        ("pythonic", "[f(x=" + "[" * 200 + "]" * 200 + ")]", None, []),
        ("pythonic", "[f(x=" + "-" * 9000 + "1)]", None, []),
        ("pythonic", "[f(x='\\d', y='''q'r''', z=(1,), t=true)]", "",
         [("f", '{"x": "\\\\d", "y": "q\'r", "z": [1], "t": true}')]),
        ("named", "oops", None, []),
        ("required", "[]", None, []),
    ],
)  # fmt: skip
def test_by_hand(name: str, text: str, content: str | None, calls: Calls) -> None:
    expected = (text if content is None else content, calls)
    assert parsed(name, [text]) == expected
    assert parsed(name, list(text)) == expected


def test_arguments_come_while_they_are_written() -> None:
    parser = ToolParser(FORMATS["hermes"].parse, NAMES)
    assert parser.push('ok <tool_call>{"name": "f"') == [Text("ok")]
    assert parser.push(', "arguments": {"a') == [CallStart("f"), Arguments('{"a')]
    assert parser.push('": "long') == [Arguments('": "long')]
    assert parser.push('"}}</tool_') == [Arguments('"}')]
    assert parser.push("call>\n") == []
    assert parser.finish() == []


def test_much_text_takes_linear_time() -> None:
    for name in FORMATS:
        for text in ("<tool_call>" * 20_000, "[" * 200_000, '{"name":' * 20_000, "<|py" * 50_000):
            assert parsed(name, cut(text, [1000] * (len(text) // 1000))) == (text, [])


def test_every_format_is_a_value_of_the_flag() -> None:
    choices, _ = get_args(get_type_hints(ServerConfig)["tool_call_parser"])
    assert set(get_args(choices)) == set(FORMATS)


def test_ids() -> None:
    assert {len(mistral_id()) for _ in range(100)} == {9}
    assert all(mistral_id().isalnum() for _ in range(100))
    assert len({call_id() for _ in range(100)}) == 100
