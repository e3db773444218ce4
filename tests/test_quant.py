import jax.numpy as jnp
import numpy as np
import pytest

from rapidmoe_jax import quant
from rapidmoe_jax.config import SplitConfig
from rapidmoe_jax.expert_split import split_expert, split_nested
from rapidmoe_jax.host_kernels import _host
from rapidmoe_jax.pallas.reference import dequantize_rows, unpack_codes


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_pack_places_every_code_as_the_layout_says(bits):
    """Bit by bit against the sentence in host_kernels/layout.h, written out here independently."""
    width = 192
    code = np.random.default_rng(bits).integers(0, 2**bits, (3, width)).astype(np.uint8)
    packed = quant.pack(code, bits=bits)
    assert packed.shape == (3, width * bits // 8)
    for row in range(3):
        for i in range(width):
            group, e = divmod(i, 64)
            if bits == 3:
                low = packed[row, group * 16 + e % 16] >> (2 * (e // 16)) & 3
                high = packed[row, width // 4 + group * 8 + e % 8] >> (e // 8) & 1
                value = low | high << 2
            else:
                value = packed[row, group * 8 * bits + e % (8 * bits)] >> (bits * (e // (8 * bits))) & (2**bits - 1)
            assert value == code[row, i]
    assert (quant.unpack(packed, bits=bits) == code).all()
    assert (np.asarray(unpack_codes(jnp.asarray(packed), bits=bits)) == code).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_cpp_reads_rows_as_python_writes_them(bits, isa):
    rng = np.random.default_rng(bits)
    code = rng.integers(0, 2**bits, (5, 1088)).astype(np.uint8)  # 17 groups: no multiple of a vector of scales
    scale = rng.uniform(0.01, 1, (5, 17)).astype(np.float16)
    offset = rng.normal(size=(5, 17)).astype(np.float16)
    packed = quant.pack(code, bits=bits)
    wanted = quant.dequantize(quant.Codes(code, scale, offset))
    got = _host.dequantize_rows(bits, packed, scale.view(np.uint16), offset.view(np.uint16))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6)
    np.testing.assert_allclose(
        dequantize_rows(*map(jnp.asarray, (packed, scale, offset)), bits=bits), wanted, rtol=0, atol=2e-6
    )
    wanted = quant.dequantize_residual(code, scale, bits=bits)
    np.testing.assert_allclose(_host.dequantize_rows(bits, packed, scale.view(np.uint16), None), wanted, atol=2e-6)


# Relative error of Gaussian weights: base, then base + residual of 4 and of 2 bits. Measured 2026-12-01; a change
# of rounding shows here.
PINNED = {
    ("nested", 2): (0.35415, 0.021704, 0.090749),
    ("nested", 3): (0.17631, 0.010762, 0.043868),
    ("nested", 4): (0.08782, 0.005355, 0.021619),
    ("minmax", 2): (0.44925, 0.029218, 0.116331),
    ("minmax", 3): (0.19231, 0.012492, 0.049956),
    ("minmax", 4): (0.08962, 0.005794, 0.023282),
}


@pytest.mark.parametrize("scheme, bits", list(PINNED))
def test_mean_error_of_each_scheme_is_pinned(scheme, bits):
    w = np.random.default_rng(7).normal(size=(256, 512)).astype(np.float32)
    got = []
    for residual_bits in (4, 2):
        codes = quant.QUANTIZERS[scheme](w, bits=bits, residual_bits=residual_bits)
        rest = w - quant.dequantize(codes)
        if residual_bits == 4:
            got.append(np.sqrt(np.mean(rest**2)))
        code, scale = quant.quantize_residual(rest, bits=residual_bits)
        rest = rest - quant.dequantize_residual(code, scale, bits=residual_bits)
        got.append(np.sqrt(np.mean(rest**2)))
    np.testing.assert_allclose(got, PINNED[scheme, bits], rtol=0.01)


@pytest.mark.parametrize("scheme", list(quant.QUANTIZERS))
@pytest.mark.parametrize("w", [np.zeros((2, 64)), np.full((1, 64), 3.0), np.full((1, 64), 1e-7), -np.ones((1, 128))])
def test_constant_and_tiny_groups_survive(scheme, w):
    codes = quant.QUANTIZERS[scheme](w.astype(np.float32), bits=2, residual_bits=4)
    rest = w - quant.dequantize(codes)
    code, scale = quant.quantize_residual(rest, bits=4)
    rest = rest - quant.dequantize_residual(code, scale, bits=4)
    assert np.abs(rest).max() <= 0.01 * np.abs(w).max() + 1e-6


@pytest.mark.parametrize("bits", [(2, 2), (3, 2), (4, 2), (2, 4), (3, 4), (4, 4)])
@pytest.mark.parametrize("kind", ["normal", "outliers", "zeros", "tiny", "one sign", "large"])
def test_nested_split_in_cpp_is_the_one_in_numpy(bits, kind):
    """Bit for bit: codes, scales, offsets, records; norms to the rounding of bfloat16."""
    rng = np.random.default_rng(3)
    w = rng.normal(0, 0.05, (3, 11, 192)).astype(np.float32)  # units are no multiple of a part
    if kind == "outliers":
        w[rng.random(w.shape) < 0.02] *= 40
    elif kind == "one sign":
        w = np.abs(w) + 0.01
    w *= {"zeros": 0.0, "tiny": 1e-5, "large": 1e5}.get(kind, 1.0)
    spec = SplitConfig(base_bits=bits[0], residual_bits=bits[1])
    rows = w.reshape(-1, 192)
    base = quant.quantize_nested(rows, bits=bits[0], residual_bits=bits[1])
    rest = quant.quantize_residual(rows - quant.dequantize(base), bits=bits[1])
    wanted, got = split_expert(w, spec, base, rest), split_nested(w, spec)
    for name in ("codes", "scale", "offset"):
        np.testing.assert_array_equal(got.arrays[name], wanted.arrays[name])
    np.testing.assert_array_equal(got.records, wanted.records)
    a, b = (s.arrays["norms"].astype(np.float32) for s in (got, wanted))
    np.testing.assert_allclose(a, b, rtol=2**-7)
    for name, value in wanted.sums.items():
        assert got.sums[name] == pytest.approx(value, rel=1e-4, abs=1e-12)


def test_weights_beyond_half_precision_are_refused():
    w = np.zeros((3, 2, 64), np.float32)
    w[1, 1, 3] = 3e6
    with pytest.raises(ValueError, match="weights up to 3e.06 do not fit half-precision scales"):
        split_nested(w, SplitConfig(base_bits=2, residual_bits=2))


def test_cpp_refuses_shapes_it_cannot_split():
    for shape, bits in (((2, 3, 64), (3, 4)), ((3, 3, 65), (3, 4)), ((3, 3, 64), (5, 4)), ((3, 3, 64), (3, 3))):
        with pytest.raises(ValueError, match="split_expert: weights"):
            _host.split_expert(np.zeros(shape, np.float32), *bits)
