"""Blocks that families share: norm, linear, rotary positions, grouped-query attention, dense MLP.

Modules are Flax NNX; matrices are kept as published, [out, in].
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from rapidmoe_jax.cache import KVCache
from rapidmoe_jax.config import ModelConfig


def rms_norm(x: Float[Array, "*N D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "*N D"]:
    """Compute x / sqrt(mean(x^2) + eps) * scale in float32, in x's dtype."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """rms_norm with a learned scale."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size))
        self.eps = eps

    def __call__(self, x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        """Normalise the last axis."""
        return rms_norm(x, self.scale[...], self.eps)


class Linear(nnx.Module):
    """y = x W^T without bias."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (outputs, inputs)) * inputs**-0.5)

    def __call__(self, x: Float[Array, "*N I"]) -> Float[Array, "*N O"]:
        """Multiply the last axis."""
        return jnp.einsum("...i,oi->...o", x, self.weight[...].astype(x.dtype))


def rope_table(
    positions: Int32[Array, "B C"], head_dim: int, theta: float
) -> tuple[Float[Array, "B C 1 R"], Float[Array, "B C 1 R"]]:
    """Give cos and sin of each position's angles, R = head_dim / 2."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(
    x: Float[Array, "B C N h"], cos: Float[Array, "B C 1 R"], sin: Float[Array, "B C 1 R"]
) -> Float[Array, "B C N h"]:
    """Rotate the two halves of each head (element i with i + h/2)."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with q and k normalised per head, over a KVCache."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        heads, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        self.q_proj = Linear(cfg.width, heads, rngs=rngs)
        self.k_proj = Linear(cfg.width, kv, rngs=rngs)
        self.v_proj = Linear(cfg.width, kv, rngs=rngs)
        self.o_proj = Linear(heads, cfg.width, rngs=rngs)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps)
        self.k_norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps)
        self.head_dim, self.groups = cfg.head_dim, cfg.num_heads // cfg.num_kv_heads

    def __call__(
        self,
        x: Float[Array, "B C D"],
        start: Int32[Array, " B"],
        rope: tuple[Float[Array, "B C 1 R"], Float[Array, "B C 1 R"]],
        cache: KVCache,
        layer: Int32[Array, ""],
    ) -> tuple[Float[Array, "B C D"], KVCache]:
        """Attend from C new tokens of each row, at slots start[b].., to themselves and all before."""
        batch, count, _ = x.shape
        q = self.q_norm(self.q_proj(x).reshape(batch, count, -1, self.head_dim))
        k = self.k_norm(self.k_proj(x).reshape(batch, count, -1, self.head_dim))
        v = self.v_proj(x).reshape(batch, count, -1, self.head_dim)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        cache = cache.write(layer, start, k, v)
        keys, values = cache.k[layer], cache.v[layer]
        q = q.reshape(batch, count, -1, self.groups, self.head_dim)
        scores = jnp.einsum("bcjgh,bsjh->bjgcs", q, keys, preferred_element_type=jnp.float32) * self.head_dim**-0.5
        position = start[:, None] + jnp.arange(count)
        visible = jnp.arange(keys.shape[1]) <= position[..., None]  # [B, C, S]
        scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
        mixed = jnp.einsum("bjgcs,bsjh->bcjgh", weights, values).reshape(batch, count, -1)
        return self.o_proj(mixed.astype(x.dtype)), cache


class MLP(nnx.Module):
    """Gated MLP of a layer without experts: down(silu(gate x) * up x)."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        self.gate_proj = Linear(cfg.width, cfg.mlp_size, rngs=rngs)
        self.up_proj = Linear(cfg.width, cfg.mlp_size, rngs=rngs)
        self.down_proj = Linear(cfg.mlp_size, cfg.width, rngs=rngs)

    def __call__(self, x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        """Run the MLP."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
