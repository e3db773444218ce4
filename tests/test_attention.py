"""Attention against a plain float64 definition, option by option, and its two latent forms against each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TEST_CASES, model_config
from flax import nnx

from rapidmoe_jax.cache import KVCache
from rapidmoe_jax.config import LatentConfig, RopeConfig
from rapidmoe_jax.models import attention
from rapidmoe_jax.models.attention import Attention, LatentAttention, Positions, absorbs
from rapidmoe_jax.models.rope import cos_sin_scale, rope_table, yarn_mscale
from rapidmoe_jax.models.shapes import named_shape

BASE = dataclasses.replace(
    model_config(TEST_CASES[0]), num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeConfig(theta=100.0, size=16)
)
OPTIONS = {
    "plain": {},
    "norm of each head": {"qk_norm": "head"},
    "norm of the projection, clipped": {"qk_norm": "full", "clip_qkv": 0.7},
    "biases": {"qkv_bias": True, "out_bias": True},
    "half of a head rotated": {"rope": RopeConfig(theta=100.0, size=8)},
    "heads wider than width / heads": {"head_dim": 32, "rope": RopeConfig(theta=100.0, size=32)},
    "sinks": {"sinks": True},
    "linear": {"rope": RopeConfig(theta=100.0, size=16, kind="linear", factor=4.0)},
}


def module(cls, cfg, seed=0):
    """Make a module with all its parameters random, the zeros and ones of a new one too."""
    made = cls(cfg, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(seed)
    graphdef, state = nnx.split(made)
    draw = lambda a: jnp.asarray(rng.normal(0.5, 0.5, a.shape) if a.ndim == 1 else rng.normal(0, 0.2, a.shape))  # noqa: E731
    return nnx.merge(graphdef, jax.tree.map(lambda a: draw(a).astype(jnp.float32), state))


def step(attn, cfg, x, start, cache, window=None):
    positions = start[:, None] + jnp.arange(x.shape[1])
    at = Positions(start, *rope_table(positions, cfg.rope))
    return attn(x, at, cache, jnp.int32(0), None if window is None else jnp.asarray(window))


run = nnx.jit(step, static_argnums=1)


def reference(attn, cfg, x, window=0):
    """The definition, one row from position 0, in float64."""

    def linear(name):
        p = getattr(attn, f"{name}_proj")
        return x @ np.float64(p.weight[...]).T + (np.float64(p.bias[...]) if hasattr(p, "bias") else 0)

    def norm(a, name):
        return a / np.sqrt((a**2).mean(-1, keepdims=True) + cfg.rms_norm_eps) * np.float64(getattr(attn, name).scale)

    def rotate(a):  # [C, heads, h]
        r, angle = cfg.rope.size // 2, np.arange(len(a))[:, None] * frequency
        c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
        u, v = a[..., :r], a[..., r : 2 * r]
        return np.concatenate([u * c - v * s, v * c + u * s, a[..., 2 * r :]], -1)

    frequency = cfg.rope.theta ** (-np.arange(0, cfg.rope.size, 2) / cfg.rope.size) / cfg.rope.factor
    q, k, v = linear("q"), linear("k"), linear("v")
    if cfg.qk_norm == "full":
        q, k = norm(q, "q_norm"), norm(k, "k_norm")
    if cfg.clip_qkv:
        q, k, v = (np.clip(a, -cfg.clip_qkv, cfg.clip_qkv) for a in (q, k, v))
    q, k, v = (a.reshape(len(x), -1, cfg.head_dim) for a in (q, k, v))
    if cfg.qk_norm == "head":
        q, k = norm(q, "q_norm"), norm(k, "k_norm")
    q, k, out = rotate(q), rotate(k), np.zeros((len(x), cfg.num_heads, cfg.head_dim))
    for t in range(len(x)):
        first = max(0, t - window + 1) if window else 0  # the window counts the token itself
        for head in range(cfg.num_heads):
            group = head // (cfg.num_heads // cfg.num_kv_heads)
            e = np.exp(k[first : t + 1, group] @ q[t, head] / np.sqrt(cfg.head_dim))
            rest = np.exp(np.float64(attn.sinks[head])) if cfg.sinks else 0.0
            out[t, head] = e @ v[first : t + 1, group] / (e.sum() + rest)
    x = out.reshape(len(x), -1)
    return linear("o")


@pytest.mark.parametrize("name, window", [*((n, None) for n in OPTIONS), *(("sinks", w) for w in (0, 1, 3, 99))])
def test_attention_is_its_definition(name, window):
    cfg = dataclasses.replace(BASE, **OPTIONS[name])
    attn, x = module(Attention, cfg), np.random.default_rng(1).normal(size=(1, 9, cfg.width)).astype(np.float32)
    got, _ = run(attn, cfg, jnp.asarray(x), jnp.zeros(1, jnp.int32), KVCache.allocate(cfg, 1, 12, jnp.float32), window)
    np.testing.assert_allclose(got[0], reference(attn, cfg, np.float64(x[0]), window or 0), atol=2e-5)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_rows_of_different_length_step_by_step(window):
    """Sinks and windows in a padded batch: each row as if alone, the padding of a short prompt overwritten."""
    cfg = dataclasses.replace(BASE, sinks=True)
    attn, lengths, steps = module(Attention, cfg), np.array([6, 2]), 4
    rows = [
        np.random.default_rng(i).normal(size=(n + steps, cfg.width)).astype(np.float32) for i, n in enumerate((6, 2))
    ]
    x = np.full((2, 6, cfg.width), 9.0, np.float32)  # what is past a prompt's end must not matter
    for row, n, into in zip(rows, lengths, x, strict=True):
        into[:n] = row[:n]
    cache = KVCache.allocate(cfg, 2, 12, jnp.float32)
    first, cache = run(attn, cfg, jnp.asarray(x), jnp.zeros(2, jnp.int32), cache, window)
    got = [list(np.asarray(first[i, :n])) for i, n in enumerate(lengths)]
    for i in range(steps):
        new = jnp.asarray(np.stack([row[n + i] for row, n in zip(rows, lengths, strict=True)])[:, None])
        out, cache = run(attn, cfg, new, jnp.asarray(lengths + i, jnp.int32), cache, window)
        for mine, y in zip(got, out, strict=True):
            mine.append(np.asarray(y[0]))
    for row, mine in zip(rows, got, strict=True):
        np.testing.assert_allclose(np.stack(mine), reference(attn, cfg, np.float64(row), window or 0), atol=2e-5)


LATENT = LatentConfig(query_rank=24, rank=32, nope_size=16, rope_size=8, value_size=12)


@pytest.mark.parametrize("query_rank", [0, 24])
def test_the_absorbed_form_is_the_expanded_form(query_rank, monkeypatch):
    latent = dataclasses.replace(LATENT, query_rank=query_rank)
    rope = RopeConfig(
        theta=100.0, size=8, kind="yarn", factor=4.0, original_positions=8, mscale=1.0, mscale_all_dim=1.0
    )
    cfg = dataclasses.replace(BASE, head_dim=24, num_kv_heads=4, latent=latent, rope=rope)
    attn, x = module(LatentAttention, cfg), jnp.asarray(np.random.default_rng(1).normal(size=(2, 7, 64)), jnp.float32)
    results = {}
    for form in (True, False):
        monkeypatch.setattr(attention, "absorbs", lambda *_, form=form: form)
        cache = KVCache.allocate(cfg, 2, 12, jnp.float32)
        prefill, cache = step(attn, cfg, x, jnp.zeros(2, jnp.int32), cache)  # not jitted: the form is read each time
        decode, cache = step(attn, cfg, x[:, :1], jnp.full(2, 7, jnp.int32), cache)
        results[form] = np.concatenate([prefill, decode], 1)
    np.testing.assert_allclose(results[True], results[False], atol=1e-5)
    assert cache.k.shape[-2:] == (1, 8) and cache.v.shape[-2:] == (1, 32)  # the latent and one key, no heads


def test_decode_absorbs_and_prefill_expands():
    c = named_shape("deepseek-v3").latent
    assert absorbs(c, 1, 4096) and absorbs(c, 16, 16384) and not absorbs(c, 1024, 1024) and not absorbs(c, 256, 4096)


def test_the_latent_cache_is_less_than_a_70th():
    """576 numbers a token and layer in place of 128 heads of 192 + 128."""
    cfg = named_shape("deepseek-v3")
    assert cfg.cache_elements == 61 * 576 and 61 * 128 * (192 + 128) / cfg.cache_elements > 70


def frequencies(rope, length=None):
    """What rope_table rotates by in a step of one position."""
    last = 1 if length is None else length
    cos, sin = rope_table(jnp.array([[1]]), rope, jnp.array([last]))
    return np.arctan2(np.asarray(sin), np.asarray(cos)).ravel()


def test_theta_and_linear_stretching():
    plain = frequencies(RopeConfig(theta=1e4, size=16))
    np.testing.assert_allclose(plain, 1e4 ** (-np.arange(8) / 8), rtol=1e-5)
    np.testing.assert_allclose(
        frequencies(RopeConfig(theta=1e4, size=16, kind="linear", factor=8.0)), plain / 8, rtol=1e-5
    )


def test_dynamic_stretching_begins_past_the_published_length():
    rope = RopeConfig(theta=1e4, size=16, kind="dynamic", factor=2.0, original_positions=100)
    plain = frequencies(RopeConfig(theta=1e4, size=16))
    np.testing.assert_allclose(frequencies(rope, 100), plain, rtol=1e-5)
    theta = 1e4 * (2 * 300 / 100 - 1) ** (16 / 14)
    np.testing.assert_allclose(frequencies(rope, 300), theta ** (-np.arange(8) / 8), rtol=1e-5)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_keeps_the_fast_and_stretches_the_slow(truncate):
    rope = RopeConfig(theta=1e4, size=64, kind="yarn", factor=40.0, original_positions=4096, truncate=truncate)
    ratio = frequencies(rope) / frequencies(RopeConfig(theta=1e4, size=64))
    turns = 4096 / (2 * np.pi) * 1e4 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(ratio[turns > 40], 1, rtol=1e-5)  # 32 turns and more stay, less a rounded bound
    np.testing.assert_allclose(ratio[turns < 0.7], 1 / 40, rtol=1e-5)
    assert (np.diff(ratio) <= 1e-6).all() and len(set(np.round(ratio, 4))) > 5


def test_yarn_scales_once_scores_or_rotations():
    """DeepSeek-V3: equal mscales cancel on cos and sin, the softmax gets the square. gpt-oss: cos and sin get it."""
    deepseek, gpt_oss = named_shape("deepseek-v3"), named_shape("gpt-oss-20b")
    assert cos_sin_scale(deepseek.rope) == 1.0
    small = dataclasses.replace(BASE, head_dim=24, num_kv_heads=4, latent=LATENT, rope=deepseek.rope)
    grown = 0.1 * np.log(40) + 1
    assert LatentAttention(small, rngs=nnx.Rngs(0)).scale == pytest.approx(24**-0.5 * grown**2)
    assert cos_sin_scale(gpt_oss.rope) == pytest.approx(0.1 * np.log(32) + 1) and not gpt_oss.rope.truncate
    uneven = dataclasses.replace(deepseek.rope, mscale=0.707, mscale_all_dim=1.0)
    assert cos_sin_scale(uneven) == pytest.approx((0.0707 * np.log(40) + 1) / grown)
    assert yarn_mscale(0.5) == 1.0
