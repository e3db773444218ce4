"""The experts' gated activation and its slopes, for numpy and JAX arrays.

limit = 0:  h = silu(u) v
limit > 0:  h = a sigmoid(1.702 a) (b + 1),  a = min(u, limit),  b = clip(v, -limit, limit)      (gpt-oss)
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CLAMPED_ALPHA = 1.702  # slope of the sigmoid in the clamped form


def _sigmoid(u: Any, xp: Any) -> Any:
    return 0.5 * (np.tanh(0.5 * u) + 1) if xp is np else jax.nn.sigmoid(u)


def gated(u: Any, v: Any, limit: float) -> Any:
    """Give h of gate u and up v, arrays of one shape.

    Args:
      limit: 0 = silu(u) v, else the clamped form's limit.
    """
    return gated_slopes(u, v, limit)[0]


def gated_slopes(u: Any, v: Any, limit: float) -> tuple[Any, Any, Any]:
    """Give h, dh/du and dh/dv."""
    xp: Any = np if isinstance(u, np.ndarray) else jnp
    if not limit:
        sigmoid = _sigmoid(u, xp)
        value = u * sigmoid
        return value * v, sigmoid * (1 + u * (1 - sigmoid)) * v, value
    a, b = xp.minimum(u, limit), xp.clip(v, -limit, limit) + 1
    sigmoid = _sigmoid(CLAMPED_ALPHA * a, xp)
    value = a * sigmoid
    slope = sigmoid * (1 + CLAMPED_ALPHA * a * (1 - sigmoid))
    return value * b, xp.where(u < limit, slope * b, 0), xp.where(abs(v) < limit, value, 0)
