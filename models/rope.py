"""Rotary positions and their stretched variants.

angle = position * theta^(-2i / size);  linear, yarn: frequencies divided by a factor (yarn: only the slow ones);
dynamic: theta grows with the sequence. yarn also scales cos and sin.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from rapidmoe_jax.config import RopeConfig


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Give yarn's growth of the attention logits: 0.1 mscale ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_frequencies(rope: RopeConfig) -> np.ndarray:
    """Blend stretched and unstretched frequencies by how often they turn over original_positions (YaRN, eq. 23)."""

    def index(rotations: float) -> float:
        turns = rope.original_positions / (rotations * 2 * math.pi)
        return rope.size * math.log(turns) / (2 * math.log(rope.theta))

    low, high = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    span = high - low if high != low else 0.001
    stretched = np.clip((np.arange(rope.size // 2) - low) / span, 0, 1)
    frequency = rope.theta ** (-np.arange(0, rope.size, 2) / rope.size)
    return frequency * (1 - stretched) + frequency / rope.factor * stretched


def cos_sin_scale(rope: RopeConfig) -> float:
    """Give the factor on cos and sin."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor)


def rope_table(
    positions: Int32[Array, "B C"], rope: RopeConfig, lengths: Int32[Array, " B"] | None = None
) -> tuple[Float[Array, "B C 1 R"], Float[Array, "B C 1 R"]]:
    """Give cos and sin of each position's angles, R = size / 2.

    Args:
      lengths: tokens of each row so far, for dynamic stretching; None = by the last position.
    """
    exponent = jnp.arange(0, rope.size, 2, dtype=jnp.float32) / rope.size
    if rope.kind == "yarn":
        frequency = jnp.asarray(_yarn_frequencies(rope), jnp.float32)
    elif rope.kind == "dynamic":
        length = (positions.max(-1) + 1 if lengths is None else lengths).astype(jnp.float32)
        grown = jnp.maximum(rope.factor * length / rope.original_positions - (rope.factor - 1), 1.0)
        theta = rope.theta * grown ** (rope.size / (rope.size - 2))
        frequency = theta[:, None, None, None] ** -exponent
    else:
        frequency = rope.theta**-exponent / (rope.factor if rope.kind == "linear" else 1.0)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    scale = cos_sin_scale(rope)
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def apply_rope(
    x: Float[Array, "B C N h"], cos: Float[Array, "B C 1 R"], sin: Float[Array, "B C 1 R"]
) -> Float[Array, "B C N h"]:
    """Rotate the first 2R elements of each head, element i with i + R; the rest stays."""
    r = cos.shape[-1]
    a, b, rest = jnp.split(x.astype(jnp.float32), (r, 2 * r), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1).astype(x.dtype)
