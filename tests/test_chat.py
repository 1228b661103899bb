from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeExecutor
from tiny_tokenizers import TEXTS, byte_level, make, save

from minivllm import LLM, SamplingParams
from minivllm.chat import ChatTemplates
from minivllm.errors import RequestError
from minivllm.tokenizer import Tokenizer

CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": " Ça va ? \n"}],
    [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "one, two"},
        {"role": "user", "content": "日本"},
        {"role": "assistant", "content": "three, "},
    ],
]


@pytest.fixture(scope="module")
def real(embedded_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(embedded_dir)


@pytest.fixture(scope="module")
def oracle(embedded_dir: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(embedded_dir)


# --- as transformers renders them ---


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("mode", ["answer", "bare", "continue"])
def test_real_template(real: Tokenizer, oracle: Any, messages: Any, mode: str) -> None:
    """The model's chats are rendered as transformers renders them."""
    options = {
        "add_generation_prompt": mode == "answer",
        "continue_final_message": mode == "continue",
    }
    expected = oracle.apply_chat_template(messages, tokenize=False, **options)
    assert real.apply_chat_template(messages, **options) == expected
    ids = oracle.apply_chat_template(messages, return_dict=False, **options)
    assert real.encode(expected, add_special_tokens=False) == ids


# --- well-known templates ---

CHATML = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA = """\
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have access to these functions:\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}" }}{{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set ns.index = ns.index + 1 %}
            {%- set out = tool_call.function|tojson %}{{- out[:-1] }}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
{{- ns.index }}
"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}\
{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}\
{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

PARTED = """\
{%- macro show(content) -%}{%- if content is string -%}{{ content }}{%- else -%}
{%- for item in content -%}{%- if 'text' in item -%}{{ item.text }}{%- endif -%}{%- endfor -%}
{%- endif -%}{%- endmacro -%}
{%- for message in messages -%}{{ message.role ~ ': ' ~ show(message.content) }}
{% endfor -%}"""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather, <b>now</b> & later",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "description": "größere Stadt"}},
            "required": ["town"],
        },
    },
}
WORDS = [*TEXTS, "", " ", "\n", "{{ 7 * 7 }}", "{% raw %}", "<|im_end|>", "'a' \"b\"", "<b>&"]


def random_chat(rng: random.Random) -> list[dict[str, Any]]:
    """Turns of user and assistant, some with a system message and some with calls of tools."""

    def words() -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 3)))

    chat: list[dict[str, Any]] = []
    if rng.random() < 0.4:
        chat.append({"role": "system", "content": words()})
    for turn in range(rng.randint(1, 4)):
        chat.append({"role": "user", "content": words()})
        if rng.random() < 0.3:
            function = {"name": "weather", "arguments": {"town": words(), "days": turn}}
            call = {"type": "function", "id": f"call{turn:05}", "function": function}
            chat.append({"role": "assistant", "content": None, "tool_calls": [call]})
            chat.append({"role": "tool", "tool_call_id": call["id"], "content": words()})
        if rng.random() < 0.8:
            chat.append({"role": "assistant", "content": words()})
    return chat


@pytest.mark.parametrize("template", [None, CHATML, LLAMA, MISTRAL, GEMMA, PARTED])
def test_random_chats_as_transformers(real: Tokenizer, oracle: Any, template: str | None) -> None:
    """Over random conversations, with tools and without, a prompt is transformers' own, and what it
    refuses is refused, for the model's template and for those of well-known families."""
    from jinja2.exceptions import TemplateError

    rng = random.Random(0)
    num_rendered = 0
    for _ in range(100):
        chat = random_chat(rng)
        options: dict[str, Any] = {
            "chat_template": template,
            "tools": rng.choice([None, [WEATHER], [WEATHER, WEATHER]]),
            "add_generation_prompt": rng.random() < 0.5,
        }
        if rng.random() < 0.3:
            options["date_string"] = "1 Jan 2030"
        before = json.dumps([chat, options])
        try:
            expected = oracle.apply_chat_template(chat, tokenize=False, **options)
        except (TemplateError, TypeError) as error:
            with pytest.raises(RequestError, match=re.escape(str(error))):
                real.apply_chat_template(chat, **options)
            continue
        assert real.apply_chat_template(chat, **options) == expected
        assert json.dumps([chat, options]) == before
        num_rendered += 1
    assert num_rendered > 10


@pytest.mark.parametrize("template", [CHATML, LLAMA, MISTRAL, GEMMA, PARTED])
def test_parts_are_text(oracle: Any, template: str) -> None:
    """Content in parts is what its texts are, line by line, where a template wants strings; a
    template that goes through the parts gets them."""
    tokenizer = make(byte_level(), template, named_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]
    answer = {"role": "assistant", "content": "three"}
    joined = "one two" if template is PARTED else "one\n two"
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": parts}, answer])
    expected = tokenizer.apply_chat_template([{"role": "user", "content": joined}, answer])
    assert prompt == expected
    plain = tokenizer.apply_chat_template([{"role": "user", "content": ["one", " two"]}, answer])
    assert plain == expected


def test_arguments_in_json(real: Tokenizer) -> None:
    """The arguments of a tool call may come as JSON text, as clients send them."""
    prompts = []
    for arguments in ({"town": "größer"}, '{"town": "größer"}'):
        call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": arguments}}
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
        prompts.append(real.apply_chat_template(chat, chat_template=LLAMA))
    assert prompts[0] == prompts[1]
    assert '{"town": "größer"}' in prompts[0]


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        ("Hi", "must be objects with a role"),
        ({"content": "Hi"}, "must be objects with a role"),
        ({"role": 1, "content": "Hi"}, "must be objects with a role"),
        ({"role": "user", "content": 7}, "must have text"),
        ({"role": "user", "content": {"type": "text", "text": "Hi"}}, "must have text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "must have content of text alone"),
        ({"role": "user", "content": [{"type": "text"}]}, "must have content of text alone"),
        ({"role": "user", "content": [None]}, "must have content of text alone"),
        ({"role": "assistant", "tool_calls": ["f"]}, "must have tool calls with a function"),
        ({"role": "assistant", "tool_calls": [{"function": 1}]}, "must have tool calls"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]},
            "must have tool calls",
        ),
    ],
)
def test_messages_that_are_none(real: Tokenizer, message: Any, rule: str) -> None:
    """What is no message is refused by name, before a template sees it."""
    with pytest.raises(RequestError, match=f"^messages {rule}"):
        real.apply_chat_template([message])


def test_template_by_name_or_text(oracle: Any) -> None:
    """A request may name one of the model's templates, or bring a text; a bad one is its error."""
    templates = {"default": "plain", "tool_use": "tools", "rag": "rag {{ bos_token }}"}
    tokenizer = make(byte_level(), named_tokens={"bos_token": "<s>"}, templates=templates)
    render = tokenizer.apply_chat_template
    assert render([], chat_template="rag") == "rag <s>"
    assert render([], chat_template="default", tools=[]) == "plain"
    assert render([], chat_template="own {{ bos_token }}{{ x }}", x=1) == "own <s>1"
    assert make(byte_level()).apply_chat_template([], chat_template="own") == "own"
    for broken in ("{% if %}", "{{ a | no_such_filter }}", "{% for x in " + "(" * 3000):
        with pytest.raises(RequestError, match=r"^chat_template must be a template"):
            render([], chat_template=broken)
    with pytest.raises(RequestError, match=r"^chat_template must be text"):
        render([], chat_template={"default": "own"})


RICH_TEMPLATE = """\
{{ bos_token }}
  {% if tools %}
{{ tools | tojson(indent=2) }}
  {% endif %}
{% set word = "outer" %}
{% for message in messages %}
    {%- if message.role == "skip" %}{% continue %}{% endif %}
    {# a comment #}
    {% generation %}
{% set word = "inner" %}
[{{ message.role }}|{{ message['content'] | tojson }}|{{ word }}]
    {% endgeneration %}
    {% if loop.index == 3 %}{% break %}{% endif %}
{% endfor %}
{{ word }} {{ strftime_now("%Y") | length }} {{ extra }} {{ documents is none }} {{ nothing }}
"""


def test_template_surroundings(oracle: Any) -> None:
    """Filters, functions, tags and whitespace are what transformers gives to templates."""
    messages = [{"role": role, "content": "<é> & 'x'"} for role in ("a", "skip", "b", "c")]
    tools = [{"type": "function", "function": {"name": "größe", "parameters": {}}}]
    tokenizer = make(byte_level(), RICH_TEMPLATE, named_tokens={"bos_token": oracle.bos_token})
    for given_tools in (tools, None):
        expected = oracle.apply_chat_template(
            messages,
            tokenize=False,
            chat_template=RICH_TEMPLATE,
            tools=given_tools,
            extra="more",
            add_generation_prompt=True,
        )
        assert "inner" in expected
        prompt = tokenizer.apply_chat_template(messages, tools=given_tools, extra="more")
        assert prompt == expected


STRIPPING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "content"),
    [
        (STRIPPING, "So: "),
        (STRIPPING, "So:"),
        (PARTS, [{"type": "text", "text": "one "}, {"type": "text", "text": "two "}]),
    ],
)
def test_continue_final_message(oracle: Any, template: str, content: Any) -> None:
    """The prompt ends where the last message does, stripped only if the template strips."""
    before = json.dumps(
        [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    )
    messages = json.loads(before)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    prompt = make(byte_level(), template).apply_chat_template(messages, **options)
    assert json.dumps(messages) == before
    expected = oracle.apply_chat_template(
        messages, tokenize=False, chat_template=template, **options
    )
    assert prompt == expected
    assert prompt.endswith(("So:", "two "))


@pytest.mark.parametrize(
    ("messages", "template"),
    [
        ([], STRIPPING),
        ([{"role": "assistant"}], STRIPPING),
        ([{"role": "assistant", "content": None}], STRIPPING),
        ([{"role": "assistant", "content": []}], PARTS),
        ([{"role": "assistant", "content": "hidden"}], "nothing"),
    ],
)
def test_nothing_to_continue(messages: Any, template: str) -> None:
    """A final message that has no text, or does not show, cannot be continued."""
    with pytest.raises(RequestError, match=r"^messages must end with"):
        make(byte_level(), template).apply_chat_template(
            messages, add_generation_prompt=False, continue_final_message=True
        )


def test_continue_or_answer(real: Tokenizer) -> None:
    """A chat either continues its last message or opens a new one."""
    with pytest.raises(RequestError, match=r"^continue_final_message cannot be combined"):
        real.apply_chat_template(CHATS[0], continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[0].content + none }}", "NoneType"),
        ("{{ messages[9].content }}", "has no element 9"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_template_refuses(template: str, message: str) -> None:
    """What a template objects to, or stumbles over, is the sender's error in its words."""
    with pytest.raises(RequestError, match=f"^messages do not fit .*{message}"):
        make(byte_level(), template).apply_chat_template(CHATS[0])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ lipsum.__globals__['os'].popen('true').read() }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{% set m = messages %}{{ m.__init__.__func__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
        "{{ [].append(1) }}",
        "{{ messages[0].pop('role') }}",
        "{{ (1).__add__.__self__.__class__.__base__ }}",
    ],
)
def test_sandbox(template: str) -> None:
    """A template that reaches for Python's insides, changes the messages or never ends fails."""
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(RequestError, match=r"^messages do not fit"):
        make(byte_level(), template).apply_chat_template(messages)
    assert messages == [{"role": "user", "content": "Hi"}]


ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(200) }}",
    "{% for i in range(9999) recursive %}{% if loop.depth < 9 %}{{ loop(range(9999)) }}{% endif %}"
    "{% endfor %}",
    "{% for i in range(99999) if range(99999) | sum < 0 %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
]


@pytest.mark.parametrize("template", ENDLESS)
def test_endless_templates_end(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    """A template that loops, or calls itself, without end is stopped."""
    monkeypatch.setattr("minivllm.chat._MAX_RENDER_S", 0.1)
    started = time.thread_time()
    with pytest.raises(RequestError, match=r"^messages do not fit"):
        make(byte_level(), template).apply_chat_template(CHATS[0])
    assert time.thread_time() - started < 3


def test_loops_are_as_they_were() -> None:
    """Looking at the time changes nothing of what a loop knows."""
    template = (
        "{% for a, b in [(1, 2), (3, 4)] %}{{ loop.index }}{{ loop.length }}{{ loop.last }}"
        "{{ loop.revindex }}{{ loop.nextitem }}{{ loop.previtem }}{{ a }}{{ b }} {% else %}none"
        "{% endfor %}{% for x in [] %}{% else %}none{% endfor %}{% for x in nothing %}x{% endfor %}"
        "{% for x in [1, [2, [3]]] recursive %}{% if x is number %}{{ x }}{% else %}({{ loop(x) }})"
        "{% endif %}{% endfor %}{% for c in 'ab' if c != 'a' %}{{ c }}{{ loop.length }}{% endfor %}"
        "{% for k, v in {'x': 1}.items() %}{{ k }}{{ v }}{% break %}{% endfor %}"
    )
    expected = "12False2(3, 4)12 22True1(1, 2)34 none1(2(3))b1x1"
    assert ChatTemplates({"default": template}, {}).render(
        [],
        add_generation_prompt=True,
        continue_final_message=False,
        tools=None,
        chat_template=None,
        variables={},
    ) == expected


def test_no_template() -> None:
    """A model without a chat template refuses chats, naming `chat_template`."""
    with pytest.raises(RequestError) as caught:
        make(byte_level()).apply_chat_template(CHATS[0])
    assert caught.value.field == "chat_template"


def test_templates_from_files(tmp_path: Path) -> None:
    """Templates in files of their own replace those in the settings; tools choose `tool_use`."""
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    save(tmp_path, byte_level(), tokenizer_config={"chat_template": "single"})
    assert Tokenizer.from_dir(tmp_path).apply_chat_template([], tools=[]) == "single"

    save(tmp_path, byte_level(), tokenizer_config={"chat_template": named})
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=[]) == "tools"

    (tmp_path / "chat_template.jinja").write_text("file é", encoding="utf-8")
    assert Tokenizer.from_dir(tmp_path).apply_chat_template([], tools=[]) == "file é"

    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file for tools")
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.apply_chat_template([]) == "file é"
    assert tokenizer.apply_chat_template([], tools=[]) == "file for tools"


# --- LLM.chat ---


@pytest.fixture(scope="module")
def llm(embedded_dir: Path) -> Iterator[LLM]:
    with LLM(str(embedded_dir), executor=FakeExecutor()) as made:
        yield made


def ask(llm: LLM, messages: Any, **options: Any) -> list[Any]:
    return llm.chat(messages, SamplingParams(max_tokens=2), use_tqdm=False, **options)


def test_one_chat_or_many(llm: LLM) -> None:
    """A conversation is answered as a list of one; many come in their order, each with the prompt
    that the template makes of it and its tokens, without a second BOS."""
    outputs = ask(llm, CHATS)
    assert [ask(llm, chat)[0].prompt for chat in CHATS] == [output.prompt for output in outputs]
    for chat, output in zip(CHATS, outputs, strict=True):
        text = llm.tokenizer.apply_chat_template(chat)
        assert output.prompt == text
        assert output.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
    assert ask(llm, []) == []


def test_chat_options(llm: LLM) -> None:
    """Every option reaches the template; its own variables come last."""
    template = "{{ messages[-1].content }}|{{ add_generation_prompt }}|{{ tools }}|{{ x }}"
    [output] = ask(
        llm,
        CHATS[2],
        chat_template=template,
        tools=[{"a": 1}],
        chat_template_kwargs={"x": 5, "messages": "ignored", "add_generation_prompt": False},
    )
    assert output.prompt == "three, |False|[{'a': 1}]|5"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    [output] = ask(llm, CHATS[2], **options)
    assert output.prompt.endswith("three, ")


def test_a_bad_chat_is_refused(llm: LLM) -> None:
    """A conversation that the template refuses raises before any is run."""
    with pytest.raises(RequestError, match=r"^messages must be objects"):
        ask(llm, [CHATS[0], ["Hi"]])
    with pytest.raises(RequestError, match=r"^chat_template must be a template"):
        ask(llm, CHATS[0], chat_template="{% if %}")
