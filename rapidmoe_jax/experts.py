"""The routed experts of all layers as the model holds them: float, or split into base and residual.

Both are pytrees that a jitted step takes as an argument. Arrays carry a leading axis L over the layers with experts.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float16, UInt8, UInt16

EXECUTORS = ("host", "callback", "reference", "off")


class Calibration(NamedTuple):
    """What calibration says of the L layers; leaves are arrays (shapes in comments: JAX puts other things there too).

    With `calibrated`, importance is in nats. K thresholds on it, 2^log2_tau, rise; R taus of the paper's rule rise.
    """

    calibrated: Any  # [] bool, True: lambda was measured against errors divided by |x_t|^2
    layer_weight: Any  # [L] lambda
    alpha: Any  # [L] factor of the paper's rule, mean 1
    log2_tau: Any  # [K]
    later_units: Any  # [L, K] units a token at or above the threshold, in layer l and those after it
    left: Any  # [K] importance a token below the threshold, all layers together
    rank_tau: Any  # [R]
    rank_decode: Any  # [R] share of the routed experts that the rule corrects, in decode
    rank_prefill: Any  # [R]

    @staticmethod
    def none(layers: int) -> "Calibration":
        """Give that of a split without a calibration text: lambda 1, importance in no unit."""
        ones, zeros = jnp.ones(layers), jnp.zeros(2)
        return Calibration(jnp.asarray(False), ones, ones, zeros, jnp.zeros((layers, 2)), *(zeros,) * 4)

    @staticmethod
    def of(record: dict[str, Any]) -> "Calibration":
        """Read a checkpoint's calibration record (damage.summary)."""
        weight, units = np.array(record["lambda"]), np.array(record["units"])  # [L], [L, bins]
        edges = record["log2_first"] + record["log2_step"] * np.arange(units.shape[1] + 1)
        above = np.concatenate([units[:, ::-1].cumsum(1)[:, ::-1], np.zeros((len(units), 1))], 1)  # by lower edge
        shift = np.log2(weight)
        log2_tau = np.arange(edges[0] + shift.min(), edges[-1] + shift.max(), record["log2_step"])
        layer_units = np.stack([np.interp(log2_tau, edges + s, a) for s, a in zip(shift, above, strict=True)])
        between = np.append(-np.diff(layer_units.sum(0)), 0)
        below = np.cumsum(between * np.exp2(log2_tau + record["log2_step"] / 2))
        rank = {name: np.array(value) for name, value in record["rank"].items()}
        arrays = (weight, rank["alpha"], log2_tau, layer_units[::-1].cumsum(0)[::-1], np.append(0, below[:-1]),
                  rank["tau"], rank["decode"], rank["prefill"])  # fmt: skip
        return Calibration(jnp.asarray(True), *(jnp.asarray(a, jnp.float32) for a in arrays))


@partial(jax.tree_util.register_dataclass, data_fields=["weights"], meta_fields=["swiglu_limit"])
@dataclass(frozen=True)
class FloatExperts:
    """Unsplit experts: the reference for quality."""

    weights: Float[Array, "L E 3 F D"]  # gate_proj, up_proj, down_proj transposed to one row a unit
    swiglu_limit: float = 0.0  # activation.py

    @property
    def num_experts(self) -> int:
        """E."""
        return self.weights.shape[1]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scale", "offset", "norms", "calibration", "records"],
    meta_fields=[
        "base_bits",
        "residual_bits",
        "record_bytes",
        "store",
        "executor",
        "base_kernel",
        "exact",
        "swiglu_limit",
    ],
)
@dataclass(frozen=True, kw_only=True)
class SplitExperts:
    """Base on the device; residual behind a store handle (or, for the reference executor, in `records`)."""

    codes: UInt8[Array, "L E 3 F P"]
    scale: Float16[Array, "L E 3 F G"]
    offset: Float16[Array, "L E 3 F G"]
    norms: UInt16[Array, "L E F 4"]  # bits of bfloat16: |R1|^2, |R3|^2, |R2|^2, |B2|^2
    calibration: Calibration
    records: UInt8[Array, "L E F R"] | None
    base_bits: int
    residual_bits: int
    record_bytes: int
    store: int  # handle from SplitCheckpoint.open_residual; -1 = not opened
    executor: str  # one of EXECUTORS
    base_kernel: str  # "host": C++ on the CPU backend; "reference": plain XLA
    exact: bool  # True: float32 activations in the host kernels; False: int8
    swiglu_limit: float = 0.0  # activation.py

    @property
    def num_experts(self) -> int:
        """E."""
        return self.codes.shape[1]
