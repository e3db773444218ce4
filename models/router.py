"""The router: which experts a token goes to, and with what weights. All in float32.

softmax       softmax over all experts, then the k largest (Qwen, Mixtral, OLMoE)
topk_softmax  the k largest logits, then softmax over those (gpt-oss)
sigmoid       a sigmoid each; experts are chosen by score + correction bias among the groups whose two best sum
              highest, and weighted by the score alone (DeepSeek-V3)
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from rapidmoe_jax.config import ModelConfig
from rapidmoe_jax.models.blocks import Linear


class Router(Linear):
    """Logits of a linear layer, then the family's choice."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(cfg.width, cfg.num_experts, bias=cfg.router_bias, rngs=rngs)
        if cfg.correction_bias:
            self.correction_bias = nnx.Param(jnp.zeros(cfg.num_experts))
        self.cfg = cfg

    def route(self, x: Float[Array, "T D"]) -> tuple[Int32[Array, "T k"], Float[Array, "T k"]]:
        """Choose experts. Returns expert_ids, expert_weights."""
        cfg, logits = self.cfg, self(x.astype(jnp.float32))
        if cfg.router_score == "topk_softmax":
            top, ids = jax.lax.top_k(logits, cfg.top_k)
            return ids.astype(jnp.int32), jax.nn.softmax(top, axis=-1) * cfg.routed_scaling
        scores = jax.nn.sigmoid(logits) if cfg.router_score == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        preferred = scores + self.correction_bias[...].astype(jnp.float32) if cfg.correction_bias else scores
        _, ids = jax.lax.top_k(_keep_groups(preferred, cfg), cfg.top_k)
        weights = jnp.take_along_axis(scores, ids, -1)
        if cfg.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        return ids.astype(jnp.int32), weights * cfg.routed_scaling


def _keep_groups(preferred: Float[Array, "T E"], cfg: ModelConfig) -> Float[Array, "T E"]:
    """Set the experts of all but the best groups to -inf."""
    if cfg.num_groups == 1:
        return preferred
    grouped = preferred.reshape(preferred.shape[0], cfg.num_groups, -1)
    group_score = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
    _, kept = jax.lax.top_k(group_score, cfg.kept_groups)
    keeps = jax.nn.one_hot(kept, cfg.num_groups, dtype=bool).any(1)
    return jnp.where(keeps[..., None], grouped, -jnp.inf).reshape(preferred.shape)
