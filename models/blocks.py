"""Blocks that families share: norm, linear, gated MLP.

Modules are Flax NNX; matrices are kept as published, [out, in].
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


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
    """y = x W^T (+ bias)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (outputs, inputs)) * inputs**-0.5)
        if bias:
            self.bias = nnx.Param(jnp.zeros(outputs))

    def __call__(self, x: Float[Array, "*N I"]) -> Float[Array, "*N O"]:
        """Multiply the last axis."""
        y = jnp.einsum("...i,oi->...o", x, self.weight[...].astype(x.dtype))
        return y + self.bias[...].astype(x.dtype) if hasattr(self, "bias") else y


class MLP(nnx.Module):
    """Gated MLP of `size` hidden units: down(silu(gate x) * up x)."""

    def __init__(self, width: int, size: int, *, rngs: nnx.Rngs):
        self.gate_proj = Linear(width, size, rngs=rngs)
        self.up_proj = Linear(width, size, rngs=rngs)
        self.down_proj = Linear(size, width, rngs=rngs)

    def __call__(self, x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        """Run the MLP."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
