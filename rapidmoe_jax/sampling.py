"""Choose the next token from logits, inside the jitted step."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from rapidmoe_jax.policy import largest_mask


@partial(
    jax.tree_util.register_dataclass, data_fields=["temperature", "top_k", "top_p", "seed"], meta_fields=["greedy"]
)
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample; all but greedy are traced, so that other values compile nothing."""

    greedy: bool  # static: True takes the largest logit and reads nothing else
    temperature: float | Shaped[Array, ""] = 1.0  # > 0
    top_k: int | Shaped[Array, ""] = 0  # keep the k largest; 0 = all
    top_p: float | Shaped[Array, ""] = 1.0  # keep the smallest set of at least this probability; 1 = all
    seed: int | Shaped[Array, ""] = 0

    @staticmethod
    def make(temperature: float, top_k: int, top_p: float, seed: int) -> "Sampling":
        """Check a user's numbers. temperature 0 = greedy.

        Raises: ValueError naming the value out of range.
        """
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature={temperature} is out of range; use 0 (greedy) or more")
        if top_k < 0:
            raise ValueError(f"top_k={top_k} is out of range; use 0 (all) or more")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p={top_p} is out of range; use a probability above 0, at most 1")
        if not 0 <= seed < 2**31:
            raise ValueError(f"seed={seed} is out of range; use 0..2147483647")
        greedy = temperature == 0
        return Sampling(greedy=greedy, temperature=temperature or 1.0, top_k=top_k, top_p=top_p, seed=seed)


def sample_token(logits: Float[Array, "B V"], sampling: Sampling, count: Int32[Array, " B"]) -> Int32[Array, " B"]:
    """Choose a token for each row.

    Args:
      count: tokens each row has generated so far. A row's draw depends on (seed, row, count) alone, so a seed repeats
        exactly; equal largest logits give the lower id.
    """
    if sampling.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scaled = logits.astype(jnp.float32) / sampling.temperature
    keep = jnp.where(sampling.top_k > 0, sampling.top_k, logits.shape[-1])
    scaled = jnp.where(jax.vmap(largest_mask, in_axes=(0, None))(scaled, keep), scaled, -jnp.inf)
    scaled = jnp.where(
        jax.vmap(nucleus_mask, in_axes=(0, None))(jax.nn.softmax(scaled), sampling.top_p), scaled, -jnp.inf
    )

    def draw(row_logits, row, step):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(sampling.seed), row), step)
        return jax.random.categorical(key, row_logits)

    rows = jnp.arange(logits.shape[0])
    return jax.vmap(draw)(scaled, rows, count).astype(jnp.int32)


def nucleus_mask(probability: Float[Array, " V"], top_p: Float[Array, ""] | float) -> Bool[Array, " V"]:
    """Mark the most probable values that together reach top_p; equal ones are kept or cut together.

    Finds the threshold by bisection over float bit patterns: no sort of the vocabulary.
    """
    order = jax.lax.bitcast_convert_type(probability, jnp.int32)  # probabilities are >= 0: int order = float order

    def halve(_, bounds):  # invariant: values >= low reach top_p, values >= high do not
        low, high = bounds
        middle = low + (high - low) // 2
        enough = jnp.where(order >= middle, probability, 0).sum() >= top_p
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    threshold, _ = jax.lax.fori_loop(0, 31, halve, (jnp.int32(0), jnp.int32(0x3F800001)))
    return (order >= threshold) | (jnp.asarray(top_p) >= 1)
