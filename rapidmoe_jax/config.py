"""What a model and its split are: frozen facts, checked once. Knows nothing of files or arrays."""

from dataclasses import dataclass

VERSION = "0.1.0"  # of the package; pyproject.toml reads it here
GROUP_SIZE = 64  # weights along D that share a scale; the packed layout (host_kernels/layout.h) is built on it
BASE_BITS = (2, 3, 4)
RESIDUAL_BITS = (2, 4)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder with mixture-of-experts layers; sizes are counts of elements."""

    model_type: str  # published family name, e.g. "qwen3_moe"
    vocab_size: int  # V
    width: int  # D, the model's hidden size
    num_layers: int
    num_heads: int  # H query heads
    num_kv_heads: int  # J key/value heads; divides num_heads
    head_dim: int  # h, read from the checkpoint, not derived
    mlp_size: int  # hidden size of the layers without experts
    expert_size: int  # F, hidden units of one expert
    num_experts: int  # E
    top_k: int  # k, experts a token
    norm_topk_prob: bool  # True: the k routing weights of a token are scaled to sum to 1
    moe_layers: tuple[bool, ...]  # True where the layer has experts
    rms_norm_eps: float
    rope_theta: float
    tie_embeddings: bool  # True: the head is the embedding
    max_positions: int  # longest sequence the checkpoint was made for

    def __post_init__(self):
        where = f"ModelConfig({self.model_type})"
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{where}: {self.num_heads} heads do not divide over {self.num_kv_heads} kv heads")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"{where}: top_k={self.top_k} is outside 1..{self.num_experts} experts")
        if len(self.moe_layers) != self.num_layers or not any(self.moe_layers):
            raise ValueError(f"{where}: {self.num_layers} layers, of which at least one must have experts, wanted")
        if self.width % GROUP_SIZE:
            raise ValueError(f"{where}: hidden size {self.width} is not a multiple of the group of {GROUP_SIZE}")

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return sum(self.moe_layers)


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """Bits of a split. One layout for all: groups of GROUP_SIZE along D, a half scale each."""

    base_bits: int = 3  # 2, 3 or 4, on the device
    residual_bits: int = 4  # 2 or 4, in host memory

    def __post_init__(self):
        if self.base_bits not in BASE_BITS:
            raise ValueError(f"base_bits={self.base_bits} is not supported; use one of {BASE_BITS}")
        if self.residual_bits not in RESIDUAL_BITS:
            raise ValueError(f"residual_bits={self.residual_bits} is not supported; use one of {RESIDUAL_BITS}")
