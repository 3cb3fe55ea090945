"""The product for Hopper, interpreted: against float64, without races, and a row's bits among any number of rows."""

import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import watched_races

from jaxserve.kernels_pallas.hopper import MAX_SMEM, interpreted
from jaxserve.kernels_pallas.matmul import MosaicLinear, choose_linear, mosaic
from jaxserve.kernels_pallas.matmul.mosaic import matmul, unsupported
from jaxserve.kernels_pallas.matmul.reference import matmul_reference
from jaxserve.kernels_pallas.matmul.tiles import TileConfig, choose_tiles
from jaxserve.kernels_pallas.roofline import BF16_FLOP_PER_S, HBM_BYTES_PER_S, matmul_cost
from jaxserve.models.config import ModelConfig

INTERPRET = interpreted()
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}  # half a unit in the last place of 1


def operands(rows: int, inner: int, columns: int, dtype: str = "bfloat16") -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(rows + inner + columns)
    array = lambda *shape: jnp.asarray(random.standard_normal(shape, dtype=np.float32), dtype)
    return array(rows, inner), array(inner, columns)


def within_rounding(result, x, weight) -> bool:
    """Whether float32 accumulation in any order, and one rounding, explain the distance from float64."""
    wide = [np.asarray(value, np.float64) for value in (x, weight)]
    exact, magnitude = wide[0] @ wide[1], np.abs(wide[0]) @ np.abs(wide[1])
    allowed = x.shape[1] * UNIT["float32"] * magnitude + UNIT[str(result.dtype)] * np.abs(exact)
    distance = np.abs(np.asarray(result, np.float64) - exact)
    return bool((distance <= allowed + 1e-30).all())  # a NaN compares as False


def run(x, weight, out_dtype=None, **options) -> jax.Array:
    with watched_races() as races:
        result = jax.block_until_ready(matmul(x, weight, out_dtype, interpret=INTERPRET, **options))
    assert not races.found()
    return result


# ---- numbers --------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40).map(lambda n: 8 * n),
    inner=st.integers(1, 6).map(lambda n: 64 * n),
    columns=st.integers(1, 5).map(lambda n: 64 * n),
    dtype=st.sampled_from(["bfloat16", "float16"]),
    wide=st.booleans(),
    blocks=st.sampled_from([1, 2, 3, 132]),
)
def test_any_shape_is_right(rows, inner, columns, dtype, wide, blocks):
    x, weight = operands(rows, inner, columns, dtype)
    result = run(x, weight, jnp.float32 if wide else None, blocks=blocks)
    assert result.shape == (rows, columns)
    assert result.dtype == (jnp.float32 if wide else x.dtype)
    assert within_rounding(result, x, weight)


# Tiles moved back at both ends, rows of one warpgroup alone, rings that are refilled across tiles.
CUTS = [
    (8, 192, TileConfig(64, 128, 2)),
    (40, 128, TileConfig(128, 64, 2)),
    (328, 192, TileConfig(256, 128, 2)),
]
MORE_CUTS = [
    (72, 64, TileConfig(64, 64, 3)),
    (72, 128, TileConfig(128, 128, 3)),
    (200, 192, TileConfig(128, 128, 2)),
    (72, 128, TileConfig(256, 128, 2)),
]


@pytest.mark.parametrize(
    ("rows", "columns", "config"), CUTS + [pytest.param(*cut, marks=pytest.mark.slow) for cut in MORE_CUTS]
)
def test_every_way_to_cut(rows, columns, config):
    x, weight = operands(rows, 192, columns)
    assert within_rounding(run(x, weight, jnp.float32, config=config, blocks=2), x, weight)


def test_the_reference_is_right():
    x, weight = operands(24, 192, 100)
    assert within_rounding(matmul_reference(x, weight), x, weight)
    assert within_rounding(matmul_reference(x, weight, jnp.float32), x, weight)


def test_a_layer_calls_it_with_its_own_shapes():
    x, weight = operands(16, 128, 2 * 192)
    linear = MosaicLinear(INTERPRET)
    result = linear(x, weight.reshape(128, 2, 192), count=jnp.int32(3))
    assert result.shape == (16, 2, 192)
    assert within_rounding(result.reshape(16, -1), x, weight)


# ---- bits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "fewer"), [(136, (8, 72)), pytest.param(264, (8, 64, 72, 136, 256), marks=pytest.mark.slow)]
)
def test_a_row_has_the_same_bits_among_any_number_of_rows(most, fewer):
    """In tiles of every number of rows, ragged ones too; float32 results show every bit of the accumulators."""
    x, weight = operands(most, 192, 128)
    once = lambda x: np.asarray(matmul(x, weight, jnp.float32, interpret=interpreted(detect_races=False)))
    expected = once(x)
    for rows in fewer:
        np.testing.assert_array_equal(once(x[:rows]), expected[:rows], err_msg=f"{rows} rows")
    np.testing.assert_array_equal(once(jnp.roll(x, 24, axis=0)[:64])[24:], expected[:40])


# ---- planted bugs ---------------------------------------------------------------------------------------

_RELEASE = "pl.when(turn + stages < total)(lambda: plgpu.barrier_arrive(free.at[lax.rem(turn, stages)]))"
BUGS = {
    "no wait for the tiles": ("                    plgpu.barrier_wait(ready.at[slot])\n", ""),
    "one copy is enough": ('"ready": plgpu.Barrier(num_arrivals=2,', '"ready": plgpu.Barrier(num_arrivals=1,'),
    "a slot is refilled while it is read": (
        "                pl.when(turn >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))\n",
        "",
    ),
    "one warpgroup frees for both": (
        '"free": plgpu.Barrier(num_arrivals=workers,',
        '"free": plgpu.Barrier(num_arrivals=1,',
    ),
    "a slot is freed before it is read": (
        "            x, weight = (tile[...].astype(jnp.float32) for tile in operands(k))\n"
        "            plgpu.commit_smem()\n"
        "            release(k)\n",
        "            tiles = operands(k)\n"
        "            release(k)\n"
        "            x, weight = (tile[...].astype(jnp.float32) for tile in tiles)\n"
        "            plgpu.commit_smem()\n",
    ),
    "the last turns are released too": (_RELEASE, _RELEASE.replace("turn + stages < total", "turn < total")),
    "a result leaves before it is there": ("                plgpu.commit_smem()\n\n", "\n"),
    "a result is overwritten while it leaves": (
        "                plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n",
        "",
    ),
    "the kernel ends before its results are out": ("            plgpu.wait_smem_to_gmem(0)\n", ""),
    "both warpgroups multiply the same rows": (
        "pl.ds(worker * worker_rows, worker_rows)], weight_s",
        "pl.ds(0, worker_rows)], weight_s",
    ),
    "the last tile is not moved back": (
        "            row = jnp.minimum(row, self.rows - self.config.rows)\n",
        "            pass\n",
    ),
    "two tiles store the same rows": ("when(~last | (local >=", "when(~last | (local >= 0) | (local >="),
    "a tile's rows are stored from the wrong place": (
        "lambda: send(skipped, _PIECE - skipped)",
        "lambda: send(0, _PIECE - skipped)",
    ),
}


def broken(old: str, new: str) -> types.ModuleType:
    """The kernel's module with one piece of its source replaced."""
    source = Path(mosaic.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in it"
    module = types.ModuleType("broken_matmul")
    sys.modules[module.__name__] = module
    exec(compile(source.replace(old, new), module.__name__, "exec"), module.__dict__)
    return module


def what_goes_wrong(module: types.ModuleType) -> str | None:
    """How the kernel of a module betrays itself: an error of the interpreter, a race, its numbers; None if not."""
    x, weight = operands(328, 192, 128)
    options = {"config": TileConfig(128, 128, 2), "blocks": 2, "interpret": INTERPRET}
    try:
        with watched_races() as races:
            result = jax.block_until_ready(module.matmul(x, weight, jnp.float32, **options))
    except Exception as error:
        return f"error: {error}"
    if races.found():
        return "race"
    return None if within_rounding(result, x, weight) else "numbers"


def test_nothing_goes_wrong_without_a_bug():
    assert what_goes_wrong(mosaic) is None


RARER = (
    "one copy is enough",
    "one warpgroup frees for both",
    "the last turns are released too",
    "the kernel ends before its results are out",
    "both warpgroups multiply the same rows",
    "two tiles store the same rows",
    "a tile's rows are stored from the wrong place",
)


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=[pytest.mark.slow] * (bug in RARER)) for bug in BUGS])
def test_a_planted_bug_is_caught(bug):
    if bug == "the last turns are released too" and jax.__version_info__ >= (0, 12):
        pytest.skip("from JAX 0.12 on the interpreter does not ask whether barriers are drained")
    assert what_goes_wrong(broken(*BUGS[bug])) is not None


# ---- tiles, costs, names --------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [8, 64, 72, 128, 200, 256, 2048, 8192])
@pytest.mark.parametrize("columns", [64, 576, 1152, 4096, 28672, 128256])
@pytest.mark.parametrize("out_itemsize", [2, 4])
def test_tiles_fit_the_shared_memory(rows, columns, out_itemsize):
    config = choose_tiles(rows, columns, out_itemsize=out_itemsize)
    assert config.shared_bytes(2, out_itemsize) <= MAX_SMEM
    assert config.columns <= columns
    assert config.rows == 64 or rows > 64


def test_wrong_tiles_are_refused():
    with pytest.raises(ValueError, match="a tile must have"):
        TileConfig(32, 64, 2)
    with pytest.raises(ValueError, match="stages must be at least 2"):
        TileConfig(64, 64, 1)


def test_the_floor_of_a_product():
    """Llama-3-8B's down projection at batch 1 and 4,096: the weights' bytes, then the operations."""
    few, many = matmul_cost(1, 14336, 4096), matmul_cost(4096, 14336, 4096)
    assert few.bytes == 2 * (14336 + 14336 * 4096 + 4096)
    assert few.floor == few.bytes / HBM_BYTES_PER_S
    assert many.floor == 2 * 4096 * 14336 * 4096 / BF16_FLOP_PER_S


@pytest.mark.parametrize(
    ("x", "weight", "reason"),
    [
        ((7, 64), (64, 64), "rows must be a multiple of 8, not 7"),
        ((8, 96), (96, 64), "both sides of a weight must be multiples of 64, not 96 and 64"),
        ((8, 64), (64, 100), "both sides of a weight must be multiples of 64, not 64 and 100"),
    ],
)
def test_what_it_does_not_take_is_refused(x, weight, reason):
    with pytest.raises(ValueError, match=reason):
        matmul(jnp.zeros(x, jnp.bfloat16), jnp.zeros(weight, jnp.bfloat16), interpret=INTERPRET)
    assert "multiplies bfloat16 and float16, not float32" in unsupported(8, 64, 64, jnp.dtype("float32"))


@pytest.fixture
def hopper(monkeypatch):
    """The chooser's view of the device: a GPU, and what is said against it."""
    gpu = types.SimpleNamespace(platform="gpu", reason=None)
    monkeypatch.setattr("jax.local_devices", lambda: [gpu])
    monkeypatch.setattr("jaxserve.kernels_pallas.matmul.why_no_hopper", lambda device: gpu.reason)
    return gpu


def test_mosaic_on_a_cpu_is_an_error_that_says_why():
    with pytest.raises(ValueError, match=r"^linear_backend='mosaic': .*capability 9.0 .*not the platform 'cpu'$"):
        choose_linear("mosaic", jnp.dtype("bfloat16"))


def test_mosaic_for_what_it_cannot_do_is_an_error_that_says_why(hopper):
    bfloat16 = jnp.dtype("bfloat16")
    with pytest.raises(ValueError, match="not float32"):
        choose_linear("mosaic", jnp.dtype("float32"), products={"qkv": (64, 128)})
    with pytest.raises(ValueError, match="head: both sides of a weight must be multiples of 64, not 128 and 50257"):
        choose_linear("mosaic", bfloat16, products={"qkv": (128, 128), "head": (128, 50257)})
    with pytest.raises(ValueError, match="not on a mesh"):
        choose_linear("mosaic", bfloat16, jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("model",)))
    hopper.reason = "it is too old"
    with pytest.raises(ValueError, match=r"it is too old$"):
        choose_linear("mosaic", bfloat16)


def test_auto_on_hopper_is_mosaic_only_for_determinism(hopper):
    bfloat16, products = jnp.dtype("bfloat16"), {"qkv": (128, 192)}
    assert choose_linear("mosaic", bfloat16, products=products) == MosaicLinear()
    assert choose_linear("auto", bfloat16, products=products, deterministic=True) == MosaicLinear()
    assert choose_linear("auto", bfloat16, products=products) is None
    assert choose_linear("auto", jnp.dtype("float32"), products=products, deterministic=True) is None
    hopper.reason = "it is too old"
    assert choose_linear("auto", bfloat16, products=products, deterministic=True) is None


def test_a_models_products_are_its_matrices():
    """The shapes that the chooser looks at are those of the parameters."""
    from engine_tools import TINY

    from jaxserve.models.weights import decoder_leaves

    config = ModelConfig.from_hf(TINY | {"tie_word_embeddings": False})
    matrices = {}
    for leaf in decoder_leaves(config):
        name = leaf.path.rpartition(".")[2]
        if name in config.products:
            split = 2 if name == "out" else 1
            matrices[name] = tuple(int(np.prod(part)) for part in (leaf.shape[:split], leaf.shape[split:]))
    assert matrices == config.products
