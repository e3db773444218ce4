"""The decoder all families share: embedding, layers, final norm, head.

Layers are NNX modules, defined one by one and stored stacked: a run of equal layers is one scan over their stacked
parameters. The step is a pure function of (parameters, experts, cache, tokens), for jax.jit.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from rapidmoe_jax.cache import KVCache
from rapidmoe_jax.config import ModelConfig
from rapidmoe_jax.experts import FloatExperts, SplitExperts
from rapidmoe_jax.models.attention import Attention, LatentAttention, Positions
from rapidmoe_jax.models.blocks import MLP, Linear, RMSNorm, rms_norm
from rapidmoe_jax.models.rope import rope_table
from rapidmoe_jax.models.router import Router
from rapidmoe_jax.moe import MoEStats, StepContext, moe_layer
from rapidmoe_jax.policy import Policy


class MoE(nnx.Module):
    """Router, shared expert and biases. The routed experts' weights come in with the call: no parameters of a layer."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        self.router = Router(cfg, rngs=rngs)
        if cfg.shared_size:
            self.shared = MLP(cfg.width, cfg.shared_size, rngs=rngs)
        if cfg.shared_gate:
            self.shared_gate = Linear(cfg.width, 1, rngs=rngs)
        if cfg.expert_bias:
            self.gate_up_bias = nnx.Param(jnp.zeros((cfg.num_experts, cfg.expert_size, 2)))
            self.down_bias = nnx.Param(jnp.zeros((cfg.num_experts, cfg.width)))
        self.cfg = cfg

    def rest(
        self, x: Float[Array, "T D"], expert_ids: Int32[Array, "T k"], expert_weights: Float[Array, "T k"]
    ) -> Float[Array, "T D"] | float:
        """Give what the block adds besides the routed experts' matrices: shared expert, biases of the last matrix."""
        total: Any = 0.0
        if self.cfg.shared_size:
            total = self.shared(x)
        if self.cfg.shared_gate:
            total *= jax.nn.sigmoid(self.shared_gate(x))
        if self.cfg.expert_bias:
            bias = self.down_bias[...][expert_ids].astype(jnp.float32)
            total += jnp.einsum("tk,tkd->td", expert_weights, bias).astype(x.dtype)
        return total


class RoutedTokens(NamedTuple):
    """A layer's T tokens on their way to the routed experts."""

    stream: Float[Array, "T D"]  # what the experts' results are added to
    x: Float[Array, "T D"]  # the experts' input
    stream_square: Float[Array, " T"]  # |x_t|^2 of the stream entering the block
    expert_ids: Int32[Array, "T k"]
    expert_weights: Float[Array, "T k"]


class DecoderLayer(nnx.Module):
    """Attention and MLP or experts, each on the normed stream and added to it."""

    def __init__(self, cfg: ModelConfig, *, moe: bool, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(cfg.width, cfg.rms_norm_eps)
        self.attn = (LatentAttention if cfg.latent else Attention)(cfg, rngs=rngs)
        self.mlp_norm = RMSNorm(cfg.width, cfg.rms_norm_eps)
        self.mlp = MoE(cfg, rngs=rngs) if moe else MLP(cfg.width, cfg.mlp_size, rngs=rngs)

    def attend(
        self,
        stream: Float[Array, "B C D"],
        at: Positions,
        window: Int32[Array, ""] | None,
        cache: KVCache,
        layer: Int32[Array, ""],
    ) -> tuple[Float[Array, "B C D"], KVCache]:
        """Run the layer's first half. layer counts all layers."""
        with jax.named_scope("attention"):
            mixed, cache = self.attn(self.attn_norm(stream), at, cache, layer, window)
        return stream + mixed, cache

    def dense(self, stream: Float[Array, "B C D"]) -> Float[Array, "B C D"]:
        """Run the second half of a layer without experts."""
        return stream + self.mlp(self.mlp_norm(stream))

    def route(self, stream: Float[Array, "B C D"]) -> RoutedTokens:
        """Begin the second half of a layer with experts, T = B * C tokens."""
        assert isinstance(self.mlp, MoE)
        flat = stream.reshape(-1, stream.shape[-1])
        x = self.mlp_norm(flat)
        square = jnp.square(flat.astype(jnp.float32)).sum(-1)
        ids, weights = self.mlp.router.route(x)
        return RoutedTokens(flat + self.mlp.rest(x, ids, weights), x, square, ids, weights)

    def __call__(
        self,
        stream: Float[Array, "B C D"],
        step: "Step",
        cache: KVCache,
        layer: Int32[Array, ""],
        moe: Int32[Array, ""],
        spent: Int32[Array, "*T"],
    ) -> tuple[Float[Array, "B C D"], KVCache, MoEStats]:
        """Run one layer. layer counts all layers, moe those with experts; spent: see moe_layer."""
        window = None if step.windows is None else step.windows[layer]
        stream, cache = self.attend(stream, step.at, window, cache, layer)
        if isinstance(self.mlp, MLP):
            return self.dense(stream), cache, step.context.no_stats()
        with jax.named_scope("experts"):
            t = self.route(stream)
            bias = self.mlp.gate_up_bias[...] if self.mlp.cfg.expert_bias else None
            y, stats = moe_layer(*t[1:], moe, step.experts, step.policy, step.context, spent, bias)
        return (t.stream + y.astype(stream.dtype)).reshape(stream.shape), cache, stats


@dataclass(frozen=True)
class Step:
    """What is the same for all layers of a step."""

    at: Positions
    windows: Int32[Array, " L"] | None
    experts: FloatExperts | SplitExperts
    policy: Policy
    context: StepContext


@partial(jax.tree_util.register_dataclass, data_fields=["embed", "norm", "head", "runs"], meta_fields=[])
@dataclass(frozen=True)
class DecoderParams:
    """Parameters of a decoder but its routed experts, as a pytree."""

    embed: Float[Array, "V D"]
    norm: Float[Array, " D"]
    head: Float[Array, "V D"] | None  # None: tied to the embedding
    runs: list[Any]  # one stacked NNX state a run of equal layers


def layer_runs(cfg: ModelConfig) -> list[tuple[bool, int, int]]:
    """Group layers in runs of one kind: (has experts, first layer, number of layers)."""
    runs: list[tuple[bool, int, int]] = []
    for layer, moe in enumerate(cfg.moe_layers):
        if runs and runs[-1][0] == moe:
            runs[-1] = (moe, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((moe, layer, 1))
    return runs


def abstract_layer(cfg: ModelConfig, *, moe: bool) -> tuple[Any, Any]:
    """Give (graphdef, abstract state) of a layer without making its arrays."""
    return nnx.split(nnx.eval_shape(lambda: DecoderLayer(cfg, moe=moe, rngs=nnx.Rngs(0))))


def fill_state(state: Any, arrays: dict[str, Any]) -> Any:
    """Put arrays, by our path, into a layer's (stacked) state."""
    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state([(path, leaf.replace(arrays[".".join(map(str, path))])) for path, leaf in flat])


def decoder_step(
    cfg: ModelConfig,
    params: DecoderParams,
    experts: FloatExperts | SplitExperts,
    cache: KVCache,
    tokens: Int32[Array, "B C"],
    start: Int32[Array, " B"],
    policy: Policy,
    context: StepContext,
) -> tuple[Float[Array, "B C D"], KVCache, MoEStats]:
    """Run C new tokens of each row through all layers.

    Args:
      cfg: static.
      start: slot of each row's first new token; start[b] + C must not pass the cache's end.
      context: live and priority are [B * C], row by row.
    Returns: the normed stream after the last layer, the cache with the new tokens, what the residual did.
    """
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    lengths = jnp.where(context.live.reshape(tokens.shape), positions + 1, 0).max(-1)
    at = Positions(start, *rope_table(positions, cfg.rope, lengths))
    windows = jnp.asarray(cfg.windows, jnp.int32) if cfg.windows else None
    step = Step(at, windows, experts, policy, context)
    stream = params.embed[tokens]
    stats = context.no_stats()
    for (moe, first, count), state in zip(layer_runs(cfg), params.runs, strict=True):
        graphdef, _ = abstract_layer(cfg, moe=moe)
        before = sum(cfg.moe_layers[:first])

        def body(carry, layer_state, graphdef=graphdef, first=first, before=before):
            stream, cache, stats, i = carry
            layer = nnx.merge(graphdef, layer_state)
            stream, cache, new = layer(stream, step, cache, first + i, before + i, stats.units)
            return (stream, cache, MoEStats(*(a + b for a, b in zip(stats, new, strict=True))), i + 1), None

        (stream, cache, stats, _), _ = jax.lax.scan(body, (stream, cache, stats, jnp.int32(0)), state, length=count)
    return rms_norm(stream, params.norm, cfg.rms_norm_eps), cache, stats


def decoder_logits(params: DecoderParams, hidden: Float[Array, "*N D"]) -> Float[Array, "*N V"]:
    """Apply the head: float32 logits."""
    head = params.embed if params.head is None else params.head
    return jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)
