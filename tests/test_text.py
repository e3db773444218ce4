import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import rapidmoe_jax
from rapidmoe_jax.chat import assistant_message
from rapidmoe_jax.text import TextCodec, TextStream

ORACLE = Path(__file__).parent / "oracle" / "qwen3_moe"
TEXT = "naïve café, 東京 👩‍👩‍👧 — “ok”\n"


@pytest.fixture(scope="module")
def codec():
    return TextCodec(rapidmoe_jax.demo_path(), {}, 8192)


def pieces(codec, ids, stop=()):
    stream = TextStream(codec, stop)
    out = []
    for token in ids:
        out.append(stream.add(token))
        if stream.stopped:
            break
    return [*out, stream.finish()], stream


def test_streamed_pieces_join_to_the_text_and_never_cut_a_character(codec):
    ids = codec.encode(TEXT)
    assert len(ids) > len(TEXT.split())
    out, stream = pieces(codec, ids)
    assert "".join(out) == codec.decode(ids) == stream.text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in out)


def test_bytes_that_are_no_utf8_come_out_at_the_end(codec):
    ids = codec.encode("a 東")[:-1]
    out, stream = pieces(codec, ids)
    assert "".join(out) == codec.decode(ids)
    assert stream.finish() == "" and stream.text == codec.decode(ids)


@pytest.mark.parametrize("stop", ["brown fox", "own f", " ", "quick", "k b"])
def test_stop_strings_across_token_borders(codec, stop):
    text = "The quick brown fox jumps"
    out, stream = pieces(codec, codec.encode(text), [stop])
    assert stream.stopped and "".join(out) == text[: text.index(stop)] == stream.text


def test_the_first_of_several_stops_counts_and_a_near_miss_is_given_out(codec):
    out, stream = pieces(codec, codec.encode("one two three"), ["three", "two"])
    assert "".join(out) == "one "
    out, stream = pieces(codec, codec.encode("the end of"), ["end off"])
    assert "".join(out) == "the end of" and not stream.stopped


def test_eos_may_be_a_list(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((ORACLE / "tokenizer.json").read_bytes())
    assert TextCodec(tmp_path, {"eos_token_id": [1, 3]}, 512).eos_ids == {1, 3}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert TextCodec(tmp_path, {"eos_token_id": [1, 3]}, 512).eos_ids == {2}
    assert TextCodec(ORACLE, {}, 512).eos_ids == {1}


def bpe(tmp_path, *special, plain=()):
    """Write a byte-level BPE tokenizer of single bytes and added tokens, the kind of Qwen, DeepSeek and gpt-oss."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in special])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return TextCodec(tmp_path, {}, 512)


def sentencepiece(tmp_path):
    """Write a tokenizer of the sentencepiece kind, as Mixtral's: spaces as U+2581, bytes for what is not in it."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)], "▁", *"helowrd", "▁h", "▁w", "or", "▁wor"]
    merges = [("▁", "h"), ("▁", "w"), ("o", "r"), ("▁w", "or")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return TextCodec(tmp_path, {}, 512)


def test_sentencepiece_keeps_the_space_between_prompt_and_text(tmp_path):
    codec = sentencepiece(tmp_path)
    whole = codec.encode("hello world, é 東!")
    assert whole[0] == 1 and codec.decode(whole) == "hello world, é 東!"
    for cut in (1, 2, 6, 7, 8):
        stream = TextStream(codec, (), whole[:cut])
        text = "".join(stream.add(t) for t in whole[cut:]) + stream.finish()
        assert codec.decode(whole[:cut]) + text == "hello world, é 東!"
        assert stream.text == text


def test_a_chat_prompt_has_one_begin_token(tmp_path):
    codec = sentencepiece(tmp_path)
    assert codec.encode_chat([{"role": "user", "content": "h"}])[0] == 1  # plain turns: as the tokenizer says
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    ids = TextCodec(tmp_path, {}, 512).encode_chat([{"role": "user", "content": "hello"}])
    assert ids.count(1) == 1 and ids[0] == 1


THINKING = "<think>\nTwo and two,\n\n  so 4.\n</think>\n\nIt is 4.<tool_call>{}</tool_call>"


@pytest.mark.parametrize("special", [False, True])
def test_thinking_passes_through_the_stream_untouched(tmp_path, special):
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    codec = bpe(tmp_path, "<|im_end|>", *(marks if special else ()), plain=() if special else marks)
    ids = codec.encode(THINKING + "<|im_end|>")
    out, stream = pieces(codec, ids)
    assert "".join(out) == stream.text == THINKING  # and the end token is no text


def test_channels_pass_through_the_stream_and_become_a_message(tmp_path):
    marks = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|return|>")
    codec = bpe(tmp_path, *marks)
    text = "<|channel|>analysis<|message|>Sum 2 < 3.<|end|><|start|>assistant<|channel|>final<|message|>It is **4**.\n"
    out, stream = pieces(codec, codec.encode(text + "<|return|>"))
    assert "".join(out) == stream.text == text
    assert assistant_message(text) == {"role": "assistant", "content": "It is **4**.\n", "thinking": "Sum 2 < 3."}
    assert assistant_message(THINKING) == {"role": "assistant", "content": THINKING}


def test_ids_beyond_the_tokenizer_are_no_text(tmp_path):
    """Published embeddings are padded; a sampled padding row must not break the stream."""
    codec = bpe(tmp_path)
    out, stream = pieces(codec, [*codec.encode("ab"), 500, *codec.encode("c")])
    assert "".join(out) == stream.text == "abc"


def test_missing_damaged_and_foreign_tokenizers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json: file not found"):
        TextCodec(tmp_path, {}, 512)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read as a tokenizer"):
        TextCodec(tmp_path, {}, 512)
    with pytest.raises(ValueError, match="has 512 tokens, the model 100"):
        TextCodec(ORACLE, {}, 100)
