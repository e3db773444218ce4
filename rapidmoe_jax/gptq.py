"""The calibrated base: codes that make an expert's output right on a calibration text, not each weight.

    minimise  sum over rows of (w - q) H (w - q)^T        q = scale * code + offset, groups of 64 along D

H is the second moment of what a matrix multiplies: of x for gate and up, of h for down. Columns are rounded one by one
and each error is passed on to the columns not yet rounded (GPTQ, arXiv 2210.17323), with grids searched for each group
when it is reached; then grids and codes are refitted in turn, each to its best given all others (coordinate descent).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rapidmoe_jax.config import GROUP_SIZE
from rapidmoe_jax.quant import Codes

DAMPING = 0.02  # added to the diagonal of H, as a share of its mean
SWEEPS = 4  # refits of grids and codes after the first pass; of a residual one, it gains little
_SHRINK = tuple(np.linspace(1.0, 0.4, 13).tolist())  # tried ranges of a group, as a share of min..max


def quantize_gptq(
    w: Float[np.ndarray, "3 F D"], h_x: Float[np.ndarray, "D D"], h_h: Float[np.ndarray, "F F"], *, bits: int
) -> Codes:
    """Quantise one expert.

    Args:
      w: gate_proj, up_proj, and down_proj transposed, one row a unit.
      h_x, h_h: second moments of the expert's input and of its hidden values; any scale.
      bits: 2, 3 or 4.
    Returns: codes of the 3F rows.
    Raises: ValueError if a second moment is not finite.
    """
    code, scale, offset = _solve_expert(w, h_x, h_h, bits, symmetric=False)
    return Codes(code.astype(np.uint8), scale.astype(np.float16), offset.astype(np.float16))


def residual_gptq(
    rest: Float[np.ndarray, "3 F D"], h_x: Float[np.ndarray, "D D"], h_h: Float[np.ndarray, "F F"], *, bits: int
) -> tuple[np.ndarray, np.ndarray]:
    """Quantise what an expert's base lost, as quant.quantize_residual does, for the text's inputs. bits: 2 or 4."""
    code, scale, _ = _solve_expert(rest, h_x, h_h, bits, symmetric=True)
    return code.astype(np.uint8), scale.astype(np.float16)


def _solve_expert(w: Any, h_x: Any, h_h: Any, bits: int, *, symmetric: bool) -> tuple[np.ndarray, ...]:
    """Give code [3F, D], scale and offset [3F, D/64]."""
    if not (np.isfinite(h_x).all() and np.isfinite(h_h).all()):
        raise ValueError("the calibration text gave activations that are not finite; the source's weights are damaged")
    units, width = w.shape[1:]
    gate_up = _solve(w[:2].reshape(-1, width), _damped(h_x), bits, False, symmetric)
    pad = -units % GROUP_SIZE
    h_h = np.pad(_damped(h_h), (0, pad)) + np.diag(np.repeat([0, 1], [units, pad])).astype(np.float32)
    down = _solve(np.pad(w[2].T, ((0, 0), (0, pad))), h_h, bits, True, symmetric)
    return tuple(np.concatenate([np.asarray(a), np.asarray(b).T[:units]]) for a, b in zip(gate_up, down, strict=True))


def _damped(h: np.ndarray) -> np.ndarray:
    mean = float(np.trace(h)) / len(h)
    h = h / mean if mean > 0 else np.zeros_like(h)
    return (h + np.eye(len(h)) * (DAMPING if mean > 0 else 1)).astype(np.float32)


def _half(a: Array) -> Array:
    return a.astype(jnp.float16).astype(jnp.float32)


class _Grid(NamedTuple):
    """What grids are possible: codes of `bits`, any offset, or the codes' middle at 0."""

    bits: int
    symmetric: bool

    @property
    def middle(self) -> float:
        return (2**self.bits - 1) / 2

    def round(self, w: Array, scale: Array, offset: Array) -> Array:
        return jnp.clip(jnp.round((w - offset) / jnp.where(scale > 0, scale, 1)), 0, 2**self.bits - 1)

    def refit(self, w: Array, code: Array, weight: Array) -> tuple[Array, Array]:
        """Give the least-squares scale and offset for codes, groups on the last axis."""
        if self.symmetric:
            mean_c, mean_w = jnp.float32(self.middle), jnp.float32(0)
        else:
            total = weight.sum(-1, keepdims=True)
            mean_c, mean_w = ((weight * a).sum(-1, keepdims=True) / total for a in (code, w))
        var = (weight * (code - mean_c) ** 2).sum(-1, keepdims=True)
        scale = (weight * (code - mean_c) * (w - mean_w)).sum(-1, keepdims=True) / jnp.where(var > 0, var, 1)
        scale = _half(jnp.maximum(scale, 0))
        return scale, self._offset(mean_w - scale * mean_c)

    def refit_coupled(self, code: Array, grid: tuple[Array, Array], pull: Array, h: Array) -> tuple[Array, Array]:
        """Give each row's best scale and offset for one block of codes under h, all other blocks as they are."""
        scale, offset = grid
        if self.symmetric:
            code = code - self.middle
            new = _half(
                scale + (code * pull).sum(-1, keepdims=True) / _positive(((code @ h) * code).sum(-1, keepdims=True))
            )
            new = jnp.where(new > 0, new, scale)
            return new, -new * self.middle
        coupled, ones = code @ h, h.sum(0)
        a, b, c = (code * coupled).sum(-1, keepdims=True), (code * ones).sum(-1, keepdims=True), h.sum()
        p, q = (code * pull).sum(-1, keepdims=True), pull.sum(-1, keepdims=True)
        det = a * c - b * b
        new_scale = _half(scale + (c * p - b * q) / _positive(det))
        new_offset = _half(offset + (a * q - b * p) / _positive(det))
        able = (det > 1e-6 * a * c) & (new_scale > 0)
        return jnp.where(able, new_scale, scale), jnp.where(able, new_offset, offset)

    def search(self, w: Array, weight: Array) -> tuple[Array, Array]:
        """Search a clipped grid of each group on the last axis, each try refitted once."""
        low, high = w.min(-1, keepdims=True), w.max(-1, keepdims=True)
        if self.symmetric:
            high = jnp.maximum(high, -low)
            low = -high
        centre, half = (low + high) / 2, (high - low) / 2

        def grids():
            for shrink in _SHRINK:
                scale = _half(2 * half * shrink / (2**self.bits - 1))
                offset = self._offset(centre - scale * self.middle)
                yield scale, offset
                yield self.refit(w, self.round(w, scale, offset), weight)

        return self.better(w, weight, *grids())

    def better(self, w: Array, weight: Array, *grids: tuple[Array, Array]) -> tuple[Array, Array]:
        """Pick, group by group, the grid with the least weighted squared error."""
        best = None
        for scale, offset in grids:
            error = (weight * (w - self.round(w, scale, offset) * scale - offset) ** 2).sum(-1, keepdims=True)
            new = (error, scale, offset)
            best = (
                new if best is None else tuple(jnp.where(error < best[0], a, b) for a, b in zip(new, best, strict=True))
            )
        assert best is not None
        return best[1], best[2]

    def _offset(self, value: Array) -> Array:
        return value if self.symmetric else _half(value)


def _positive(a: Array) -> Array:
    return jnp.where(a > 0, a, 1)


@partial(jax.jit, static_argnames=("bits", "rows", "symmetric"))
def _solve(w: Float[Array, "N K"], h: Float[Array, "K K"], bits: int, rows: bool, symmetric: bool) -> Any:
    """Quantise a matrix whose K columns h couples, in blocks of 64 columns.

    Args:
      rows: groups run along 64 rows of each column (scale [N/64, K]), else along 64 columns (scale [N, K/64]).
    Returns: code, scale, offset.
    """
    size, kind = GROUP_SIZE, _Grid(bits, symmetric)
    count, columns = w.shape
    # H^-1 = U^T U with U upper triangular: row k of U says where the error of column k goes.
    upper = jnp.linalg.cholesky(jnp.linalg.inv(h)).T
    diagonal = jnp.diag(h)
    grid_shape = (count // size, columns) if rows else (count, columns // size)

    def cut(a, block):  # the block's columns
        return jax.lax.dynamic_slice_in_dim(a, block * size, size, axis=-1)

    def put(a, part, block):
        return jax.lax.dynamic_update_slice_in_dim(a, part, block * part.shape[1], axis=1)

    def grid_of(grid, i):  # scale and offset [N] of a column of the block
        return (jnp.repeat(a[:, i], size) if rows else a[:, 0] for a in grid)

    def column_groups(column):
        return column.reshape(-1, size)

    def set_column_grid(grid, i, new):
        return tuple(a.at[:, i].set(n[:, 0]) for a, n in zip(grid, new, strict=True))

    def value(code, grid):
        scale, offset = (jnp.repeat(a, size, axis=0 if rows else 1) for a in grid)
        return code * scale + offset

    def first_pass(block, state):
        w, code, grid = state
        part, u = cut(w, block), cut(jax.lax.dynamic_slice_in_dim(upper, block * size, size), block)
        if rows:
            chosen = tuple(jnp.zeros((grid_shape[0], size)) for _ in range(2))
        else:
            weight = jnp.broadcast_to(cut(diagonal[None], block), part.shape)
            chosen = kind.search(part, weight)

        def column(i, state):
            part, errors, codes, grid = state
            target = part[:, i]
            if rows:
                groups = column_groups(target)
                grid = set_column_grid(grid, i, kind.search(groups, jnp.ones_like(groups)))
            scale, offset = grid_of(grid, i)
            new = kind.round(target, scale, offset)
            error = (target - new * scale - offset) / u[i, i]
            after = jnp.where(jnp.arange(size) > i, u[i], 0)
            return part - error[:, None] * after, errors.at[:, i].set(error), codes.at[:, i].set(new), grid

        zeros = jnp.zeros_like(part)
        _, errors, codes, chosen = jax.lax.fori_loop(0, size, column, (part, zeros, zeros, chosen))
        w = w - errors @ jax.lax.dynamic_slice_in_dim(upper, block * size, size)
        return w, put(code, codes, block), tuple(put(a, b, block) for a, b in zip(grid, chosen, strict=True))

    def refine(block, state):
        code, grid, pull = state  # pull = (w - q) H
        h_block = jax.lax.dynamic_slice_in_dim(h, block * size, size)
        h_own, own_diagonal = cut(h_block, block), cut(diagonal[None], block)[0]
        codes, before_pull = cut(code, block), cut(pull, block)
        span = size if rows else 1
        scale, offset = (jax.lax.dynamic_slice_in_dim(a, block * span, span, axis=1) for a in grid)
        mine = (scale, offset)
        before = value(codes, mine)
        part = before_pull
        if not rows:
            mine = kind.refit_coupled(codes, mine, part, h_own)
            part = part - (value(codes, mine) - before) @ h_own

        def column(i, state):
            part, codes, grid = state
            scale, offset = grid_of(grid, i)
            now = codes[:, i] * scale + offset
            target = now + part[:, i] / own_diagonal[i]
            if rows:
                groups, weight = column_groups(target), jnp.ones((count // size, size))
                old = (grid[0][:, i][:, None], grid[1][:, i][:, None])
                fitted = kind.refit(groups, kind.round(groups, old[0], old[1]), weight)
                grid = set_column_grid(grid, i, kind.better(groups, weight, old, fitted))
                scale, offset = grid_of(grid, i)
            new = kind.round(target, scale, offset)
            change = new * scale + offset - now
            return part - change[:, None] * h_own[i], codes.at[:, i].set(new), grid

        _, codes, mine = jax.lax.fori_loop(0, size, column, (part, codes, mine))
        pull = pull - (value(codes, mine) - before) @ h_block
        return put(code, codes, block), tuple(put(a, b, block) for a, b in zip(grid, mine, strict=True)), pull

    blocks = columns // size
    start = (w, jnp.zeros_like(w), tuple(jnp.zeros(grid_shape) for _ in range(2)))
    _, code, grid = jax.lax.fori_loop(0, blocks, first_pass, start)

    def sweep(_, state):
        code, grid = state
        pull = (w - value(code, grid)) @ h
        return jax.lax.fori_loop(0, blocks, refine, (code, grid, pull))[:2]

    code, grid = jax.lax.fori_loop(0, 1 if symmetric else SWEEPS, sweep, (code, grid))
    return code, *grid
