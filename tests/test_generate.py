import copy
import dataclasses
import threading

import numpy as np
import pytest

import rapidmoe_jax
from rapidmoe_jax import steps
from rapidmoe_jax.cache import KVCache
from rapidmoe_jax.generate import CHUNKS, prefill

PROMPTS = ["It was a", "def add(a, b):\n    return", "Once upon a time there was a man who had"]


@pytest.fixture
def model(demo):
    demo.policy = "fraction=0.15"
    return demo


def test_greedy_text_follows_the_logits(model):
    """Prefill + decode one by one = one full pass: the same argmax at every step (policy all, so that steps agree)."""
    model.policy = "all"
    prompt = model.codec.encode(PROMPTS[1])
    result = model.generate(PROMPTS[1], max_new_tokens=24)
    logits = model.logits(prompt + result.tokens)
    top = np.sort(logits[len(prompt) - 1 : -1], axis=-1)
    sure = top[:, -1] - top[:, -2] > 1e-3
    wanted = logits.argmax(-1)[len(prompt) - 1 : -1]
    assert sure.sum() > 15 and (wanted[sure] == np.array(result.tokens)[sure]).all()


@pytest.mark.parametrize("length", [1, CHUNKS[0], CHUNKS[0] + 1, CHUNKS[-1] + CHUNKS[1] + 3])
@pytest.mark.parametrize("policy", ["none", "all"])
def test_prefill_in_chunks_equals_one_pass(demo, length, policy):
    """Exact activations: with int8 a last-bit difference can move a code, and logits by some hundredths."""
    model = copy.copy(demo)
    model.experts, model.policy = dataclasses.replace(demo.experts, exact=True), policy
    ids = rapidmoe_jax.demo_tokens()[:length].tolist()
    cache = KVCache.allocate(model.config, 1, 512, np.float32)
    logits, _, _ = prefill(model, [ids], cache, model.policy)
    np.testing.assert_allclose(logits[0], model.logits(ids)[-1], atol=2e-3)


def test_a_batch_gives_each_prompt_its_own_text(model):
    model.policy = "all"
    options = {"max_new_tokens": 12, "temperature": 0.0}
    alone = [model.generate(p, **options) for p in PROMPTS]
    together = model.generate(PROMPTS, **options)
    assert [r.text for r in together] == [r.text for r in alone]
    assert [r.prompt_tokens for r in together] == [len(model.codec.encode(p)) for p in PROMPTS]
    ids = model.generate([model.codec.encode(p) for p in PROMPTS], **options)
    assert [r.tokens for r in ids] == [r.tokens for r in together]
    assert model.generate(model.codec.encode(PROMPTS[0]), **options).text == alone[0].text


def test_a_long_and_a_short_prompt_in_one_batch(model):
    model.policy = "none"
    long = rapidmoe_jax.demo_tokens()[:300].tolist()
    short = long[:5]
    together = model.generate([long, short], max_new_tokens=8)
    assert together[0].tokens == model.generate(long, max_new_tokens=8).tokens
    assert together[1].tokens == model.generate(short, max_new_tokens=8).tokens


def test_seeds_repeat_exactly_and_differ(model):
    options = {"max_new_tokens": 20, "temperature": 1.0, "top_p": 0.9, "top_k": 100}
    one, again = (model.generate(PROMPTS[0], seed=3, **options) for _ in range(2))
    assert one.tokens == again.tokens
    assert one.tokens != model.generate(PROMPTS[0], seed=4, **options).tokens


def test_streamed_pieces_are_the_text(model):
    result = model.generate(PROMPTS[:2], max_new_tokens=16)
    seen = ["", ""]
    for piece in model.generate(PROMPTS[:2], max_new_tokens=16, stream=True):
        seen[piece.index] += piece.text
    assert seen == [r.text for r in result]
    heard = []
    alone = model.generate(PROMPTS[0], max_new_tokens=16, callback=heard.append)
    assert "".join(p.text for p in heard) == alone.text
    assert [p.token for p in heard if p.token is not None] == alone.tokens


def test_finish_reasons(model):
    full = model.generate(PROMPTS[0], max_new_tokens=30)
    assert full.finish_reason == "length" and len(full.tokens) == 30
    word = full.text.split()[5]
    cut = model.generate(PROMPTS[0], max_new_tokens=30, stop=word)
    assert cut.finish_reason == "stop" and cut.text == full.text[: full.text.index(word)]
    cancelled = model.generate(PROMPTS[0], max_new_tokens=30, callback=lambda piece: True)
    assert cancelled.finish_reason == "cancelled" and len(cancelled.tokens) == 1
    eos = model.codec.eos_ids
    try:
        model.codec.eos_ids = frozenset([full.tokens[4]])
        until = model.generate(PROMPTS[0], max_new_tokens=30)
    finally:
        model.codec.eos_ids = eos
    assert until.finish_reason == "eos" and until.tokens == full.tokens[: full.tokens.index(full.tokens[4])]


def test_the_residual_report_adds_up(model):
    c, record = model.config, model.record_bytes
    units = c.num_moe_layers * c.top_k * c.expert_size
    none, some, every = (
        model.generate(PROMPTS[0], max_new_tokens=10) for model.policy in ("none", "fraction=0.25", "all")
    )
    assert none.residual.units == none.residual.host_bytes == none.residual.error_share == 0
    assert some.residual.host_bytes_per_token == units * record * 0.25
    assert every.residual.host_bytes_per_token == units * record
    assert 0.8 < some.residual.error_share < 1 and every.residual.error_share == pytest.approx(1, abs=1e-5)
    assert every.residual.host_bytes == every.residual.units * record
    assert every.ttft_s > 0 and every.tpot_s > 0 and every.tok_per_s == pytest.approx(1 / every.tpot_s, rel=0.2)


def test_prefill_corrects_the_last_prompt_tokens_only(model):
    ids = rapidmoe_jax.demo_tokens()[:60].tolist()
    full = model.config.num_moe_layers * model.config.expert_size
    seen = {}
    for tokens in (0, 1, 16):
        model.prefill_tokens = tokens
        seen[tokens] = model.generate(ids, max_new_tokens=1).residual.units
    model.prefill_tokens = 16
    assert seen[0] == 0 and seen[1] == int(full * model.config.top_k * 0.15 / 8) * 8 and seen[16] > 2 * seen[1]


def test_threads_generate_side_by_side(model):
    alone = [model.generate(p, max_new_tokens=10).text for p in PROMPTS]
    got = [""] * 3
    workers = [
        threading.Thread(target=lambda i=i: got.__setitem__(i, model.generate(PROMPTS[i], max_new_tokens=10).text))
        for i in range(3)
    ]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert got == alone


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        ("", {}, "no tokens given"),
        ([], {}, "an empty list of prompts"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens=0; use 1 or more"),
        ([1] * 1000, {"max_new_tokens": 100}, "need 1100 cache slots of 1024; ask for at most 24 new tokens"),
        ([9000], {}, "token ids 9000..9000, wanted 0..8191"),
        ("a", {"top_p": 0.0}, "top_p=0.0 is out of range"),
    ],
)
def test_bad_requests_are_refused(model, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        model.generate(prompt, **options)


def test_budgets_change_without_compiling_and_meet_at_their_ends(demo):
    """None and an empty budget, all and an ample one: the same bits. No value of a budget is a compilation."""
    tokens, own = rapidmoe_jax.demo_tokens()[:33], demo.policy
    found = {}
    try:
        for policy in ("none", "fraction=0", "share=0", "budget_bytes=0", "rank=0",
                       "all", "fraction=1", "share=1", "budget_bytes=1GiB", "quality=0", "rank=4"):  # fmt: skip
            demo.policy = policy
            found[policy] = demo.logits(tokens)
        for policy in found:
            zero = policy == "none" or (policy.endswith("=0") and policy != "quality=0")
            np.testing.assert_array_equal(found[policy], found["none" if zero else "all"], err_msg=policy)
        assert (found["none"] != found["all"]).any()
        counts = []
        for budget in (0, 50_000, 400_000, 10**9):
            demo.policy = f"budget_bytes={budget}"
            result = demo.generate(tokens.tolist(), max_new_tokens=4)
            assert result.residual.host_bytes_per_token <= budget
            counts.append((steps.decode_step._cache_size(), steps.prefill_step._cache_size()))
        assert counts[0] == counts[-1]
    finally:
        demo.policy = own


def test_budget_us_reads_more_where_there_is_more_time(demo):
    own = demo.policy
    try:
        read = []
        demo.policy = "budget_us=1000000"  # measures the machine
        for share in (0.1, 0.6):  # of all a step could read
            budget = demo.cost.predict_us(share * demo.max_step_bytes)
            demo.policy = f"budget_us={budget:.3f},frozen"
            results = [demo.generate([5, 6, 7], max_new_tokens=8) for _ in range(2)]
            assert results[0].tokens == results[1].tokens  # frozen: the same again
            read.append(results[0].residual.host_bytes_per_token)
        assert 0 < read[0] < read[1]
        demo.policy = "budget_us=1000000"
        demo.generate([5, 6, 7], max_new_tokens=8)
        assert demo.controller.steps >= 5
        with pytest.raises(ValueError, match="budget_us is a policy of generate"):
            demo.logits([1, 2])
        with pytest.warns(UserWarning, match="is less than a step takes on the base alone"):
            demo.policy = "budget_us=1"
    finally:
        demo.policy = own
