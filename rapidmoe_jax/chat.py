"""Conversations to prompts: a checkpoint's chat template in a sandbox, as transformers renders it.

And back: the reply of a model that writes in channels (gpt-oss) as a message with its thinking apart.
"""

import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rapidmoe_jax.checkpoint import read_json

Message = dict[str, Any]  # "role" (system, user, assistant, tool), "content"; some templates read more

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CHANNELS = re.compile(r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|end\|>|<\|call\|>|<\|start\|>|\Z)", re.DOTALL)


class ChatTemplate:
    """The templates of a checkpoint folder: chat_template.jinja, additional_chat_templates/, tokenizer_config.json.

    A checkpoint without any writes plain turns, "User: ...".
    """

    def __init__(self, folder: Path):
        settings = optional_json(folder / "special_tokens_map.json") | optional_json(folder / "tokenizer_config.json")
        given = settings.get("chat_template") or {}
        self.sources = {t["name"]: t["template"] for t in given} if isinstance(given, list) else {}
        if isinstance(given, str):
            self.sources["default"] = given
        files = {"default": folder / "chat_template.jinja"}
        files |= {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
        self.sources |= {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.exists()}
        self.special: dict[str, Any] = {
            key: _content(value) for key in _SPECIAL if (value := settings.get(key)) is not None
        }
        if more := settings.get("additional_special_tokens"):
            self.special["additional_special_tokens"] = [_content(value) for value in more]

    def __bool__(self) -> bool:
        return bool(self.sources)

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None, **options: Any) -> str:
        """Write a conversation as a prompt for the assistant's next turn.

        Args:
          messages: the turns so far.
          tools: JSON schemas of functions the model may call; uses the template named tool_use if there is one.
          options: what the template reads besides, enable_thinking=False (Qwen3), reasoning_effort="high" (gpt-oss).
        Raises: ValueError with the template's own words if it refuses the conversation, or if there is no template
          and tools or options are given.
        """
        if not self.sources:
            if tools or options:
                asked = ", ".join((["tools"] if tools else []) + list(options))
                raise ValueError(f"chat template: this checkpoint has none, {asked} cannot be told to the model")
            turns = [f"{m['role'].capitalize()}: {m['content']}\n" for m in messages]
            return "".join(turns) + "Assistant:"
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise ValueError(f"chat template: none is named default, only {', '.join(sorted(self.sources))}")
        values: dict[str, Any] = {"documents": None, **self.special, **options}
        try:
            template = _environment().from_string(self.sources[name], globals=_GLOBALS)
            return template.render(
                messages=list(messages), tools=list(tools) if tools else None, add_generation_prompt=True, **values
            )
        except (jinja2.TemplateError, TypeError, KeyError) as e:
            raise ValueError(f"chat template: {e}") from None


def assistant_message(text: str) -> Message:
    """Give a reply as the message that continues the conversation.

    Text in channels is taken apart as the gpt-oss template wants it: "content" of the final channel, "thinking" of the
    analysis. Other text is left as it is, thinking blocks included: templates drop those of past turns themselves.
    """
    channels = _CHANNELS.findall(text)
    if not channels:
        return {"role": "assistant", "content": text}
    parts = {name: "".join(body for kind, body in channels if kind == name) for name, _ in channels}
    message = {"role": "assistant", "content": parts.get("final", parts.get("commentary", ""))}
    return message | ({"thinking": parts["analysis"]} if "analysis" in parts else {})


def optional_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or give an empty one if there is no such file."""
    return read_json(path) if path.exists() else {}


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}, which marks the assistant's words for training: renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json  # jinja2's own escapes <, > and & for HTML
    return environment


def _to_json(value: Any, indent: Any = None, separators: Any = None, sort_keys: bool = False, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


_GLOBALS = {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
