"""Native products and norms: against float64, and the bits of a row whatever stands beside it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels_pallas.cpu.library import Unavailable, load_native
from jaxserve.kernels_pallas.cpu.linear import choose_norm
from jaxserve.kernels_pallas.matmul import choose_linear
from jaxserve.models.decoder import rms_norm

pytestmark = pytest.mark.skipif(isinstance(load_native(), Unavailable), reason="no native library here")

DTYPES = ["bfloat16", "float32", "float16"]
# Depths and columns around vectors, panels, unpacked blocks and pieces of work.
SHAPES = [(1, 1), (3, 7), (8, 16), (127, 33), (128, 31), (129, 100), (300, 545), (576, 64)]


def random(seed: int, *shape: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


@partial(jax.jit, static_argnames=("dtype", "out_dtype"))
def product(dtype, x, weight, count, out_dtype=None):
    return choose_linear("native", jnp.dtype(dtype))(x, weight, out_dtype, count=count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_agree_with_float64(dtype, shape):
    depth, columns = shape
    for tokens, count in [(1, 1), (2, 2), (8, 7), (9, 4), (33, 33)]:
        x, weight = random(0, tokens, depth, dtype=dtype), random(1, depth, columns, dtype=dtype)
        expected = x.astype(np.float64) @ weight.astype(np.float64)
        sizes = np.abs(x.astype(np.float64)) @ np.abs(weight.astype(np.float64))  # what rounding errors go with
        out = np.asarray(product(dtype, x, weight, count, jnp.float32))
        assert out.dtype == np.float32
        assert (np.abs(out - expected)[:count] <= sizes[:count] * depth * 2**-24).all()
        assert not out[count:].any()
        narrow = np.asarray(product(dtype, x, weight, count))
        assert narrow.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(narrow, out.astype(narrow.dtype))  # rounded once, to nearest even


@pytest.mark.parametrize("shape", [(1, 33), (126, 31), (127, 64), (300, 545)], ids=str)
def test_a_product_of_bfloat16_is_one_chain_of_fused_multiply_adds(shape):
    """Whatever instructions the machine has: native.cc's rule, bit for bit."""
    depth, columns = shape
    x, weight = random(0, 29, depth, dtype="bfloat16"), random(1, depth, columns, dtype="bfloat16")
    expected = np.zeros((29, columns), np.float32)
    for k in range(depth):  # in float64 a product of bfloat16 and its sum with a float32 of about its size are exact
        expected = (expected + x[:, k, None].astype(np.float64) * weight[k].astype(np.float64)).astype(np.float32)
    for count in (1, 5, 12, 13, 29):
        out = np.asarray(product("bfloat16", x, weight, count, jnp.float32))
        np.testing.assert_array_equal(out[:count], expected[:count])


def test_a_weight_of_more_axes_keeps_them():
    x, weight = random(0, 8, 24, dtype="float32"), random(1, 24, 3, 10, dtype="float32")
    out = product("float32", x, weight, 8)
    assert out.shape == (8, 3, 10)
    np.testing.assert_array_equal(out.reshape(8, -1), product("float32", x, weight.reshape(24, 30), 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(200, 100), (576, 1000)], ids=str)
def test_a_row_has_the_same_bits_in_any_company(dtype, shape):
    """For every number of rows from 1 to 130, in any order, beside junk, with one thread or several."""
    depth, columns = shape
    x, weight = random(0, 130, depth, dtype=dtype), random(1, depth, columns, dtype=dtype)
    expected = np.asarray(product(dtype, x, weight, 130, jnp.float32))
    order = np.random.default_rng(2).permutation(130)
    np.testing.assert_array_equal(product(dtype, x[order], weight, 130, jnp.float32), expected[order])
    for count in range(1, 131):
        junk = x.copy()
        junk[count:] = np.nan
        out = np.asarray(product(dtype, junk, weight, count, jnp.float32))
        np.testing.assert_array_equal(out[:count], expected[:count])
        assert not out[count:].any()
    for row in range(0, 130, 13):  # a program of one row splits the work otherwise
        np.testing.assert_array_equal(product(dtype, x[row : row + 1], weight, 1, jnp.float32), expected[row : row + 1])
    # A narrow weight is one piece of work, which one thread does alone.
    some = np.asarray(product(dtype, x, weight[:, :32].copy(), 130, jnp.float32))
    np.testing.assert_array_equal(some, expected[:, :32])


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_are_rounded_as_xla_rounds_them(dtype):
    """Infinities, NaN, subnormals, overflow to infinity and ties, through a product with the unit matrix."""
    values = np.array(
        [0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 6e-8, 1e-7, 65519, 65520, 3e38, -1.00390625, 1.01171875]
    )
    with np.errstate(over="ignore"):
        x = values.astype(np.float32).astype(jnp.dtype(dtype))
    single = np.asarray(product(dtype, x[:, None], np.ones((1, 1), x.dtype), len(x), jnp.float32))[:, 0]
    finite = x.astype(np.float32)
    finite[np.abs(finite) < 1.2e-38] = 0  # XLA's threads flush what float32 holds as subnormal
    np.testing.assert_array_equal(single, finite)
    rounded = np.asarray(product(dtype, x[:, None], np.full((1, 1), 1.5, x.dtype), len(x)))[:, 0]
    with np.errstate(over="ignore"):
        expected = (finite * np.float32(1.5)).astype(x.dtype)
    np.testing.assert_array_equal(rounded.astype(np.float32), expected.astype(np.float32))


@partial(jax.jit, static_argnames="eps")
def norm(x, scale, count, eps=1e-5):
    return choose_norm(native=True)(x, scale, eps, count=count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 576), (5, 3, 64), (4, 13)], ids=str)
def test_norms_agree_with_float64(dtype, shape):
    x, scale = random(0, *shape, dtype=dtype), random(1, shape[-1], dtype=dtype)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * scale.astype(np.float64)
    out = np.asarray(norm(x, scale, shape[0] - 1))
    assert out.dtype == x.dtype
    precision = 2 * float(jnp.finfo(dtype).eps)  # rounded twice
    np.testing.assert_allclose(out[:-1].astype(np.float64), expected[:-1], rtol=max(precision, 1e-6), atol=1e-7)
    assert not out[-1].any()
    # The models' own norm may differ in the last bit of its sum, not in what it computes.
    same = np.asarray(rms_norm(jnp.asarray(x), jnp.asarray(scale), 1e-5))[:-1].astype(np.float32)
    np.testing.assert_allclose(out[:-1].astype(np.float32), same, rtol=max(precision, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 100, 256, 576])
def test_a_norm_has_the_same_bits_in_any_company(dtype, size):
    x, scale = random(0, 130, size, dtype=dtype), random(1, size, dtype=dtype)
    expected = np.asarray(norm(x, scale, 130))
    for tokens in (1, 2, 8, 16, 24, 64, 128):
        np.testing.assert_array_equal(norm(x[:tokens], scale, tokens), expected[:tokens])
    junk = x.copy()
    junk[50:] = np.nan
    np.testing.assert_array_equal(norm(junk, scale, 50)[:50], expected[:50])


def test_the_names_of_products():
    bfloat16, float32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
    assert choose_linear("xla", float32) is None
    assert choose_linear("auto", float32) == choose_linear("native", bfloat16)
    mesh = jax.make_mesh((1,), ("model",))
    assert choose_linear("auto", float32, mesh) is None
    with pytest.raises(ValueError, match=r"^linear_backend='native': .*on one device"):
        choose_linear("native", float32, mesh)


def test_cpus_with_tiles_of_bfloat16_keep_xla_for_it(monkeypatch):
    monkeypatch.setattr("jaxserve.kernels_pallas.cpu.linear.cpu_description", lambda: "flags : avx2 amx_bf16 amx_tile")
    assert choose_linear("auto", jnp.dtype("bfloat16")) is None
    assert choose_linear("auto", jnp.dtype("float32")) is not None
    assert choose_linear("native", jnp.dtype("bfloat16")) is not None
    monkeypatch.setattr("jaxserve.kernels_pallas.cpu.linear.cpu_description", lambda: "flags : avx2 avx512_bf16")
    assert choose_linear("auto", jnp.dtype("bfloat16")) is not None
