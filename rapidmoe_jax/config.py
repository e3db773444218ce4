"""What a model and its split are: frozen facts, checked once. Knows nothing of files or arrays."""

from dataclasses import dataclass

VERSION = "0.1.0"  # of the package; pyproject.toml reads it here
GROUP_SIZE = 64  # weights along D that share a scale; the packed layout (host_kernels/layout.h) is built on it
BASE_BITS = (2, 3, 4)
RESIDUAL_BITS = (2, 4)
ROPE_KINDS = ("default", "linear", "dynamic", "yarn")
ROUTER_SCORES = ("softmax", "topk_softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions of a head: base, rotated elements, and how the published checkpoint stretches them."""

    theta: float
    size: int  # rotated elements, the first of a head; even
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0  # stretch of the positions
    original_positions: int = 0  # what the unstretched frequencies were trained for
    beta_fast: float = 32.0  # yarn: rotations over original_positions above which a frequency stays
    beta_slow: float = 1.0  # yarn: rotations below which it is divided by factor
    truncate: bool = True  # yarn: bounds between the two are rounded outwards
    mscale: float = 0.0  # yarn (DeepSeek): cos and sin get mscale(this) / mscale(mscale_all_dim)
    mscale_all_dim: float = 0.0  # yarn (DeepSeek): latent attention multiplies scores by its mscale squared
    attention_factor: float = 0.0  # yarn: of cos and sin, as published; 0 = from the others


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2/V3): one compressed key and value a token for all heads."""

    query_rank: int  # of the queries' low-rank form; 0 = full
    rank: int  # kept a token for keys and values
    nope_size: int  # of a head's query and key, without positions
    rope_size: int  # of a head's query and of the one key with positions; kept a token
    value_size: int  # of a head's value


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
    rope: RopeConfig
    tie_embeddings: bool  # True: the head is the embedding
    max_positions: int  # longest sequence the checkpoint was made for
    # Attention
    qk_norm: str = ""  # of queries and keys: "head" = each head, "full" = the whole projection, "" = none
    qkv_bias: bool = False
    out_bias: bool = False
    clip_qkv: float = 0.0  # queries, keys and values are clipped to +-this; 0 = not
    windows: tuple[int, ...] = ()  # tokens each layer attends to, itself included, 0 = all; () = all, everywhere
    sinks: bool = False  # True: a learned logit a head joins each softmax
    latent: LatentConfig | None = None  # in place of grouped-query attention
    # Router and experts
    router_score: str = "softmax"  # one of ROUTER_SCORES
    router_bias: bool = False  # added to the router's logits
    correction_bias: bool = False  # added to the scores to choose experts, not to weigh them
    num_groups: int = 1  # of experts; the router keeps kept_groups of them
    kept_groups: int = 1
    routed_scaling: float = 1.0  # of the routing weights
    shared_size: int = 0  # hidden size of the expert that every token has; 0 = none
    shared_gate: bool = False  # True: it is weighted by a sigmoid of its own
    expert_bias: bool = False  # of the routed experts' three matrices
    swiglu_limit: float = 0.0  # 0: silu(u) v; else gpt-oss's clamped form
    expert_storage: str = "single"  # how published: "single" matrices, "fused" over experts, or fused "mxfp4"

    def __post_init__(self):
        where = f"ModelConfig({self.model_type})"
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{where}: {self.num_heads} heads do not divide over {self.num_kv_heads} kv heads")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"{where}: top_k={self.top_k} is outside 1..{self.num_experts} experts")
        if self.router_score not in ROUTER_SCORES or self.rope.kind not in ROPE_KINDS or self.rope.size % 2:
            raise ValueError(f"{where}: router {self.router_score!r} or {self.rope} is unknown")
        if self.num_experts % self.num_groups or not 1 <= self.kept_groups <= self.num_groups:
            raise ValueError(
                f"{where}: {self.kept_groups} of {self.num_groups} groups of {self.num_experts} experts are impossible"
            )
        if self.top_k > self.num_experts // self.num_groups * self.kept_groups:
            raise ValueError(f"{where}: top_k={self.top_k} is more than {self.kept_groups} groups have experts")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"{where}: {len(self.windows)} windows for {self.num_layers} layers")
        if len(self.moe_layers) != self.num_layers or not any(self.moe_layers):
            raise ValueError(f"{where}: {self.num_layers} layers, of which at least one must have experts, wanted")
        if self.width % GROUP_SIZE:
            raise ValueError(f"{where}: hidden size {self.width} is not a multiple of the group of {GROUP_SIZE}")

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return sum(self.moe_layers)

    @property
    def cache_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and elements a token and layer of the two caches: keys and values, or rotated key and latent."""
        if self.latent:
            return (1, self.latent.rope_size), (1, self.latent.rank)
        return ((self.num_kv_heads, self.head_dim),) * 2

    @property
    def cache_elements(self) -> int:
        """Cached numbers a token, all layers."""
        return self.num_layers * sum(heads * size for heads, size in self.cache_shapes)


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
