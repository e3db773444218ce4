import json
import subprocess
import sys

import numpy as np
import pytest

import rapidmoe_jax
from rapidmoe_jax.cli import main


def run(capsys, *args):
    status = main([str(a) for a in args])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_split_info_generate_on_a_folder(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    status, text, _ = run(capsys, "split", tiny, out, "--base-bits", 2, "--residual-bits", 2)
    assert status == 0 and "2 bits" in text and "base + residual" in text
    status, text, _ = run(capsys, "info", out, "--verify")
    assert status == 0 and "qwen3_moe" in text and "nested, groups of 64" in text
    status, text, err = run(capsys, "generate", out, "The router", "--max-new-tokens", 5)
    assert status == 0 and text.endswith("\n") and "of the predicted error corrected" in err
    status, text, _ = run(capsys, "generate", out, "The router", "--max-new-tokens", 5, "--json", "--policy", "all")
    result = json.loads(text)
    assert len(result["tokens"]) == 5 and result["residual"]["error_share"] == pytest.approx(1, abs=1e-5)


def test_eval_json_has_the_promised_fields(demo_cache, capsys):
    status, text, _ = run(capsys, "eval", "demo", "--json", "--window", 64, "--windows", 1, "--fractions", "0.1,0.5")
    result = json.loads(text)
    assert status == 0 and set(result["float"]) == {"nll", "perplexity"}
    fields = {"policy", "fraction", "nll", "perplexity", "kl", "top1_agreement", "host_bytes_per_token", "device_bytes"}
    assert [set(r) for r in result["rows"]] == [fields] * 4
    assert [r["policy"] for r in result["rows"]] == ["none", "share=0.1", "share=0.5", "all"]
    shares = [r["fraction"] for r in result["rows"]]  # as read: a threshold gives the share in the mean only
    assert shares[0] == 0 and shares[3] == 1 and shares[1:3] == pytest.approx([0.1, 0.5], rel=0.3)
    status, text, _ = run(capsys, "eval", "demo", "--window", 64, "--windows", 1, "--fractions", "")
    assert status == 0 and "top-1 agrees" in text


def test_eval_of_a_split_finds_its_source(tiny_split, tmp_path, capsys):
    np.save(tmp_path / "t.npy", np.arange(200) % 512)
    args = ("--tokens", tmp_path / "t.npy", "--window", 32, "--windows", 2, "--json", "--fractions", "0.5")
    status, text, _ = run(capsys, "eval", tiny_split, *args)
    assert status == 0 and json.loads(text)["rows"][-1]["kl"] < json.loads(text)["rows"][0]["kl"]
    status, _, err = run(capsys, "eval", tiny_split, *args, "--reference", tmp_path / "gone")
    assert status == 1 and "is gone; give --reference" in err
    status, _, err = run(capsys, "eval", tiny_split)
    assert status == 1 and "--tokens FILE is needed" in err
    status, _, err = run(capsys, "eval", tiny_split.parent / "source")
    assert status == 1 and "is not split; make a split with: rapidmoe split" in err


def test_bench_json_has_the_promised_fields(demo_cache, capsys):
    status, text, _ = run(capsys, "bench", "demo", "--json", "--repeats", 1, "--new-tokens", 4, "--prompt-tokens", 8)
    result = json.loads(text)
    wanted = {"prefill_tok_per_s", "decode_tok_per_s", "ttft_s", "tpot_s", "host_bytes_per_token", "device_bytes",
              "policy", "machine"}  # fmt: skip
    assert status == 0 and wanted <= set(result) and "none" in result["compared"]
    assert result["policy"] == "share=0.15" and result["machine"]["threads"] >= 1


def test_chat_keeps_the_conversation(demo_cache, capsys, monkeypatch):
    prompts = []
    original = rapidmoe_jax.Model.generate
    monkeypatch.setattr(rapidmoe_jax.Model, "generate",
                        lambda self, prompt, **o: prompts.append(prompt) or original(self, prompt, **o))  # fmt: skip
    lines = iter(["Hello", "And then?", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert run(capsys, "chat", "demo", "--max-new-tokens", 4, "--system", "Be kind")[0] == 0
    codec = rapidmoe_jax.load("demo").codec
    first, second = map(codec.decode, prompts)
    assert first == "System: Be kind\nUser: Hello\nAssistant:"
    assert second.startswith(first) and second.endswith("\nUser: And then?\nAssistant:")


def test_chat_options_reach_the_template(tiny_split, tmp_path, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(rapidmoe_jax.chat.ChatTemplate, "render",
                        lambda self, messages, **options: seen.append(options) or "x")  # fmt: skip
    (tmp_path / "tools.json").write_text('[{"type": "function", "function": {"name": "clock"}}]')
    args = ("chat", tiny_split, "--max-new-tokens", 1, "--tools", tmp_path / "tools.json")
    lines = iter(["Hello", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert run(capsys, *args, "--option", "enable_thinking=false", "--option", "reasoning_effort=high")[0] == 0
    tools = [{"type": "function", "function": {"name": "clock"}}]
    assert seen == [{"enable_thinking": False, "reasoning_effort": "high", "tools": tools}]
    assert "wanted NAME=VALUE" in run(capsys, *args, "--option", "fast")[2]
    (tmp_path / "tools.json").write_text("{}")
    assert "wanted a JSON list" in run(capsys, *args)[2]


@pytest.mark.parametrize(
    "args, message",
    [
        (("generate", "demo", "x", "--policy", "best"), "policy='best' is not understood"),
        (("generate", "nowhere", "x"), "nowhere: no such folder"),
        (("info", "nowhere"), "nowhere: no such folder, nor a named shape (deepseek-v3, "),
        (("info", "deepseek-v3", "--verify"), "deepseek-v3 is no split checkpoint"),
        (("split", "nowhere", "out"), "nowhere: no such folder"),
        (("eval", "demo", "--fractions", "0.1,x"), "--fractions 0.1,x: wanted numbers"),
        (("eval", "demo", "--fractions", "1.1"), "policy='fraction=1.1' is not understood"),
    ],
)
def test_errors_are_one_line_on_stderr(args, message, demo_cache, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *args)
    assert status == 1 and out == "" and message in err and "Traceback" not in err


def test_threads_and_isa_from_the_environment(demo_cache, capsys, monkeypatch):
    monkeypatch.setenv("RAPIDMOE_THREADS", "none")
    status, _, err = run(capsys, "generate", "demo", "x")
    assert status == 1 and "RAPIDMOE_THREADS='none' is no number" in err
    monkeypatch.delenv("RAPIDMOE_THREADS")
    monkeypatch.setenv("RAPIDMOE_ISA", "neon")
    status, _, err = run(capsys, "generate", "demo", "x")
    assert status == 1 and "instruction set 'neon' is unknown or not on this processor; its best is" in err


def test_module_runs_as_a_command():
    out = subprocess.run(
        [sys.executable, "-m", "rapidmoe_jax", "--version"], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == rapidmoe_jax.__version__
