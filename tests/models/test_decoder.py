import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_models import GOLDEN_NAMES, load_golden, write_checkpoint

from jaxserve.checkpoint.hugging_face import load_hugging_face
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder, RMSNorm, causal_attention, linear
from jaxserve.models.weights import abstract_decoder, random_decoder

TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    windows=(None, None, 4),
    uses_rope=(True, True, True),
)
ONE_LAYER = dataclasses.replace(TINY, num_layers=1, windows=(4,), uses_rope=(True,))
LENGTH = 112  # every golden sequence fits; one length for all, so that the compiled operations are shared
TOKENS = jnp.arange(10, dtype=jnp.int32) * 5


def run(decoder: Decoder, tokens) -> jax.Array:
    tokens = jnp.asarray(tokens, jnp.int32)
    return decoder.logits(decoder(tokens, jnp.arange(len(tokens), dtype=jnp.int32)))


run_compiled = nnx.jit(run)


def run_golden(golden, decoder: Decoder) -> np.ndarray:
    """Logits of prompt and continuation; the padding behind them is seen by no position before it."""
    sequence = np.zeros(LENGTH, np.int32)
    known = np.concatenate([golden.prompt, golden.continuation])
    sequence[: len(known)] = known
    return np.asarray(run(decoder, sequence))


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    def load(name: str):
        golden = load_golden(name)
        folder = write_checkpoint(golden, tmp_path_factory.mktemp(name))
        return golden, load_hugging_face(folder, max_model_len=golden.max_model_len)

    return load


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_logits_and_greedy_continuation_are_those_of_transformers(name, load):
    golden, decoder = load(name)
    logits = run_golden(golden, decoder)
    prompt = len(golden.prompt)
    np.testing.assert_allclose(logits[:prompt], golden.logits, atol=1e-4, rtol=0)
    length = golden.certain_length()
    assert length == len(golden.continuation) == (0 if name == "dynamic_prompt" else 64)
    greedy = logits[prompt - 1 :].argmax(axis=-1)
    np.testing.assert_array_equal(greedy[:length], golden.continuation[:length])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral", lambda c: {"windows": (c.windows[0] + 1,) * c.num_layers}),
        ("qwen2", lambda c: {"windows": (None,) * c.num_layers}),
        ("smollm3", lambda c: {"uses_rope": (True,) * c.num_layers}),
        ("llama3", lambda c: {"rope_theta": 10_000.0}),
        ("llama3", lambda c: {"rope_scaling": dataclasses.replace(c.rope_scaling, kind="default")}),
        ("linear", lambda c: {"rope_scaling": dataclasses.replace(c.rope_scaling, factor=1.0)}),
        ("yarn", lambda c: {"rope_scaling": dataclasses.replace(c.rope_scaling, attention_factor=1.0)}),
        ("dynamic", lambda c: {"rope_scaling": dataclasses.replace(c.rope_scaling, length=111)}),
        ("llama2", lambda c: {"rms_norm_eps": 1e-4}),
    ],
)
def test_goldens_notice_a_wrong_configuration(name, change, load):
    golden, decoder = load(name)
    decoder.config = dataclasses.replace(decoder.config, **change(decoder.config))
    for index, layer in enumerate(decoder.layers):
        layer.window, layer.uses_rope = decoder.config.windows[index], decoder.config.uses_rope[index]
        layer.attention_norm.eps = layer.mlp_norm.eps = decoder.config.rms_norm_eps
    error = np.abs(run_golden(golden, decoder)[: len(golden.prompt)] - golden.logits).max()
    assert error > 2e-4


def test_layers_of_one_structure_share_a_graph_definition():
    first, second, third = (nnx.split(layer)[0] for layer in abstract_decoder(TINY).layers)
    assert first == second
    assert hash(first) == hash(second)
    assert first != third  # it has a window


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attention_and_products_are_called_as_the_contract_says(dtype):
    calls = []

    def attend(q, k, v, *, scale, window):
        calls.append((q.shape, k.shape, v.shape, scale, window))
        return causal_attention(q, k, v, scale=scale, window=window)

    def product(x, weight, out_dtype=None):
        calls.append((x.shape, weight.shape, out_dtype))
        return linear(x, weight, out_dtype)

    def trace():
        decoder = Decoder(TINY, rngs=nnx.Rngs(0), dtype=dtype)
        hidden = decoder(TOKENS, jnp.arange(10, dtype=jnp.int32), attend, product)
        return hidden, decoder.logits(hidden, product)

    hidden, logits = jax.eval_shape(trace)
    assert (hidden.shape, hidden.dtype) == ((10, 32), dtype)
    assert (logits.shape, logits.dtype) == ((10, 64), jnp.float32)
    assert len(calls) == 3 * 5 + 1
    assert calls[-6:] == [
        ((10, 32), (32, 2, 40), None),
        ((10, 6, 8), (10, 2, 8), (10, 2, 8), 8**-0.5, 4),
        ((10, 48), (48, 32), None),
        ((10, 32), (32, 2, 48), None),
        ((10, 48), (48, 32), None),
        ((10, 32), (32, 64), jnp.float32),
    ]


def test_a_tied_head_is_the_embedding():
    tied = random_decoder(dataclasses.replace(TINY, tie_word_embeddings=True))
    assert tied.head is None
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(3, 32)), jnp.float32)
    np.testing.assert_allclose(tied.logits(hidden), np.asarray(hidden) @ np.asarray(tied.embed[...]).T, atol=1e-5)


def test_bfloat16_logits_are_not_rounded():
    logits = np.asarray(run_compiled(random_decoder(TINY, dtype=jnp.bfloat16), TOKENS))
    assert (logits != logits.astype(jnp.bfloat16).astype(np.float32)).any()


def test_bfloat16_is_close_to_float32():
    decoder = random_decoder(TINY, dtype=jnp.bfloat16)
    exact = random_decoder(TINY)
    graphdef, _ = nnx.split(exact)
    widened = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), nnx.state(decoder))
    error = run_compiled(decoder, TOKENS) - run_compiled(nnx.merge(graphdef, widened), TOKENS)
    assert 0 < np.abs(error).max() < 0.1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_x64_brings_no_wide_type_into_the_program(dtype):
    with jax.enable_x64(True):
        assert jnp.arange(3).dtype == jnp.int64
        program = jax.make_jaxpr(lambda: run(Decoder(TINY, rngs=nnx.Rngs(0), dtype=dtype), np.arange(10)))()
    assert re.search(r"\b(f32|bf16|i32)\[", str(program))
    assert not re.search(r"\b(f64|i64)\[\w", str(program))


def test_float32_products_ignore_a_foreign_default_precision():
    with jax.default_matmul_precision("bfloat16"):
        program = str(jax.make_jaxpr(lambda: run(random_decoder(TINY), TOKENS))())
    products, norms = 3 * 6 + 1, 3 * 2 + 1  # a norm sums by a product
    assert program.count("dot_general") == products + norms
    assert program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == products + norms


def test_norms_round_before_the_scale_as_transformers_does():
    norm = RMSNorm(32, eps=1e-6, dtype=jnp.bfloat16)
    norm.scale[...] = jnp.linspace(0.5, 1.7, 32, dtype=jnp.float32).astype(jnp.bfloat16)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 32)), jnp.bfloat16)
    wide = np.asarray(x, np.float32)
    rounded = jnp.asarray(wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(norm(x), norm.scale[...] * rounded)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_causal_attention_by_the_definition(window):
    generator = np.random.default_rng(1)
    q, k, v = (generator.normal(size=(7, heads, 4)).astype(np.float32) for heads in (6, 2, 2))
    attention = jax.jit(causal_attention, static_argnames=("scale", "window"))
    result = np.asarray(attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), scale=0.5, window=window))
    for head in range(6):
        for i in range(7):
            seen = range(max(0, i - (window or 7) + 1), i + 1)
            scores = np.array([0.5 * np.dot(q[i, head], k[j, head // 3]) for j in seen])
            weights = np.exp(scores) / np.exp(scores).sum()
            expected = sum(w * v[j, head // 3] for w, j in zip(weights, seen, strict=True))
            np.testing.assert_allclose(result[i, head], expected, atol=1e-5)


def test_every_parameter_can_be_trained():
    config = dataclasses.replace(ONE_LAYER, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True)

    @nnx.jit
    def gradients(decoder):
        def loss(decoder):
            log_probs = jax.nn.log_softmax(run(decoder, TOKENS)[:-1])
            return -jnp.mean(jnp.take_along_axis(log_probs, TOKENS[1:, None], axis=1))

        return nnx.grad(loss)(decoder)

    leaves = jax.tree.leaves(gradients(random_decoder(config)))
    assert len(leaves) == 3 + 12
    assert all(np.isfinite(leaf).all() and np.abs(leaf).max() > 0 for leaf in leaves)


def test_a_new_decoder_is_scaled_for_training():
    with jax.default_prng_impl("rbg"):  # a foreign default, and quicker to compile
        decoder = nnx.jit(lambda: Decoder(ONE_LAYER, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))()
    layer = decoder.layers[0]
    for matrix, fan_in in ((decoder.embed, 32), (decoder.head, 32), (layer.out, 48), (layer.down, 48)):
        values = np.asarray(matrix[...], np.float32)
        assert matrix.dtype == jnp.bfloat16
        assert values.std() == pytest.approx(fan_in**-0.5, rel=0.1)
    assert (layer.mlp_norm.scale[...] == 1).all()
