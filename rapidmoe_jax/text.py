"""Text to tokens and back: tokenizer files, streaming without cut characters, stop strings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rapidmoe_jax.chat import ChatTemplate, Message, optional_json

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Tokens that give a reply its structure: part of the text even where the tokenizer calls them special.
_MARKUP = frozenset(("<think>", "</think>", "<tool_call>", "</tool_call>",
                     "<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"))  # fmt: skip
_PROMPT_TAIL = 6  # tokens of the prompt that decoding looks back on


class TextCodec:
    """A checkpoint folder's tokenizer, end-of-text tokens (eos_ids) and chat template.

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
        eos = optional_json(folder / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
        self.eos_ids = frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)
        self.template = ChatTemplate(folder)
        added = self.tokenizer.get_added_tokens_decoder()
        self._markup = {i: t.content for i, t in added.items() if t.special and t.content in _MARKUP}

    def encode(self, text: str) -> list[int]:
        """Turn text into token ids, with the special tokens that the tokenizer itself adds."""
        return self.tokenizer.encode(text).ids

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Turn a conversation into the prompt for the assistant's next turn.

        Args:
          messages, options: see ChatTemplate.render.
        """
        text = self.template.render(messages, **options)  # which writes the special tokens itself
        return self.tokenizer.encode(text, add_special_tokens=not self.template).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Turn token ids into text, without special tokens; bytes that are no UTF-8 become U+FFFD.

        Tokens that structure a reply (thinking, channels, tool calls) are text, special or not.
        """
        text, run = "", []
        for token in ids:
            if token in self._markup:
                text += self.tokenizer.decode(run) + self._markup[token]
                run = []
            else:
                run.append(token)
        return text + self.tokenizer.decode(run)


class TextStream:
    """Text of one growing row of tokens, given out in pieces that are never taken back.

    Holds back a character whose bytes are not all there, and text that may be the start of a stop string.

    Args:
      prompt: what the row continues; its text is not given out, but decides whether a space begins the first word.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str], prompt: Sequence[int] = ()):
        self._codec, self._stop = codec, [s for s in stop if s]
        self._ids = list(prompt[-_PROMPT_TAIL:])
        self._start = 0  # first token of the decoding window
        self._read = len(self._ids)  # tokens whose text has been taken
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
