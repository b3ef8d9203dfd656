"""Chat messages to the prompt text a model was trained on, by the Jinja template that comes with it.

Templates come with models, so they are not trusted: they run in Jinja's immutable sandbox. What they may use beyond
plain Jinja (tojson, raise_exception, strftime_now, loop controls, the generation tag) is what transformers offers.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kllm.request import InvalidRequest
from kllm.tokenization.text_size import text_size
from kllm.tokenization.tokenizer import Tokenizer

LARGE = 1 << 17  # characters and values; json.dumps takes some 5 ms for so many, json.dump six times that


class ChatTemplate:
    """text: the template, None if the model has none. bos_token, eos_token: what templates call by these names."""

    def __init__(self, text: str | None, bos_token: str = "", eos_token: str = "") -> None:
        self.text = text
        self.bos_token = bos_token
        self.eos_token = eos_token

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str | None = None) -> ChatTemplate:
        """The tokenizer's own template, or `text` in its place, with the tokenizer's BOS and EOS."""
        return cls(tokenizer.chat_template if text is None else text, tokenizer.bos_token, tokenizer.eos_token)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt, special tokens included: encode it with add_special_tokens=False.

        messages: OpenAI's, as plain JSON values. Content given as a list of text parts is joined by newlines; tool-call
        arguments are parsed. kwargs: further variables for the template. Raises InvalidRequest (param "messages") for
        messages that the template refuses or cannot digest, and for a model without a template."""
        template = self._compiled
        variables = {**kwargs, "bos_token": self.bos_token, "eos_token": self.eos_token}
        plain = [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
        try:
            return template.render(
                {**variables, "messages": plain, "tools": tools, "add_generation_prompt": add_generation_prompt}
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {error.message}", "messages"
            ) from error
        except Exception as error:  # a template can fail like any program; its input is the client's
            what = f"{type(error).__name__}: {error}"
            raise InvalidRequest(
                f"the model's chat template cannot render the messages ({what})", "messages"
            ) from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if self.text is None:
            raise InvalidRequest("this model has no chat template; use completions, or give a template", "messages")
        try:
            return _environment().from_string(self.text)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequest(
                f"the model's chat template is not valid Jinja (line {error.lineno}: {error.message})", "messages"
            ) from error


def _plain_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where} must be an object with a role", "messages")
    plain = {**message, "content": _text(message.get("content"), where)}
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise InvalidRequest(f"{where}.tool_calls must be a list of function calls", "messages")
        plain["tool_calls"] = [_plain_tool_call(call, where) for call in calls]
    return plain


def _text(content: object, where: str) -> str:
    if content is None:  # an assistant that only calls tools says nothing
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be a string or a list of parts", "messages")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}.content may only have parts of type text", "messages")
        texts.append(text)
    return "\n".join(texts)


def _plain_tool_call(call: object, where: str) -> dict[str, Any]:
    """OpenAI sends a call's arguments as JSON text; templates expect the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidRequest(f"{where}.tool_calls must be a list of function calls", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{where}.tool_calls: arguments are not valid JSON", "messages") from error
    return {**call, "function": {**function, "arguments": arguments}}


class _GenerationTag(Extension):
    """{% generation %}…{% endgeneration %} marks the assistant's words for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControls]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, without escaping for HTML. json.dumps holds the GIL from its beginning to its end: a
    large value is written by json.dump, in small parts, so that other threads stream on."""
    if text_size(value, LARGE) < LARGE:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    text = io.StringIO()
    json.dump(value, text, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.getvalue()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
