"""The test at start that says whether rows depend on their company, and what an engine makes of it."""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from engine_tools import tiny_decoder, tiny_engine

from jaxserve import startup
from jaxserve.config import EngineConfig
from jaxserve.kernels_pallas.cpu.linear import NativeLinear, NativeNorm, choose_norm
from jaxserve.kernels_pallas.hopper import interpreted
from jaxserve.kernels_pallas.matmul import MosaicLinear, choose_linear
from jaxserve.kernels_pallas.paged_attention import XLA, choose_attention, mosaic_backend
from jaxserve.kernels_pallas.paged_attention.mosaic import mosaic_attention
from jaxserve.kernels_pallas.paged_attention.mosaic.config import TileConfig as MosaicTiles
from jaxserve.runner import determinism
from jaxserve.runner.compilation import Compiler
from jaxserve.runner.determinism import PROVEN_ROWS, row_invariance, smallest_bucket, unproven
from jaxserve.runner.step import StepDefinition
from jaxserve.runner.weights import flatten
from jaxserve.startup import prepare

SMALL = {"num_pages": 64, "max_num_batched_tokens": 8, "max_num_seqs": 8, "compilation_cache_dir": ""}


def check(dtype: str, token_buckets, row_buckets, attention=XLA, linear_kernel=None) -> str | None:
    definition, weights = flatten(tiny_decoder(dtype, hidden_size=256))  # short sums keep their bits in any case
    step = StepDefinition(
        definition, attention, row_buckets[-1], 20, None, linear_kernel, choose_norm(native=linear_kernel is not None)
    )
    return row_invariance(step, weights, token_buckets, row_buckets, Compiler(None, jax.devices()[:1]))


@pytest.mark.parametrize(("dtype", "buckets"), [("bfloat16", (8, 16)), ("float32", (64, 128))])
def test_rows_keep_their_bits_in_the_proven_buckets(dtype, buckets):
    assert smallest_bucket("cpu", jnp.dtype(dtype)) == buckets[0]
    assert check(dtype, buckets, buckets) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_rows_keep_their_bits_from_8_on_with_native_products(dtype):
    linear = choose_linear("native", jnp.dtype(dtype))
    assert smallest_bucket("cpu", jnp.dtype(dtype), linear_kernel=True) == 8
    assert check(dtype, (8, 128), (8, 128), choose_attention("native"), linear) is None


def test_a_layer_that_depends_on_its_bucket_is_found():
    def attend(q, *arguments, **options):
        out = XLA.attend(q, *arguments, **options)
        return out * jnp.bfloat16(1.01) if q.shape[0] == 8 else out

    found = check("bfloat16", (8, 16), (8, 8), XLA._replace(attend=attend))
    assert found == "a row of the layer has other bits among 8 rows than among 16 on this machine"


def test_a_head_that_depends_on_its_bucket_is_found(monkeypatch):
    def logits_of(head, hidden, linear):
        logits = jnp.dot(hidden, head, preferred_element_type=jnp.float32)
        # Rows of a small bucket read one bit differently in one place.
        return jnp.nextafter(logits, jnp.inf).at[1:].set(logits[1:]) if hidden.shape[0] == 8 else logits

    monkeypatch.setattr(determinism, "logits_of", logits_of)
    found = check("bfloat16", (8, 8), (8, 16))
    assert found == "a row of the head has other bits among 8 rows than among 16 on this machine"


def test_too_few_rows_in_float32_are_found():
    """The reason for buckets of at least 64 rows; should XLA change, `SMALLEST_BUCKET` may."""
    found = check("float32", (8, 8), (2, 64))
    assert found == "a row of the head has other bits among 2 rows than among 64 on this machine"


def test_what_is_not_proven_says_why():
    bfloat16 = jnp.dtype("bfloat16")
    assert unproven("cpu", bfloat16, PROVEN_ROWS) is None
    assert unproven("cpu", jnp.dtype("float16"), 64) is None
    assert "up to 512 tokens in a step, not for max_num_batched_tokens=513" in unproven("cpu", bfloat16, 513)
    assert "not proven for bfloat16 on the backend 'gpu'" in unproven("gpu", bfloat16, 8)
    assert "not proven for float64 on the backend 'cpu'" in unproven("cpu", jnp.dtype("float64"), 8)


def test_another_version_of_jax_is_not_proven(monkeypatch):
    monkeypatch.setattr(determinism, "jax", SimpleNamespace(__version__="0.12.1"))
    assert "proven for JAX 0.11.2 and 0.12.0, not for 0.12.1" in unproven("cpu", jnp.dtype("float32"), 64)
    monkeypatch.setattr(determinism, "jax", SimpleNamespace(__version__="0.12.0.1"))
    assert unproven("cpu", jnp.dtype("float32"), 64) is None


def test_an_engine_refuses_what_is_not_proven():
    options = SMALL | {"max_num_batched_tokens": 520, "num_pages": 64}
    with pytest.raises(ValueError, match=r"^deterministic=True: .*max_num_batched_tokens=520"):
        tiny_engine("bfloat16", **options, deterministic=True)
    with tiny_engine("bfloat16", **options, deterministic="auto") as engine:
        assert engine.stats()["deterministic"] == "false"


# ---- a GPU, as far as it goes without one ---------------------------------------------------------------

FITS = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "num_hidden_layers": 1}


class Gpu(NamedTuple):
    """What is decided at start about such a device."""

    compute_capability: str = "9.0"
    device_kind: str = "NVIDIA H200"
    platform: str = "gpu"


def prepared_on(gpu: Gpu, monkeypatch, dtype: str = "bfloat16", changes=FITS, **options):
    """What an engine would be on a GPU."""
    decoder = tiny_decoder(dtype, **changes)
    with monkeypatch.context() as patched:
        patched.setattr(jax, "local_devices", lambda: [gpu])
        patched.setattr(jax, "default_backend", lambda: "gpu")
        patched.setattr(startup, "device_memory", lambda device: 2**34)
        return prepare(EngineConfig(**{**SMALL, "deterministic": True, **options}), decoder, None)


def test_on_hopper_determinism_takes_the_kernels_in_layers_and_head(monkeypatch):
    found = prepared_on(Gpu(), monkeypatch, max_num_batched_tokens=2048)  # more than what was measured on CPUs
    assert (found.attention.name, found.linear_kernel, found.deterministic) == ("mosaic", MosaicLinear(), True)
    assert found.buckets.tokens[0] == found.buckets.rows[0] == 8
    for options in ({"deterministic": False}, {"deterministic": "auto"}):
        found = prepared_on(Gpu(), monkeypatch, **options)
        assert (found.attention.name, found.linear_kernel, found.deterministic) == ("mosaic", None, False)
    assert "not proven for bfloat16 on the backend 'gpu'" in found.not_proven


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"gpu": Gpu("8.0", "NVIDIA A100")}, "products.*'xla'.*9.0.*NVIDIA A100 has 8.0"),
        ({"dtype": "float32"}, "attention_backend is 'xla' and linear_backend is 'xla'.*not float32"),
        ({"changes": FITS | {"vocab_size": 300}}, "linear_backend is 'xla': head: both sides .* 64 and 300"),
        ({"changes": FITS | {"head_dim": 32}}, "but attention_backend is 'xla'$"),
        ({"linear_backend": "xla"}, "but linear_backend is 'xla'$"),
        ({"attention_backend": "xla"}, "but attention_backend is 'xla'$"),
    ],
    ids=str,
)
def test_on_a_gpu_without_the_kernels_determinism_is_refused_and_says_why(monkeypatch, given, reason):
    given = {"gpu": Gpu()} | given
    with pytest.raises(ValueError, match="^deterministic=True: on a GPU .*" + reason):
        prepared_on(monkeypatch=monkeypatch, **given)


@pytest.mark.slow
@pytest.mark.parametrize("differs", [False, True])
def test_what_was_chosen_by_construction_is_tested_at_start(monkeypatch, differs):
    """An engine as it starts on Hopper, both kernels interpreted: the test at start runs them, and decides."""
    interpret = interpreted(detect_races=False)
    attention = mosaic_backend(
        mosaic_attention(head_dim=64, group=2, max_model_len=64, config=MosaicTiles(interpret=interpret))
    )
    linear = LinearThatDiffers(interpret) if differs else MosaicLinear(interpret)
    decoder = tiny_decoder(**FITS)
    monkeypatch.setattr(startup, "choose_attention", lambda *_, **__: attention)
    monkeypatch.setattr(startup, "choose_linear", lambda *_, **__: linear)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    options = SMALL | {"max_num_batched_tokens": 16, "max_model_len": 64, "compile": "lazy"}
    if differs:
        with pytest.raises(ValueError, match=r"^deterministic=True: a row of the layer has other bits among 8 rows"):
            tiny_engine(decoder=decoder, **options)
    else:
        with tiny_engine(decoder=decoder, **options) as engine:
            assert engine.deterministic
            assert engine.runner.step.linear_kernel == linear


def test_kernels_of_different_kinds_are_not_equal():
    """Programs that bind equal values share what was traced (found by the test above, run behind another engine)."""
    assert LinearThatDiffers() != MosaicLinear()
    assert NativeLinear("target") != NativeNorm("target")


class LinearThatDiffers(MosaicLinear):
    """Rows of a small bucket are one bit larger."""

    def __call__(self, x, weight, out_dtype=None, *, count):
        product = super().__call__(x, weight, out_dtype, count=count)
        return product * jnp.asarray(1.01, product.dtype) if x.shape[0] == 8 else product


# ---- engines --------------------------------------------------------------------------------------------


def test_an_engine_refuses_a_machine_that_differs(monkeypatch):
    monkeypatch.setattr(determinism, "row_invariance", lambda *_: "a row differs on this machine")
    with pytest.raises(ValueError, match=r"^deterministic=True: a row differs on this machine$"):
        tiny_engine("bfloat16", **SMALL, deterministic=True)
    with tiny_engine("bfloat16", **SMALL, deterministic="auto") as engine:
        assert engine.stats()["deterministic"] == "false"


def test_an_engine_says_that_it_is_deterministic_and_pays_only_if_it_is(monkeypatch):
    monkeypatch.setattr(determinism, "row_invariance", lambda *_: None)
    with tiny_engine("float32", **SMALL, deterministic="auto", linear_backend="xla") as engine:
        assert engine.stats()["deterministic"] == "true"
        assert engine.runner.buckets.tokens == engine.runner.buckets.rows == (64,)
    with tiny_engine("float32", **SMALL, deterministic="auto", linear_backend="native") as engine:
        assert engine.stats()["deterministic"] == "true"
        assert engine.runner.buckets.tokens == engine.runner.buckets.rows == (8,)
    with tiny_engine("float32", **SMALL, deterministic=False) as engine:
        assert engine.stats()["deterministic"] == "false"
        assert engine.runner.buckets.tokens == (8,)
