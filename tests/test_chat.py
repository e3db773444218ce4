"""Chat templates as published checkpoints write them: what they use of jinja2, and what they are given."""

import json
import re

import pytest

from rapidmoe_jax.chat import ChatTemplate

TURNS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "What time is it in Köln? <now>"},
]
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"city": {"type": "string"}}}}
# In the manner of Qwen3: a system turn with the tools in it, thinking of past turns dropped, of the next one optional.
TOOLS_TEMPLATE = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set content = message.content | trim %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- generation %}{{ content }}{% endgeneration %}
    {%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call | tojson + '</tool_call>' }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""


def template(tmp_path, source, **settings) -> ChatTemplate:
    (tmp_path / "chat_template.jinja").write_text(source)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return ChatTemplate(tmp_path)


def test_system_and_tools(tmp_path):
    chat = template(tmp_path, TOOLS_TEMPLATE)
    user = "<|im_start|>user\nWhat time is it in Köln? <now><|im_end|>\n<|im_start|>assistant\n"
    assert chat.render(TURNS) == "<|im_start|>system\nBe kind.<|im_end|>\n" + user
    assert chat.render(TURNS[1:]) == user
    schema = '{"type": "function", "function": {"name": "clock", "parameters": {"city": {"type": "string"}}}}'
    assert chat.render(TURNS, [CLOCK]) == f"<|im_start|>system\nBe kind.\n\n{schema}\n<|im_end|>\n" + user


def test_thinking_and_calls_of_past_turns(tmp_path):
    chat = template(tmp_path, TOOLS_TEMPLATE)
    call = {"name": "clock", "arguments": {"city": "Köln"}}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\na greeting\n</think>\n\nHello.", "tool_calls": [call]},
        {"role": "tool", "content": "12:00"},
    ]
    text = chat.render(turns, enable_thinking=False)
    assert text == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello."
        '<tool_call>{"name": "clock", "arguments": {"city": "Köln"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n12:00<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_special_tokens_dates_and_indents(tmp_path):
    source = "{{ bos_token }}{{ strftime_now('%Y') }}{{ tools | tojson(indent=2) }}{{ eos_token }}"
    chat = template(tmp_path, source, bos_token={"content": "<s>"}, eos_token="</s>", chat_template="not this one")
    text = chat.render([], [{"a": "<ö>"}])
    assert re.fullmatch(r'<s>20\d\d\[\n  \{\n    "a": "<ö>"\n  \}\n\]</s>', text)


def test_named_templates_and_the_settings_file(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools | length }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    chat = ChatTemplate(tmp_path)
    assert chat.render(TURNS) == "plain" and chat.render(TURNS, [CLOCK]) == "tools 1"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("of a file")
    assert ChatTemplate(tmp_path).render(TURNS, [CLOCK]) == "of a file"


def test_without_a_template_turns_are_plain_and_tools_refused(tmp_path):
    chat = ChatTemplate(tmp_path)
    assert chat.render(TURNS[:1]) == "System: Be kind.\nAssistant:" and not chat
    with pytest.raises(ValueError, match="has none, tools, enable_thinking cannot be told"):
        chat.render(TURNS, [CLOCK], enable_thinking=True)


@pytest.mark.parametrize(
    "source, message",
    [
        ("{{ raise_exception('roles must alternate') }}", "chat template: roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "chat template: .*unsafe"),
        ("{% set _ = messages.append({}) %}", "chat template: .*unsafe"),
        ("{% for m in messages %}", "chat template: Unexpected end of template"),
        ("{{ messages[0].content + 1 }}", "chat template: can only concatenate"),
    ],
)
def test_a_template_that_refuses_or_reaches_out_is_an_error(tmp_path, source, message):
    with pytest.raises(ValueError, match=message):
        template(tmp_path, source).render(TURNS)
