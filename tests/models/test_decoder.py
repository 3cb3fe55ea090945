import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_models import GOLDEN_NAMES, load_golden, write_checkpoint

from jaxserve.checkpoint.hugging_face import load_hugging_face
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder, RMSNorm, causal_attention, linear, random_decoder

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
LENGTH = 112  # every golden sequence fits; one length for all, so that the compiled operations are shared
TOKENS = jnp.arange(10, dtype=jnp.int32) * 5


def run(decoder: Decoder, tokens) -> jax.Array:
    tokens = jnp.asarray(tokens, jnp.int32)
    return decoder.logits(decoder(tokens, jnp.arange(len(tokens), dtype=jnp.int32)))


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
    decoder = random_decoder(TINY)
    first, second, third = (nnx.split(layer)[0] for layer in decoder.layers)
    assert first == second
    assert hash(first) == hash(second)
    assert first != third  # it has a window


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attention_and_products_are_called_as_the_contract_says(dtype):
    decoder, calls = random_decoder(TINY, dtype=dtype), []

    def attend(q, k, v, *, scale, window):
        calls.append((q.shape, k.shape, v.shape, scale, window))
        return causal_attention(q, k, v, scale=scale, window=window)

    def product(x, weight, out_dtype=None):
        calls.append((x.shape, weight.shape, out_dtype))
        return linear(x, weight, out_dtype)

    hidden = decoder(TOKENS, jnp.arange(10, dtype=jnp.int32), attend, product)
    logits = decoder.logits(hidden, product)
    assert (hidden.dtype, logits.dtype) == (dtype, jnp.float32)
    assert len(calls) == 3 * 5 + 1
    assert calls[-5:] == [
        ((10, 6, 8), (10, 2, 8), (10, 2, 8), 8**-0.5, 4),
        ((10, 48), (48, 32), None),
        ((10, 32), (32, 2, 48), None),
        ((10, 48), (48, 32), None),
        ((10, 32), (32, 64), jnp.float32),
    ]


def test_a_tied_head_is_the_embedding():
    tied = random_decoder(dataclasses.replace(TINY, tie_word_embeddings=True))
    assert tied.head is None
    hidden = jax.random.normal(jax.random.key(0), (3, 32), jnp.float32)
    np.testing.assert_allclose(
        tied.logits(hidden), np.asarray(hidden) @ np.asarray(tied.embed[...]).T, atol=1e-5
    )


def test_bfloat16_logits_are_not_rounded():
    logits = np.asarray(run(random_decoder(TINY, dtype=jnp.bfloat16), TOKENS))
    assert (logits != logits.astype(jnp.bfloat16).astype(np.float32)).any()


def test_bfloat16_is_close_to_float32():
    decoder = random_decoder(TINY, dtype=jnp.bfloat16)
    exact = random_decoder(TINY)
    graphdef, _ = nnx.split(exact)
    widened = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), nnx.state(decoder))
    assert np.abs(run(decoder, TOKENS) - run(nnx.merge(graphdef, widened), TOKENS)).max() < 0.1


def test_x64_changes_no_dtype_and_no_bit():
    decoder = random_decoder(TINY)
    expected = run(decoder, TOKENS)
    with jax.enable_x64(True):
        assert jnp.arange(3).dtype == jnp.int64
        result = run(decoder, TOKENS)
        fresh = random_decoder(TINY)
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(fresh))} == {jnp.dtype(jnp.float32)}


def test_float32_products_ignore_a_foreign_default_precision():
    decoder = random_decoder(TINY)
    with jax.default_matmul_precision("bfloat16"):
        jaxpr = jax.make_jaxpr(lambda tokens: run(decoder, tokens))(TOKENS)
    lines = str(jaxpr)
    assert lines.count("dot_general") == 3 * 6 + 1
    assert lines.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") + lines.count(
        "precision=Precision.HIGHEST"
    ) == lines.count("dot_general")


def test_norms_round_before_the_scale_as_transformers_does():
    norm = RMSNorm(32, eps=1e-6, dtype=jnp.bfloat16)
    norm.scale[...] = jnp.linspace(0.5, 1.7, 32, dtype=jnp.float32).astype(jnp.bfloat16)
    x = jax.random.normal(jax.random.key(0), (4, 32), jnp.float32).astype(jnp.bfloat16)
    wide = np.asarray(x, np.float32)
    rounded = jnp.asarray(wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(norm(x), norm.scale[...] * rounded)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_causal_attention_by_the_definition(window):
    keys = jax.random.split(jax.random.key(1), 3)
    q, k, v = (
        jax.random.normal(key, (7, heads, 4), jnp.float32) for key, heads in zip(keys, (6, 2, 2), strict=True)
    )
    result = np.asarray(causal_attention(q, k, v, scale=0.5, window=window))
    for head in range(6):
        for i in range(7):
            seen = range(max(0, i - (window or 7) + 1), i + 1)
            scores = np.array([0.5 * np.dot(q[i, head], k[j, head // 3]) for j in seen], np.float64)
            weights = np.exp(scores) / np.exp(scores).sum()
            expected = sum(w * np.asarray(v[j, head // 3]) for w, j in zip(weights, seen, strict=True))
            np.testing.assert_allclose(result[i, head], expected, atol=1e-5)


def test_every_parameter_can_be_trained():
    config = dataclasses.replace(TINY, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True)

    @nnx.jit
    def gradients(decoder):
        def loss(decoder):
            log_probs = jax.nn.log_softmax(run(decoder, TOKENS)[:-1])
            return -jnp.mean(jnp.take_along_axis(log_probs, TOKENS[1:, None], axis=1))

        return nnx.grad(loss)(decoder)

    leaves = jax.tree.leaves(gradients(random_decoder(config)))
    assert len(leaves) == 3 + 12 * 3
    assert all(np.isfinite(leaf).all() and np.abs(leaf).max() > 0 for leaf in leaves)


def test_random_decoders_follow_their_seed_and_have_sharp_logits():
    first, again, other = (np.asarray(run(random_decoder(TINY, seed), TOKENS)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.5
    assert 0.5 < first.std() < 2
