"""The jitted steps: prefill a chunk, decode one token a row, score a whole sequence. Pure, cache donated."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from rapidmoe_jax.cache import KVCache
from rapidmoe_jax.config import ModelConfig
from rapidmoe_jax.experts import FloatExperts, SplitExperts
from rapidmoe_jax.models.decoder import DecoderParams, decoder_logits, decoder_step
from rapidmoe_jax.moe import MoEStats, StepContext
from rapidmoe_jax.policy import Policy
from rapidmoe_jax.sampling import Sampling, sample_token

Experts = FloatExperts | SplitExperts


@partial(jax.jit, static_argnames=("cfg",), donate_argnames=("cache",))
def prefill_step(
    cfg: ModelConfig,
    params: DecoderParams,
    experts: Experts,
    cache: KVCache,
    tokens: Int32[Array, "B C"],
    start: Int32[Array, ""],
    lengths: Int32[Array, " B"],
    policy: Policy,
    weighted: Int32[Array, ""],
) -> tuple[Float[Array, "B V"], KVCache, MoEStats]:
    """Run one chunk of the prompts, slots start .. start + C of every row.

    Args:
      lengths: prompt length of each row; tokens beyond it are padding.
      weighted: how many of a prompt's last tokens the policy may correct by importance.
    Returns: logits after each row's last prompt token (of use only for rows that end in this chunk), cache, stats.
    """
    batch, count = tokens.shape
    position = start + jnp.arange(count)
    live = position < lengths[:, None]
    priority = (position >= lengths[:, None] - weighted) & live
    context = StepContext(live.reshape(-1), priority.reshape(-1).astype(jnp.float32), prefill=True)
    starts = jnp.full((batch,), start, jnp.int32)
    hidden, cache, stats = decoder_step(cfg, params, experts, cache, tokens, starts, policy, context)
    last = jnp.clip(lengths - 1 - start, 0, count - 1)
    return decoder_logits(params, hidden[jnp.arange(batch), last]), cache, stats


@partial(jax.jit, static_argnames=("cfg",), donate_argnames=("cache",))
def decode_step(
    cfg: ModelConfig,
    params: DecoderParams,
    experts: Experts,
    cache: KVCache,
    token: Int32[Array, " B"],
    position: Int32[Array, " B"],
    live: Bool[Array, " B"],
    policy: Policy,
    sampling: Sampling,
    count: Int32[Array, " B"],
) -> tuple[Int32[Array, " B"], KVCache, MoEStats]:
    """Run one token of each row and choose the next.

    Args:
      position: slot of each row's token.
      live: False for finished rows; they cost no expert work and their result means nothing.
      count: tokens each row has generated so far, for sampling.
    """
    context = StepContext(live, jnp.ones(live.shape, jnp.float32))
    hidden, cache, stats = decoder_step(cfg, params, experts, cache, token[:, None], position, policy, context)
    return sample_token(decoder_logits(params, hidden[:, 0]), sampling, count), cache, stats


first_token = jax.jit(sample_token)


@partial(jax.jit, static_argnames=("cfg",))
def score_step(
    cfg: ModelConfig, params: DecoderParams, experts: Experts, tokens: Int32[Array, " T"], policy: Policy
) -> tuple[Float[Array, "T V"], MoEStats]:
    """Give the logits of a whole sequence, each token a policy step of its own, as in decoding one by one."""
    count = tokens.shape[0]
    cache = KVCache.allocate(cfg, 1, count, params.embed.dtype)
    context = StepContext(jnp.ones(count, bool), jnp.ones(count, jnp.float32), per_token=True)
    start = jnp.zeros(1, jnp.int32)
    hidden, _, stats = decoder_step(cfg, params, experts, cache, tokens[None], start, policy, context)
    return decoder_logits(params, hidden[0]), stats._replace(units=stats.units.sum())


@jax.jit
def compare_logits(
    logits: Float[Array, "T V"], reference: Float[Array, "T V"], targets: Int32[Array, " T"]
) -> Shaped[Array, " 3"]:
    """Sum over tokens: negative log-likelihood of the targets, KL(reference || logits), top-1 agreement."""
    p, q = jax.nn.log_softmax(reference), jax.nn.log_softmax(logits)
    nll = -jnp.take_along_axis(q, targets[:, None], axis=1).sum()
    kl = (jnp.exp(p) * (p - q)).sum()
    return jnp.stack([nll, kl, (logits.argmax(-1) == reference.argmax(-1)).sum().astype(jnp.float32)])
