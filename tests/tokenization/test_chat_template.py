from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

import kllm.tokenization.chat_template as module
from kllm.request import InvalidRequest
from kllm.tokenization.chat_template import ChatTemplate

GOLDEN = json.loads((Path(__file__).parent / "smollm2_golden.json").read_text())
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("case", GOLDEN["chats"])
def test_smollm2_renders_as_transformers_does(case):
    template = ChatTemplate(SMOLLM2)
    assert template.render(case["messages"], add_generation_prompt=case["add_generation_prompt"]) == case["text"]


def test_tools_filters_and_loop_controls_render_as_transformers_does():
    """Expected text: transformers 5.23.0's apply_chat_template for the same template, messages and tools."""
    template = ChatTemplate(
        "{%- if tools %}{{ tools | tojson(indent=2) }}\n{% endif -%}\n{% for m in messages %}\n"
        "  {%- if m.tool_calls %}\n    {%- for c in m.tool_calls %}<call>{{ c.function | tojson }}</call>\n"
        "    {%- endfor %}\n  {%- endif %}\n[{{ m.role }}] {{ m.content | trim }}\n"
        "{% if loop.last %}{% break %}{% endif %}\n{% endfor %}{{ bos_token }}{{ eos_token }}",
        "<|im_start|>",
        "<|im_end|>",
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "é<", "y": [1]}'}}
    messages = [{"role": "user", "content": "<b>ä</b> "}, {"role": "assistant", "content": "ok", "tool_calls": [call]}]
    parameters = {"type": "object", "properties": {}}
    tools = [{"type": "function", "function": {"name": "f", "description": "does ü", "parameters": parameters}}]
    assert template.render(messages, tools=tools) == (
        '[\n  {\n    "type": "function",\n    "function": {\n      "name": "f",\n      "description": "does ü",\n'
        '      "parameters": {\n        "type": "object",\n        "properties": {}\n      }\n    }\n  }\n]\n'
        '[user] <b>ä</b>\n<call>{"name": "f", "arguments": {"x": "é<", "y": [1]}}</call>[assistant] ok\n'
        "<|im_start|><|im_end|>"
    )


def test_generation_tag_is_its_body():
    text = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
        "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "<b>ä</b> "}, {"role": "assistant", "content": "ok"}]
    assert ChatTemplate(text, eos_token="<|im_end|>").render(messages) == "<b>ä</b> \nok<|im_end|>"


def test_strftime_now_and_further_variables():
    template = ChatTemplate("{{ strftime_now('%Y') }} {{ thinking }} {{ messages | length }}")
    assert template.render(USER, thinking=True) == f"{datetime.now():%Y} True 1"


def test_variables_cannot_replace_the_special_tokens():
    assert ChatTemplate("{{ bos_token }}", "<s>").render(USER, bos_token="<evil>") == "<s>"


def test_text_parts_are_joined_and_null_content_is_empty():
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert (
        template.render([{"role": "user", "content": parts}, {"role": "assistant", "content": None}]) == "[one\ntwo][]"
    )


REFUSED = {
    "no template": (None, USER, "has no chat template"),
    "syntax error": ("{% if %}", USER, "not valid Jinja (line 1"),
    "refused by the template": ("{{ raise_exception('roles must alternate') }}", USER, "roles must alternate"),
    "undefined field": ("{{ messages[0].name.first }}", USER, "has no attribute"),
    "wrong types": ("{{ messages[0].content + 1 }}", USER, "TypeError"),
    "division by zero": ("{{ 1 // 0 }}", USER, "ZeroDivisionError"),
    "escape by attributes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", USER, "unsafe"),
    "change of messages": ("{{ messages.append(1) }}", USER, "unsafe"),
    "file access": ("{% include '/etc/passwd' %}", USER, "chat template"),
    "huge range": ("{% for i in range(10**9) %}x{% endfor %}", USER, "OverflowError"),
    "image part": ("", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "parts of type text"),
    "part without text": ("", [{"role": "user", "content": [{"type": "text"}]}], "parts of type text"),
    "content a number": ("", [{"role": "user", "content": 5}], "messages[0].content must be"),
    "no role": ("", [{"content": "x"}], "messages[0] must be an object with a role"),
    "message a string": ("", ["hello"], "messages[0] must be an object"),
    "arguments no JSON": ("", [{"role": "a", "tool_calls": [{"function": {"arguments": "{"}}]}], "not valid JSON"),
    "tool calls a number": ("", [{"role": "a", "tool_calls": 5}], "must be a list of function calls"),
    "tool call a string": ("", [{"role": "a", "tool_calls": ["f"]}], "must be a list of function calls"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_messages(case):
    text, messages, reason = REFUSED[case]
    with pytest.raises(InvalidRequest) as error:
        ChatTemplate(text).render(messages)
    assert error.value.param == "messages"
    assert reason in error.value.message


def test_a_large_value_is_written_in_parts(monkeypatch):
    """The library's fast encoder holds the GIL to its end: other threads would wait as long."""
    monkeypatch.setattr(module, "LARGE", 500)
    value = {"b": [{"ä": "<x>\n", "n": [1, 2.5, True, None, [], {}]}] * 100, "a": {"1": "2"}}

    def rendered(options: str) -> str:
        text = "{{ value | tojson(" + options + ") }}"
        return ChatTemplate(text).render(USER, value=value)

    expected = [
        json.dumps(value, ensure_ascii=False),
        json.dumps(value, indent=2, ensure_ascii=False),
        json.dumps(value, separators=(",", ":"), sort_keys=True),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(json.encoder, "c_make_encoder", _refused)
        options = ["", "indent=2", "separators=(',', ':'), sort_keys=True, ensure_ascii=True"]
        assert [rendered(option) for option in options] == expected


def _refused(*args: object) -> None:
    raise AssertionError("encoded in one go")
