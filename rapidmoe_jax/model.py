"""The Python API: load() a model, generate text, look at logits, swap the policy."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Integer

from rapidmoe_jax import generate as generation
from rapidmoe_jax import steps
from rapidmoe_jax.checkpoint import read_json
from rapidmoe_jax.config import ModelConfig, SplitConfig
from rapidmoe_jax.controller import START, CostModel
from rapidmoe_jax.cost import cost_model
from rapidmoe_jax.demo import demo_split
from rapidmoe_jax.experts import SplitExperts
from rapidmoe_jax.generate import Generation, Piece
from rapidmoe_jax.host_kernels import set_threads
from rapidmoe_jax.loading import choose_executor, load_float, load_split
from rapidmoe_jax.models.decoder import DecoderParams
from rapidmoe_jax.policies import BudgetTime, NoCorrection, make_policy, needs_calibration, policy_name
from rapidmoe_jax.policy import Policy
from rapidmoe_jax.sampling import Sampling
from rapidmoe_jax.store import SplitCheckpoint
from rapidmoe_jax.text import TextCodec

DEFAULT_POLICY = "default"  # share=0.15 on a calibrated checkpoint, else fraction=0.15
CACHE_STEP = 256  # cache lengths are multiples of this, so that few shapes are compiled


class Model:
    """A loaded model. Made by load()."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        params: DecoderParams,
        experts: steps.Experts,
        policy: str | Policy | None,
        max_cache_len: int,
        prefill_tokens: int | None,
    ):
        self.folder, self.config, self.params, self.experts = folder, config, params, experts
        self._loaded = experts  # keeps the residual files mapped, whatever self.experts is replaced by
        self.max_cache_len = max_cache_len
        self.prefill_tokens = 2**31 - 1 if prefill_tokens is None else prefill_tokens
        self.cost, self.controller = CostModel(0.0, 0.0, 1.0), START
        self.policy = policy
        self._codec: TextCodec | None = None

    @property
    def policy(self) -> Policy:
        """The importance policy in use; assign a string, a policy object or a function to change it."""
        return self._policy

    @policy.setter
    def policy(self, value: str | Policy | None) -> None:
        policy = self.check_policy(value)
        if isinstance(policy, BudgetTime) and self.is_split:
            self.cost, self.controller = cost_model(self), START
            if float(policy.budget_us) < self.cost.step_us:
                warnings.warn(
                    f"budget_us={float(policy.budget_us):g} is less than a step takes on the base alone here "
                    f"({self.cost.step_us:.0f} us): nothing will be corrected; raise it",
                    stacklevel=2,
                )
        self._policy = policy

    def check_policy(self, value: str | Policy | None) -> Policy:
        """Make a policy of what a user wrote. Raises ValueError if it is none, or does not suit this checkpoint."""
        if isinstance(value, str) and value == DEFAULT_POLICY:
            value = "share=0.15" if self.is_calibrated else "fraction=0.15"
        policy = make_policy(value)
        if needs_calibration(policy) and self.is_split and not self.is_calibrated:
            raise ValueError(
                f"policy {policy_name(policy)}: {self.folder} was split without a calibration text, so importance has "
                "no unit; split it again with --calibration, or use fraction or budget_bytes"
            )
        return policy

    @property
    def is_calibrated(self) -> bool:
        """True if the split was made with a calibration text: importance is in nats, layers compare."""
        return isinstance(self.experts, SplitExperts) and bool(self.experts.calibration.calibrated)

    @property
    def is_split(self) -> bool:
        """True if the experts are a base with a residual, False for the float model."""
        return isinstance(self.experts, SplitExperts)

    @property
    def codec(self) -> TextCodec:
        """The tokenizer. Raises ValueError if the folder has none."""
        if self._codec is None:
            self._codec = TextCodec(self.folder, read_json(self.folder / "config.json"), self.config.vocab_size)
        return self._codec

    @property
    def record_bytes(self) -> int:
        """Host bytes a unit; 0 for the float model."""
        return self.experts.record_bytes if isinstance(self.experts, SplitExperts) else 0

    @property
    def max_step_bytes(self) -> int:
        """Host bytes that one token's decode step could read: all units of its routed experts."""
        c = self.config
        return self.record_bytes * c.num_moe_layers * c.top_k * c.expert_size

    @property
    def device_bytes(self) -> int:
        """Bytes of weights on the device: base or float experts, and everything that is not split."""
        experts = self.experts
        if isinstance(experts, SplitExperts):
            arrays: list[Any] = [experts.codes, experts.scale, experts.offset, experts.norms]
        else:
            arrays = [experts.weights]
        return sum(a.nbytes for a in [*jax.tree.leaves(self.params), *arrays])

    @property
    def host_bytes(self) -> int:
        """Bytes of the residual in host memory."""
        c = self.config
        return self.record_bytes * c.num_moe_layers * c.num_experts * c.expert_size

    def logits(self, token_ids: Sequence[int] | Integer[np.ndarray, " T"]) -> Float[np.ndarray, "T V"]:
        """Give float32 logits after each token of a sequence under the current policy.

        Every token is corrected as if it had been decoded one by one.
        Raises: ValueError if the sequence is empty, longer than max_cache_len, or has an unknown id.
        """
        ids = self._check_ids(token_ids, "logits")
        return np.asarray(steps.score_step(self.config, self.params, self.experts, ids, self.policy)[0])

    def _check_ids(self, token_ids: Sequence[int] | np.ndarray, where: str) -> np.ndarray:
        ids = np.asarray(token_ids, np.int64).reshape(-1)
        if ids.size == 0:
            raise ValueError(f"{where}: no tokens given; a sequence needs at least one")
        if ids.size > self.max_cache_len:
            raise ValueError(f"{where}: {ids.size} tokens, the cache holds {self.max_cache_len}; shorten the text or "
                             "load with a larger max_cache_len")  # fmt: skip
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise ValueError(f"{where}: token ids {ids.min()}..{ids.max()}, wanted 0..{self.config.vocab_size - 1}")
        return ids.astype(np.int32)

    def cache_len(self, rows: Sequence[Any], max_new_tokens: int) -> int:
        """Choose the cache's slots a row for a batch: enough for the longest, in steps of CACHE_STEP."""
        needed = max(row.length for row in rows) + max_new_tokens
        return min(-(-needed // CACHE_STEP) * CACHE_STEP, self.max_cache_len)

    # The overloads tell type checkers the result's type; the last signature has the options.
    @overload
    # pyrefly: ignore[inconsistent-overload]
    def generate(self, prompt: str | Sequence[int], *, stream: Literal[False] = ..., **options) -> Generation: ...
    @overload
    # pyrefly: ignore[inconsistent-overload]
    def generate(self, prompt: list, *, stream: Literal[False] = ..., **options) -> list[Generation]: ...
    @overload
    # pyrefly: ignore[inconsistent-overload]
    def generate(self, prompt: str | Sequence[Any], *, stream: Literal[True], **options) -> Iterator[Piece]: ...
    def generate(
        self,
        prompt: str | Sequence[Any],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        stream: bool = False,
        callback: Callable[[Piece], bool | None] | None = None,
    ) -> Generation | list[Generation] | Iterator[Piece]:
        """Continue one prompt or a batch of prompts.

        Args:
          prompt: text, a list of texts, token ids, or a list of token id lists.
          max_new_tokens: at most this many a prompt, >= 1.
          temperature: 0 = greedy.
          top_k: sample among the k most likely; 0 = all.
          top_p: sample among the most likely that reach this probability; 1 = all.
          seed: the same seed and batch give the same text.
          stop: text ends before any of these strings.
          stream: return an iterator of Piece instead of the results.
          callback: called with each Piece; return True to cancel.
        Returns: a Generation for one prompt, a list for a batch; with stream, an iterator of Piece.
        Raises: ValueError if a prompt is empty or does not fit the cache, or a number is out of range.
        """
        single = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int | np.integer))
        prompts = [prompt] if single else list(prompt)
        if not prompts:
            raise ValueError("generate: an empty list of prompts; give at least one")
        if max_new_tokens < 1:
            raise ValueError(f"generate: max_new_tokens={max_new_tokens}; use 1 or more")
        ids = [self.codec.encode(p) if isinstance(p, str) else p for p in prompts]
        checked = [self._check_ids(p, f"generate(prompt {i})").tolist() for i, p in enumerate(ids)]
        longest = max(map(len, checked))
        if longest + max_new_tokens > self.max_cache_len:
            raise ValueError(
                f"generate: a prompt of {longest} tokens and max_new_tokens={max_new_tokens} need "
                f"{longest + max_new_tokens} cache slots of {self.max_cache_len}; ask for at most "
                f"{max(self.max_cache_len - longest, 0)} new tokens, shorten the prompt or load with a larger "
                "max_cache_len"
            )
        events = generation.run(
            self,
            checked,
            max_new_tokens=max_new_tokens,
            sampling=Sampling.make(temperature, top_k, top_p, seed),
            stop=[stop] if isinstance(stop, str) else list(stop),
            callback=callback,
        )
        if stream:
            return (event for event in events if isinstance(event, Piece))
        results = next(event for event in events if isinstance(event, list))
        return results[0] if single else results


def load(
    model: str | Path,
    *,
    policy: str | Policy | None = DEFAULT_POLICY,
    executor: str | None = None,
    threads: int | None = None,
    dtype: str | None = None,
    exact: bool = False,
    max_cache_len: int | None = None,
    prefill_tokens: int | None = 16,
    verify: bool = False,
    base_bits: int | None = None,
    residual_bits: int | None = None,
) -> Model:
    """Load a model.

    Args:
      model: a split checkpoint (base and residual), a published folder (the float model, for reference), or "demo"
        (the model that ships with the package; split at first use and kept in the user's cache folder).
      policy: what policies.make_policy reads ("none", "all", "share=0.15", "budget_bytes=300KiB", "budget_us=5000",
        ...), a policy object or a function of a policy.LayerStep. Default: share=0.15 on a calibrated checkpoint, else
        fraction=0.15.
      executor: who corrects: "host", "callback", "reference", "off"; None = the best of this backend.
      threads: threads of the host kernels in this process; None = all cores it may use.
      dtype: of everything that is not split, "float32" or "bfloat16"; None = float32 on a CPU, else bfloat16.
      exact: float32 activations in the host kernels instead of int8: slower, for comparisons.
      max_cache_len: most tokens a row, prompt and text; None = what the checkpoint was made for.
      prefill_tokens: how many of a prompt's last tokens the policy corrects; None = all.
      verify: also compare the residual files' checksums.
      base_bits, residual_bits: of "demo" only; default 3 and 4.
    Raises: ValueError if the checkpoint is damaged or an argument is out of range.
    """
    if model == "demo":
        folder = demo_split(SplitConfig(base_bits=base_bits or 3, residual_bits=residual_bits or 4))
    elif base_bits is not None or residual_bits is not None:
        raise ValueError(f"base_bits and residual_bits belong to 'demo'; {model} has its own: see rapidmoe info")
    else:
        folder = Path(model)
    if policy != DEFAULT_POLICY:
        make_policy(policy)
    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r} is not supported; use 'float32' or 'bfloat16'")
    if prefill_tokens is not None and prefill_tokens < 0:
        raise ValueError(f"prefill_tokens={prefill_tokens} is out of range; use 0 or more, None = all")
    set_threads(threads)
    kind = jnp.dtype(dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    if SplitCheckpoint.is_one(folder):
        chosen = choose_executor(executor)
        cfg, params, experts = load_split(folder, kind, executor=chosen, exact=exact, verify=verify)
    else:
        cfg, params, experts = load_float(folder, kind)
        policy = NoCorrection()
    if max_cache_len is not None and not 1 <= max_cache_len <= cfg.max_positions:
        raise ValueError(f"max_cache_len={max_cache_len} is outside 1..{cfg.max_positions}, what {folder} was made for")
    return Model(folder, cfg, params, experts, policy, max_cache_len or cfg.max_positions, prefill_tokens)
