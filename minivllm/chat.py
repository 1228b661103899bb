"""Chats to prompts: the templates that come with a model, or with a request.

    messages, tools ─> checked, parts of text joined ─> template in a sandbox ─> prompt

The one idea: a template is a program from a stranger. It runs where it can read what it is given
and change nothing, in the surroundings (whitespace rules, filters, functions) that authors test in.

Invariants: a prompt is character for character the one that transformers renders; the caller's
messages are never changed; a template is stopped after `_MAX_RENDER_S`, looked at whenever it
loops or calls. Between two such looks an operation runs to its end, whatever memory it takes, so
a server must take the text of a template only from those whom it would let run programs.

Content in parts, as some clients send all text, is joined to a string for the templates that want
strings; which ones do is seen by trying. Parts that are not text, and BOS: the model's business,
and in the template, so a prompt is encoded without special tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minivllm.errors import ModelError, RequestError

_MAX_RENDER_S = 5.0
_DEADLINE = "<deadline>"  # a variable that no template can name

# Put behind the final message to find it again in the rendered chat. Its own last space tells
# whether the template strips what a message ends with.
_END_MARK = "<<end of the final message>> "


class ChatTemplates:
    """A model's chat templates; threads may share them."""

    __slots__ = ("_compile", "_templates", "_variables")

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, Any]) -> None:
        """`sources`: "default", and "tool_use" for chats with tools; `variables`: "bos_token" and
        the like.

        Raises: `ModelError` for a template that cannot be compiled
        """
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        # Many conversations come with the same text.
        self._compile = lru_cache(maxsize=8)(environment.from_string)
        self._variables = {"documents": None, **variables}
        self._templates = {}
        for name, source in sources.items():
            try:
                self._templates[name] = self._compile(source)
            except jinja2.TemplateSyntaxError as error:
                raise ModelError(f"chat template {name!r}, line {error.lineno}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template: str | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt of a chat; see `Tokenizer.apply_chat_template`."""
        template = self._find(chat_template, with_tools=tools is not None)
        if continue_final_message and add_generation_prompt:
            rule = "cannot be combined with add_generation_prompt"
            raise RequestError("continue_final_message", True, rule)
        checked = [_checked(message) for message in messages]
        has_parts = any(isinstance(message.get("content"), list) for message in checked)
        if has_parts and not self._takes_parts(template):
            checked = [_joined(message) for message in checked]
        variables = {
            **self._variables,
            **variables,
            "messages": _marked(checked) if continue_final_message else checked,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            prompt = _run(template, variables)
        except Exception as error:  # a template may fail in any way that an expression can
            rule = f"do not fit the chat template ({error})"
            raise RequestError("messages", messages, rule) from error
        return _cut_at_mark(prompt, messages) if continue_final_message else prompt

    def _find(self, chat_template: str | None, *, with_tools: bool) -> jinja2.Template:
        """The template of that name or text, or else the model's own."""
        if chat_template is None:
            template = self._templates.get("default")
            if with_tools:
                template = self._templates.get("tool_use", template)
        elif not isinstance(chat_template, str):
            raise RequestError("chat_template", chat_template, "must be text")
        elif chat_template in self._templates:
            template = self._templates[chat_template]
        else:
            try:
                template = self._compile(chat_template)
            except (jinja2.TemplateError, RecursionError) as error:
                rule = f"must be a template ({error})"
                raise RequestError("chat_template", chat_template, rule) from error
        if template is None:
            rule = "must be given, as the model has none"
            raise RequestError("chat_template", None, rule)
        return template

    def _takes_parts(self, template: jinja2.Template) -> bool:
        """Whether the template shows the text of a part, and not how Python or JSON write one."""
        text = "text of a part"
        message = {"role": "user", "content": [{"type": "text", "text": text}]}
        try:
            prompt = _run(template, {**self._variables, "messages": [message], "tools": None})
        except Exception:  # noqa: BLE001  it may fail in any way
            return False
        return text in prompt and not any(quote + text in prompt for quote in "'\"")


# --- messages ---


def _checked(message: Any) -> dict[str, Any]:
    """A copy of `message` in the form that templates expect.

    The arguments of a tool call are an object, though clients write them as JSON text.

    Raises: `RequestError` for what is no message
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError("messages", message, "must be objects with a role")
    checked = dict(message)
    content = checked.get("content")
    if isinstance(content, list | tuple):
        checked["content"] = [_checked_part(part) for part in content]
    elif not isinstance(content, str | None):
        raise RequestError("messages", message, "must have text, or parts of it, as content")
    calls = checked.get("tool_calls")
    if calls is not None and not isinstance(calls, list | tuple):
        raise RequestError("messages", message, "must have a list as tool_calls")
    if calls:
        checked["tool_calls"] = [_checked_call(call) for call in calls]
    return checked


def _checked_part(part: Any) -> dict[str, Any]:
    is_typed = isinstance(part, Mapping) and part.get("type") == "text"
    text = part.get("text") if is_typed else part
    if not isinstance(text, str):
        raise RequestError("messages", part, "must have content of text alone")
    return {"type": "text", "text": text}


def _checked_call(call: Any) -> dict[str, Any]:
    try:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
    except (KeyError, TypeError, ValueError) as error:
        rule = "must have tool calls with a function, and arguments in JSON"
        raise RequestError("messages", call, rule) from error
    return {**call, "function": function}


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _marked(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with a mark behind the text of the last one."""
    *others, final = messages or [{}]
    content = final.get("content")
    if isinstance(content, str):
        return [*others, {**final, "content": content + _END_MARK}]
    if content:
        *parts, last = content
        parts.append({**last, "text": last["text"] + _END_MARK})
        return [*others, {**final, "content": parts}]
    raise RequestError("messages", messages, "must end with a text that can be continued")


def _cut_at_mark(prompt: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """`prompt` up to the end of its final message."""
    end = prompt.rfind(_END_MARK.rstrip())
    if end < 0:
        rule = "must end with a message that the chat template shows, to be continued"
        raise RequestError("messages", messages, rule)
    # A template that strips messages took the mark's space too; it would have stripped the
    # message's own last spaces, had the mark not stood behind them.
    stripped = not prompt.startswith(_END_MARK, end)
    return prompt[:end].rstrip() if stripped else prompt[:end]


# --- the sandbox ---


def _run(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    return template.render({**variables, _DEADLINE: time.monotonic() + _MAX_RENDER_S})


class _TimedCode(CodeGenerator):
    """Puts a filter that looks at the time before everything that is looped over."""

    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:  # noqa: N802
        for loop in node.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "timed", [], [], None, None)
        super().visit_Template(node, frame)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The surroundings of a template: it can reach nothing and change nothing, and it ends."""

    code_generator_class = _TimedCode

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters["tojson"] = _to_json
        self.filters["timed"] = _timed
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _look_at_time(context)
        if isinstance(obj, LoopContext) and args:  # `loop(children)` of a recursive loop
            args = (_timed(context, args[0]), *args[1:])
        return super().call(context, obj, *args, **kwargs)


@jinja2.pass_context
def _timed(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _look_at_time(context)
        yield item


def _look_at_time(context: Context) -> None:
    if time.monotonic() > context[_DEADLINE]:
        raise SecurityError(f"it runs for more than {_MAX_RENDER_S} s")


class _Generation(Extension):
    """`{% generation %}` marks the model's own words for training; here it only groups."""

    # jinja2 means a class variable, but declares it as any object's own.
    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja's own filter is for HTML and escapes "<"."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
