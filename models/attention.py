"""Attention of a layer's new tokens over a KVCache: grouped-query, and DeepSeek's latent form.

Latent attention keeps one latent c and one rotated key a token. Expanded, it makes every head's keys and values of c;
absorbed, it moves those two matrices to the query and the output. A step takes the form of fewer multiplications.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from rapidmoe_jax.cache import KVCache
from rapidmoe_jax.config import LatentConfig, ModelConfig
from rapidmoe_jax.models.blocks import Linear, RMSNorm
from rapidmoe_jax.models.rope import apply_rope, yarn_mscale

_LATENT_EPS = 1e-6  # of the norms inside latent attention, whatever the model's is


class Positions(NamedTuple):
    """Where a step's tokens are."""

    start: Int32[Array, " B"]  # slot of each row's first new token
    cos: Float[Array, "B C 1 R"]
    sin: Float[Array, "B C 1 R"]


def visible_slots(
    start: Int32[Array, " B"], count: int, slots: int, window: Int32[Array, ""] | None
) -> Bool[Array, "B C S"]:
    """Say which slots each new token attends to: itself and those before it, the last `window` of them (0 = all)."""
    position = (start[:, None] + jnp.arange(count))[..., None]
    seen = jnp.arange(slots) <= position
    if window is None:
        return seen
    return seen & ((jnp.arange(slots) > position - window) | (window == 0))


def attention_weights(
    scores: Float[Array, "B N C S"], visible: Bool[Array, "B C S"], sinks: Float[Array, " N"] | None = None
) -> Float[Array, "B N C S"]:
    """Softmax over the visible slots, in float32; a head's sink takes part and is dropped."""
    scores = jnp.where(visible[:, None], scores.astype(jnp.float32), -jnp.inf)
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sink = sinks.astype(jnp.float32)[:, None, None]
    top = jnp.maximum(scores.max(-1, keepdims=True), sink)
    e = jnp.exp(scores - top)
    return e / (e.sum(-1, keepdims=True) + jnp.exp(sink - top))


class Attention(nnx.Module):
    """Grouped-query attention with the families' options: norms, biases, clipping, window, sinks."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        heads, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        self.q_proj = Linear(cfg.width, heads, bias=cfg.qkv_bias, rngs=rngs)
        self.k_proj = Linear(cfg.width, kv, bias=cfg.qkv_bias, rngs=rngs)
        self.v_proj = Linear(cfg.width, kv, bias=cfg.qkv_bias, rngs=rngs)
        self.o_proj = Linear(heads, cfg.width, bias=cfg.out_bias, rngs=rngs)
        if cfg.qk_norm:
            full = cfg.qk_norm == "full"
            self.q_norm = RMSNorm(heads if full else cfg.head_dim, cfg.rms_norm_eps)
            self.k_norm = RMSNorm(kv if full else cfg.head_dim, cfg.rms_norm_eps)
        if cfg.sinks:
            self.sinks = nnx.Param(jnp.zeros(cfg.num_heads))
        self.cfg = cfg

    def __call__(
        self,
        x: Float[Array, "B C D"],
        at: Positions,
        cache: KVCache,
        layer: Int32[Array, ""],
        window: Int32[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B C D"], KVCache]:
        """Attend from C new tokens of each row to themselves and those before, the last `window` of them."""
        cfg, (batch, count, _) = self.cfg, x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if cfg.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        if cfg.clip_qkv:
            q, k, v = (jnp.clip(a, -cfg.clip_qkv, cfg.clip_qkv) for a in (q, k, v))
        q, k, v = (a.reshape(batch, count, -1, cfg.head_dim) for a in (q, k, v))
        if cfg.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, at.cos, at.sin), apply_rope(k, at.cos, at.sin)
        cache = cache.write(layer, at.start, k, v)
        keys, values = cache.k[layer], cache.v[layer]
        slots = keys.shape[1]
        q = q.reshape(batch, count, cfg.num_kv_heads, -1, cfg.head_dim)
        scores = jnp.einsum("bcjgh,bsjh->bjgcs", q, keys, preferred_element_type=jnp.float32) * cfg.head_dim**-0.5
        scores = scores.reshape(batch, cfg.num_heads, count, slots)
        sinks = self.sinks[...] if cfg.sinks else None
        weights = attention_weights(scores, visible_slots(at.start, count, slots, window), sinks)
        weights = weights.reshape(batch, cfg.num_kv_heads, -1, count, slots).astype(values.dtype)
        mixed = jnp.einsum("bjgcs,bsjh->bcjgh", weights, values).reshape(batch, count, -1)
        return self.o_proj(mixed.astype(x.dtype)), cache


class LatentAttention(nnx.Module):
    """Multi-head latent attention over a cache of latents; positions in pairs (2i, 2i + 1), as DeepSeek publishes."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        c = cfg.latent
        assert c is not None
        query = cfg.num_heads * (c.nope_size + c.rope_size)
        if c.query_rank:
            self.q_a_proj = Linear(cfg.width, c.query_rank, rngs=rngs)
            self.q_a_norm = RMSNorm(c.query_rank, _LATENT_EPS)
            self.q_b_proj = Linear(c.query_rank, query, rngs=rngs)
        else:
            self.q_proj = Linear(cfg.width, query, rngs=rngs)
        self.kv_a_proj = Linear(cfg.width, c.rank + c.rope_size, rngs=rngs)
        self.kv_a_norm = RMSNorm(c.rank, _LATENT_EPS)
        self.kv_b_proj = Linear(c.rank, cfg.num_heads * (c.nope_size + c.value_size), rngs=rngs)
        self.o_proj = Linear(cfg.num_heads * c.value_size, cfg.width, rngs=rngs)
        rope = cfg.rope
        grown = yarn_mscale(rope.factor, rope.mscale_all_dim) if rope.kind == "yarn" and rope.mscale_all_dim else 1.0
        self.scale = (c.nope_size + c.rope_size) ** -0.5 * grown**2
        self.heads, self.latent = cfg.num_heads, c

    def __call__(
        self,
        x: Float[Array, "B C D"],
        at: Positions,
        cache: KVCache,
        layer: Int32[Array, ""],
        window: Int32[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B C D"], KVCache]:
        """Attend from C new tokens of each row to themselves and those before, the last `window` of them."""
        c, (batch, count, _) = self.latent, x.shape
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x))) if c.query_rank else self.q_proj(x)
        q_nope, q_rope = jnp.split(q.reshape(batch, count, self.heads, -1), [c.nope_size], axis=-1)
        latent, k_rope = jnp.split(self.kv_a_proj(x), [c.rank], axis=-1)
        q_rope, k_rope = (apply_rope(_unpair(a), at.cos, at.sin) for a in (q_rope, k_rope[:, :, None]))
        cache = cache.write(layer, at.start, k_rope, self.kv_a_norm(latent)[:, :, None])
        keys, latents = cache.k[layer, :, :, 0], cache.v[layer, :, :, 0]  # [B, S, rope_size], [B, S, rank]
        slots = keys.shape[1]
        up = self.kv_b_proj.weight[...].astype(x.dtype).reshape(self.heads, -1, c.rank)
        k_up, v_up = up[:, : c.nope_size], up[:, c.nope_size :]
        absorbed = absorbs(c, count, slots)
        wide = {"preferred_element_type": jnp.float32}
        if absorbed:
            q_latent = jnp.einsum("bcnh,nhr->bcnr", q_nope, k_up)
            scores = jnp.einsum("bcnr,bsr->bncs", q_latent, latents, **wide)
        else:
            scores = jnp.einsum("bcnh,bsnh->bncs", q_nope, jnp.einsum("bsr,nhr->bsnh", latents, k_up), **wide)
        scores += jnp.einsum("bcnh,bsh->bncs", q_rope, keys, **wide)
        visible = visible_slots(at.start, count, slots, window)
        weights = attention_weights(scores * self.scale, visible).astype(x.dtype)
        if absorbed:
            mixed = jnp.einsum("bcnr,nhr->bcnh", jnp.einsum("bncs,bsr->bcnr", weights, latents), v_up)
        else:
            mixed = jnp.einsum("bncs,bsnh->bcnh", weights, jnp.einsum("bsr,nhr->bsnh", latents, v_up))
        return self.o_proj(mixed.reshape(batch, count, -1).astype(x.dtype)), cache


def absorbs(c: LatentConfig, count: int, slots: int) -> bool:
    """Say whether the absorbed form multiplies less than the expanded one for `count` tokens over `slots`."""
    up = c.rank * (c.nope_size + c.value_size)
    return count * up + count * slots * 2 * c.rank < slots * up + count * slots * (c.nope_size + c.value_size)


def _unpair(x: Float[Array, "B C N h"]) -> Float[Array, "B C N h"]:
    """Turn pairs (2i, 2i + 1) into halves (i, i + h/2); scores do not change."""
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], -1)
