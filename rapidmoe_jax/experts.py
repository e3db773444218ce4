"""The routed experts of all layers as the model holds them: float, or split into base and residual.

Both are pytrees that a jitted step takes as an argument. Arrays carry a leading axis L over the layers with experts.
"""

from dataclasses import dataclass
from functools import partial

import jax
from jaxtyping import Array, Bool, Float, Float16, UInt8, UInt16

EXECUTORS = ("host", "callback", "reference", "off")


@partial(jax.tree_util.register_dataclass, data_fields=["weights"], meta_fields=[])
@dataclass(frozen=True)
class FloatExperts:
    """Unsplit experts: the reference for quality."""

    weights: Float[Array, "L E 3 F D"]  # gate_proj, up_proj, down_proj transposed to one row a unit

    @property
    def num_experts(self) -> int:
        """E."""
        return self.weights.shape[1]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scale", "offset", "norms", "layer_weight", "calibrated", "records"],
    meta_fields=["base_bits", "residual_bits", "record_bytes", "store", "executor", "base_kernel", "exact"],
)
@dataclass(frozen=True, kw_only=True)
class SplitExperts:
    """Base on the device; residual behind a store handle (or, for the reference executor, in `records`)."""

    codes: UInt8[Array, "L E 3 F P"]
    scale: Float16[Array, "L E 3 F G"]
    offset: Float16[Array, "L E 3 F G"]
    norms: UInt16[Array, "L E F 4"]  # bits of bfloat16: |R1|^2, |R3|^2, |R2|^2, |B2|^2
    layer_weight: Float[Array, " L"]  # lambda
    calibrated: Bool[Array, ""]
    records: UInt8[Array, "L E F R"] | None
    base_bits: int
    residual_bits: int
    record_bytes: int
    store: int  # handle from SplitCheckpoint.open_residual; -1 = not opened
    executor: str  # one of EXECUTORS
    base_kernel: str  # "host": C++ on the CPU backend; "reference": plain XLA
    exact: bool  # True: float32 activations in the host kernels; False: int8

    @property
    def num_experts(self) -> int:
        """E."""
        return self.codes.shape[1]
