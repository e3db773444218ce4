"""What a calibration text shows of each layer: what its experts see, and how much an error there hurts the output.

The float model runs over the text layer by layer with one layer in memory: forward while the layers are split, then
some windows of it back again. The gradient is that of the log-likelihood of tokens drawn from the model's own
prediction, so that for a small error d of a layer's output 1/2 E[(gradient . d)^2] is the KL of the final prediction
(Fisher information; the streams and errors wait on disk).
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from rapidmoe_jax.activation import gated_slopes
from rapidmoe_jax.cache import KVCache
from rapidmoe_jax.checkpoint import Checkpoint
from rapidmoe_jax.config import ModelConfig
from rapidmoe_jax.models.attention import Positions
from rapidmoe_jax.models.blocks import rms_norm
from rapidmoe_jax.models.decoder import abstract_layer, fill_state
from rapidmoe_jax.models.rope import rope_table
from rapidmoe_jax.source import read_dense
from rapidmoe_jax.text import TextCodec

WINDOW = 512  # tokens that attend to each other
PROBE_WINDOWS = 16  # windows that also go back, spread over the text
MIN_TOKENS = 256


class LayerText(NamedTuple):
    """One layer with experts over the N tokens of the text, seen by the float model."""

    stream: Float[np.ndarray, "N D"]  # after attention; the experts' results are added to it
    x: Float[np.ndarray, "N D"]  # the experts' input
    stream_square: Float[np.ndarray, " N"]  # |x_t|^2 of the stream entering the block
    expert_ids: Int32[np.ndarray, "N k"]
    expert_weights: Float[np.ndarray, "N k"]
    probe: Bool[np.ndarray, " N"]  # True: a token of the windows that go back
    bias: Float[np.ndarray, "E F 2"] | None = None  # of gate and up
    swiglu_limit: float = 0.0  # activation.py

    def hidden(
        self, expert: int, x: Float[np.ndarray, "n D"], w: Float[np.ndarray, "m F D"]
    ) -> tuple[Float[np.ndarray, "n F"], Float[np.ndarray, "n F"], Float[np.ndarray, "n F"]]:
        """Run an expert's gate and up (m >= 2 of its matrices) on n tokens. Returns h, dh/du, dh/dv."""
        shift = np.zeros((1, 2), np.float32) if self.bias is None else self.bias[expert]
        return gated_slopes(x @ w[0].T + shift[:, 0], x @ w[1].T + shift[:, 1], self.swiglu_limit)


def read_calibration(
    value: str | Path | Sequence[int] | np.ndarray, source: Path, config: dict[str, Any], vocab_size: int
) -> Int32[np.ndarray, " N"]:
    """Give a calibration text as token ids.

    Args:
      value: the ids, or a file: .npy, a JSON list, or text that the source's tokenizer encodes.
    Raises: ValueError if it cannot be read, or has ids the model lacks.
    """
    path = Path(value) if isinstance(value, str | Path) else None
    if path is None:
        ids = np.asarray(value)
    elif path.suffix in (".npy", ".json"):
        ids = read_tokens(path)
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ValueError(f"{path}: cannot be read as text ({e}); use UTF-8 text, .npy or a JSON list") from None
        ids = np.array(TextCodec(source, config, vocab_size).encode(text), np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        where = path or "calibration"
        raise ValueError(f"{where}: token ids {ids.min()}..{ids.max()}, the model has 0..{vocab_size - 1}")
    return ids.astype(np.int32)


def read_tokens(path: str | Path) -> np.ndarray:
    """Read token ids from a .npy file or a JSON list. Raises ValueError if it is neither."""
    path = Path(path)
    try:
        ids = np.load(path) if path.suffix == ".npy" else np.array(json.loads(path.read_text()))
    except (OSError, ValueError) as e:
        raise ValueError(f"{path}: cannot be read as token ids ({e}); use a .npy array or a JSON list") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{path}: holds {ids.dtype} of shape {list(ids.shape)}, wanted a list of integers")
    return ids


def _window(cfg: ModelConfig, layer: int) -> Int32[Array, ""] | None:
    return jnp.int32(cfg.windows[layer]) if cfg.windows else None


@partial(jax.jit, static_argnames=("cfg", "moe"))
def _front(cfg: ModelConfig, moe: bool, state: Any, window: Any, stream: Float[Array, "T D"]) -> Any:
    """Run a layer up to its experts: (stream, experts' input, weights), (|x_t|^2, ids); a dense layer whole."""
    graphdef, _ = abstract_layer(cfg, moe=moe)
    layer = nnx.merge(graphdef, state)
    count = stream.shape[0]
    cache = KVCache(*(jnp.zeros((1, 1, count, *shape)) for shape in cfg.cache_shapes))
    at = Positions(jnp.zeros(1, jnp.int32), *rope_table(jnp.arange(count)[None], cfg.rope))
    mixed, _ = layer.attend(stream[None], at, window, cache, jnp.int32(0))
    if not moe:
        return (layer.dense(mixed)[0],), ()
    t = layer.route(mixed)
    return (t.stream, t.x, t.expert_weights), (t.stream_square, t.expert_ids)


@partial(jax.jit, static_argnames=("cfg", "moe"))
def _front_back(
    cfg: ModelConfig, moe: bool, state: Any, window: Any, stream: Float[Array, "T D"], gradients: Any
) -> Any:
    _, pull, _ = jax.vjp(lambda s: _front(cfg, moe, state, window, s), stream, has_aux=True)
    return pull(gradients)[0]


@partial(jax.jit, static_argnames=("eps",))
def _head_back(norm: Array, head: Array, eps: float, stream: Float[Array, "T D"], key: Array) -> Float[Array, "T D"]:
    """Draw a token from each prediction; give the gradient of their log-likelihood with respect to the stream."""

    def logits(s):
        return jnp.einsum("td,vd->tv", rms_norm(s, norm, eps), head, preferred_element_type=jnp.float32)

    drawn = jax.random.categorical(key, logits(stream))

    def likelihood(s):
        return jnp.take_along_axis(jax.nn.log_softmax(logits(s)), drawn[:, None], 1).sum()

    return jax.grad(likelihood)(stream)


class TextRun:
    """A calibration text on its way through a published checkpoint, its state in `folder`."""

    def __init__(self, checkpoint: Checkpoint, fam: Any, cfg: ModelConfig, tokens: np.ndarray, folder: Path):
        self.checkpoint, self.fam, self.cfg, self.folder = checkpoint, fam, cfg, folder
        window = min(WINDOW, cfg.max_positions, len(tokens))
        if window < min(MIN_TOKENS, cfg.max_positions):
            raise ValueError(f"a calibration text of {len(tokens)} tokens is too short; give {MIN_TOKENS} or more, "
                             "better tens of thousands")  # fmt: skip
        self.tokens = tokens[: len(tokens) // window * window].reshape(-1, window).astype(np.int32)
        count = len(self.tokens)
        self.probes = np.unique(np.linspace(0, count - 1, min(PROBE_WINDOWS, count)).round().astype(int))

    def begin(self) -> None:
        """Save the stream that enters the first layer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not any(self.folder.glob("stream_*.npy")):
            self._save("stream", 0, self._globals()["embed"].astype(np.float32)[self.tokens])

    def enter(self, layer: int) -> LayerText | None:
        """Run a layer up to its experts. A layer without experts runs whole, None is returned."""
        if layer:  # that layer's report is written by now
            self._file("stream", layer - 1).unlink(missing_ok=True)
        stream = np.load(self._file("stream", layer))
        self._save("probe", layer, stream[self.probes])
        moe, state = self.cfg.moe_layers[layer], self._state(layer)
        window = _window(self.cfg, layer)
        fronts = [jax.tree.map(np.asarray, _front(self.cfg, moe, state, window, s)) for s in stream]
        outputs, facts = jax.tree.map(lambda *a: np.concatenate(a), *fronts)
        if not moe:
            self._save("stream", layer + 1, outputs[0].reshape(stream.shape))
            return None
        probe = np.zeros(stream.shape[:2], bool)
        probe[self.probes] = True
        stream, x, weights = outputs
        square, ids = facts
        return LayerText(stream, x, square, ids, weights, probe.reshape(-1), self._bias(layer), self.cfg.swiglu_limit)

    def leave(self, layer: int, text: LayerText, result: Float[np.ndarray, "N D"], error: Float[np.ndarray, "N D"]):
        """Go on to the next layer with the experts' result; keep the base's error of the probed tokens."""
        self._save("error", layer, error[text.probe])
        self._save("routing", layer, -np.sort(-text.expert_weights[text.probe], axis=1))
        self._save("stream", layer + 1, (text.stream + result).reshape(*self.tokens.shape, -1))

    def back(self, layer: int) -> float:
        """Take the gradient from a layer's output to its input, last layer first.

        Returns: the sum over the probed tokens of the KL that the base's error of this layer alone predicts, in nats.
        """
        moe, state, window = self.cfg.moe_layers[layer], self._state(layer), _window(self.cfg, layer)
        stream = np.load(self._file("probe", layer))
        gradient = self._gradient(layer + 1)
        shape, damage = stream.shape, 0.0
        parts: list[np.ndarray] = [gradient]
        if moe:
            flat = gradient.reshape(-1, self.cfg.width)
            damage = float(np.square((flat * np.load(self._file("error", layer))).sum(-1)).sum() / 2)
            fronts = [jax.tree.map(np.asarray, _front(self.cfg, moe, state, window, s)) for s in stream]
            (after, x, weights), (square, ids) = jax.tree.map(lambda *a: np.concatenate(a), *fronts)
            text = LayerText(
                after, x, square, ids, weights, np.ones(len(x), bool), self._bias(layer), self.cfg.swiglu_limit
            )
            dx, dw = self._experts_back(layer, text, flat)
            parts += [dx.reshape(shape), dw.reshape(*shape[:2], -1)]
        each = [_front_back(self.cfg, moe, state, window, s, tuple(g)) for s, *g in zip(stream, *parts, strict=True)]
        self._save("gradient", layer, np.stack([np.asarray(g) for g in each]))
        return damage

    def _experts_back(self, layer: int, text: LayerText, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give the gradients with respect to the experts' input and the routing weights."""
        dx, dw = np.zeros_like(text.x), np.zeros_like(text.expert_weights)
        for expert in range(self.cfg.num_experts):
            rows, slots = np.nonzero(text.expert_ids == expert)
            if rows.size:
                w = self.fam.read_expert(self.checkpoint, self.cfg, layer, expert)
                h, by_u, by_v = text.hidden(expert, text.x[rows], w)
                dh = gradient[rows] @ w[2].T
                dw[rows, slots] = (dh * h).sum(-1)
                dh *= text.expert_weights[rows, slots][:, None]
                dx[rows] += (dh * by_u) @ w[0] + (dh * by_v) @ w[1]
        return dx, dw

    def _gradient(self, layer: int) -> np.ndarray:
        """Give the gradient at a layer's input; past the last layer, from the head."""
        if layer < self.cfg.num_layers:
            return np.load(self._file("gradient", layer))
        stream = np.load(self._file("stream", layer))[self.probes]
        shared = self._globals()
        head = jnp.asarray(shared.get("head", shared["embed"]), jnp.float32)
        norm, keys = jnp.asarray(shared["norm"], jnp.float32), jax.random.split(jax.random.key(0), len(stream))
        eps = self.cfg.rms_norm_eps
        return np.stack([np.asarray(_head_back(norm, head, eps, s, k)) for s, k in zip(stream, keys, strict=True)])

    def routing(self, layer: int) -> Float[np.ndarray, "n k"]:
        """Give the probed tokens' routing weights of a layer, largest first."""
        return np.load(self._file("routing", layer))

    def _state(self, layer: int) -> Any:
        flat = read_dense(self.checkpoint, self.fam.layer_tensors(self.cfg, layer), keep_float=True)
        _, state = abstract_layer(self.cfg, moe=self.cfg.moe_layers[layer])
        shapes = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}
        return fill_state(state, {p: jnp.asarray(v, jnp.float32).reshape(shapes[p]) for p, v in flat.items()})

    def _bias(self, layer: int) -> np.ndarray | None:
        """Read the biases of the experts' gate and up, [E, F, 2]."""
        table = self.fam.layer_tensors(self.cfg, layer)
        name = next((name for name, (path, _) in table.items() if path == "mlp.gate_up_bias"), None)
        if name is None:
            return None
        return self.checkpoint.read(name).astype(np.float32).reshape(self.cfg.num_experts, -1, 2)

    def _globals(self) -> dict[str, np.ndarray]:
        return read_dense(self.checkpoint, self.fam.global_tensors(self.cfg), keep_float=True)

    def _file(self, name: str, layer: int) -> Path:
        return self.folder / f"{name}_{layer:03d}.npy"

    def _save(self, name: str, layer: int, value: np.ndarray) -> None:
        """Write an array so that the file is either absent or whole."""
        part = self.folder / "part.npy"
        np.save(part, value)
        part.replace(self._file(name, layer))
