import json
from pathlib import Path

import pytest

import rapidmoe_jax
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


def test_chat_by_template_and_by_plain_turns(codec):
    messages = [{"role": "user", "content": "Hi"}]
    assert codec.render_chat(messages) == "User: Hi\nAssistant:"
    with_template = TextCodec(ORACLE, {"eos_token_id": 1}, 512)
    assert with_template.render_chat(messages) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert with_template.eos_ids == {1}
    with_template.template = "{{ raise_exception('no system turn') }}"
    with pytest.raises(ValueError, match="chat template: no system turn"):
        with_template.render_chat(messages)
    with_template.template = "{{ ''.__class__.__mro__ }}"
    with pytest.raises(ValueError, match="chat template"):
        with_template.render_chat(messages)


def test_eos_may_be_a_list(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((ORACLE / "tokenizer.json").read_bytes())
    assert TextCodec(tmp_path, {"eos_token_id": [1, 3]}, 512).eos_ids == {1, 3}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert TextCodec(tmp_path, {"eos_token_id": [1, 3]}, 512).eos_ids == {2}
    assert TextCodec(ORACLE, {}, 512).eos_ids == {1}


def test_missing_damaged_and_foreign_tokenizers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json: file not found"):
        TextCodec(tmp_path, {}, 512)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read as a tokenizer"):
        TextCodec(tmp_path, {}, 512)
    with pytest.raises(ValueError, match="has 512 tokens, the model 100"):
        TextCodec(ORACLE, {}, 100)
