"""Keys and values of past tokens, or what stands for them. Slot s of row b holds the row's s-th token."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from rapidmoe_jax.config import ModelConfig


class KVCache(NamedTuple):
    """Allocated slots of all layers; what is beyond a row's length is never read.

    Latent attention keeps its one rotated key in k and the latent in v.
    """

    k: Float[Array, "L B S J h"]
    v: Float[Array, "L B S J v"]

    @staticmethod
    def allocate(cfg: ModelConfig, batch: int, max_cache_len: int, dtype) -> "KVCache":
        """Make an empty cache for `batch` rows of `max_cache_len` tokens."""
        return KVCache(*(jnp.zeros((cfg.num_layers, batch, max_cache_len, *s), dtype) for s in cfg.cache_shapes))

    def write(
        self,
        layer: Int32[Array, ""],
        start: Int32[Array, " B"],
        k: Float[Array, "B C J h"],
        v: Float[Array, "B C J v"],
    ) -> "KVCache":
        """Write C tokens of each row from slot start[b] on; start[b] + C must not pass the end."""

        def row(b, cache):
            at = (layer, b, start[b], 0, 0)
            new = (jax.lax.dynamic_slice_in_dim(a, b, 1)[None].astype(cache[0].dtype) for a in (k, v))
            return tuple(jax.lax.dynamic_update_slice(c, a, at) for c, a in zip(cache, new, strict=True))

        return KVCache(*jax.lax.fori_loop(0, k.shape[0], row, (self.k, self.v)))
