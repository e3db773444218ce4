"""Text to tokens and back: tokenizer files, chat templates, streaming without cut characters, stop strings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from rapidmoe_jax.checkpoint import read_json

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextCodec:
    """A checkpoint folder's tokenizer, end-of-text tokens and chat template.

    Raises ValueError if tokenizer.json is missing or has more tokens than the model.
    """

    def __init__(self, folder: Path, config: dict[str, Any], vocab_size: int):
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ValueError(f"{path}: file not found; copy the tokenizer of the checkpoint there")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises bare Exception
            raise ValueError(f"{path}: cannot be read as a tokenizer ({e}); copy the file again") from None
        size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        if size > vocab_size:
            raise ValueError(f"{path}: has {size} tokens, the model {vocab_size}; it belongs to another checkpoint")
        settings = _optional_json(folder / "tokenizer_config.json")
        generation = _optional_json(folder / "generation_config.json")
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        self.eos_ids = frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)
        template = folder / "chat_template.jinja"
        self.template = template.read_text(encoding="utf-8") if template.exists() else settings.get("chat_template")
        self.special = {
            key: value if isinstance(value, str) else value.get("content")
            for key in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (value := settings.get(key)) is not None
        }

    def encode(self, text: str) -> list[int]:
        """Turn text into token ids, with the special tokens that the tokenizer itself adds."""
        return self.tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Turn token ids into text, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """Write a conversation as a prompt: by the chat template if there is one, else as plain turns.

        Args:
          messages: each with "role" (system, user, assistant) and "content".
        Raises: ValueError with the template's own words if it refuses the conversation.
        """
        if not self.template:
            turns = [f"{m['role'].capitalize()}: {m['content']}\n" for m in messages]
            return "".join(turns) + "Assistant:"
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

        def refuse(message: str):
            raise jinja2.TemplateError(message)

        try:
            return environment.from_string(self.template).render(
                messages=list(messages), add_generation_prompt=True, raise_exception=refuse, **self.special
            )
        except jinja2.TemplateError as e:
            raise ValueError(f"chat template: {e}") from None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


class TextStream:
    """Text of one growing row of tokens, given out in pieces that are never taken back.

    Holds back a character whose bytes are not all there, and text that may be the start of a stop string.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str]):
        self._codec, self._stop = codec, [s for s in stop if s]
        self._ids: list[int] = []
        self._start = 0  # first token of the decoding window
        self._read = 0  # tokens whose text has been taken
        self.text = ""  # all text so far, cut before a stop string
        self._given = 0  # characters given out
        self.stopped = False  # a stop string was found

    def add(self, token: int) -> str:
        """Add a token and return the text that is now certain."""
        self._ids.append(token)
        before = self._codec.decode(self._ids[self._start : self._read])
        now = self._codec.decode(self._ids[self._start :])
        if now.endswith(_REPLACEMENT) or len(now) <= len(before):
            return ""
        self._take(now[len(before) :])
        self._start, self._read = self._read, len(self._ids)
        return self._give(self._held())

    def finish(self) -> str:
        """Return what was held back; nothing more will come."""
        if not self.stopped:
            before = self._codec.decode(self._ids[self._start : self._read])
            self._take(self._codec.decode(self._ids[self._start :])[len(before) :])
            self._start = self._read = len(self._ids)
        return self._give(0)

    def _take(self, new: str) -> None:
        if self.stopped:
            return
        longest = max((len(s) for s in self._stop), default=1)
        searched = max(0, len(self.text) - longest + 1)
        self.text += new
        found = [at for s in self._stop if (at := self.text.find(s, searched)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _held(self) -> int:
        """Count the last characters that may begin a stop string."""
        if self.stopped:
            return 0
        return max(
            (n for s in self._stop for n in range(1, len(s)) if self.text.endswith(s[:n])),
            default=0,
        )

    def _give(self, held: int) -> str:
        end = max(len(self.text) - held, self._given)
        piece, self._given = self.text[self._given : end], end
        return piece
