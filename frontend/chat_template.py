"""Chat templates: Jinja in a sandbox, with the functions that Hugging Face templates expect."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ..engine_core.refusal import Refused, RefusedError


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks assistant text for training; serving renders its body as is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it without ClassVar

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled chat template. Raises RefusedError when the template is broken."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise RefusedError(
                Refused("chat_template", f"the model's template does not compile: {error}")
            ) from error

    def render(
        self,
        messages: Sequence[dict[str, object]],
        add_generation_prompt: bool,
        tools: Sequence[dict[str, object]] | None = None,
    ) -> str:
        """Prompt text; ``tools`` as OpenAI's objects.

        Raises RefusedError when the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise RefusedError(
                Refused("messages", f"the model's chat template refuses them: {error}")
            ) from error


def load_chat_template(
    folder: Path, configured: object, special_tokens: dict[str, str], name: str = "default"
) -> ChatTemplate | None:
    """The template of ``chat_template.jinja``, else of tokenizer_config.json, else None.

    ``configured`` is text, or a list of ``{"name", "template"}`` of which ``name`` counts. Others
    than the default have a file of their own in ``additional_chat_templates``.
    """
    default = name == "default"
    file = folder / (
        "chat_template.jinja" if default else f"additional_chat_templates/{name}.jinja"
    )
    if file.is_file():
        try:
            return ChatTemplate(file.read_text("utf-8"), special_tokens)
        except UnicodeDecodeError as error:
            refused = Refused("chat_template", f"{file} is not UTF-8 text: {error}")
            raise RefusedError(refused) from None
    if isinstance(configured, list):
        if not all(isinstance(entry, dict) for entry in configured):
            reason = f"{folder} lists templates that are not objects with name and template"
            raise RefusedError(Refused("chat_template", reason))
        named = {entry.get("name"): entry.get("template") for entry in configured}
        return _compiled(named.get(name), special_tokens)
    return _compiled(configured, special_tokens) if default else None


def _compiled(source: object, special_tokens: dict[str, str]) -> ChatTemplate | None:
    return ChatTemplate(source, special_tokens) if isinstance(source, str) else None


def _tojson(
    value: object,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
