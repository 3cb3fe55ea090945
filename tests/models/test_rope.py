import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.config import CheckpointError, UnsupportedModelError
from jaxserve.models.rope import RopeScaling, inverse_frequencies, rope_from_hf, rope_tables, rotate


def read(config, max_position=128, max_model_len=None):
    return rope_from_hf(config, default_theta=1e4, max_position=max_position, max_model_len=max_model_len)


def test_default_frequencies_are_powers_of_theta():
    expected = 1e4 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(inverse_frequencies(1e4, 8, RopeScaling()), expected, rtol=1e-6)


def test_linear_divides_every_frequency():
    plain = inverse_frequencies(1e4, 16, RopeScaling())
    np.testing.assert_allclose(inverse_frequencies(1e4, 16, RopeScaling(kind="linear", factor=4.0)), plain / 4)


def test_llama3_keeps_high_frequencies_and_divides_low_ones():
    scaling = RopeScaling(kind="llama3", factor=8.0, original_length=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    ratio = inverse_frequencies(5e5, 128, scaling) / inverse_frequencies(5e5, 128, RopeScaling())
    wavelengths = 2 * np.pi / inverse_frequencies(5e5, 128, RopeScaling())
    np.testing.assert_allclose(ratio[wavelengths < 8192 / 4], 1)
    np.testing.assert_allclose(ratio[wavelengths > 8192], 1 / 8)
    between = ratio[(wavelengths > 8192 / 4) & (wavelengths < 8192)]
    assert between.size
    assert ((between > 1 / 8) & (between < 1)).all()


def test_dynamic_is_fixed_at_max_model_len_and_never_below_the_trained_length():
    config = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    plain = inverse_frequencies(1e4, 8, RopeScaling())
    for max_model_len in (None, 64, 128):
        np.testing.assert_allclose(inverse_frequencies(1e4, 8, read(config, 128, max_model_len)[1]), plain)
    stretched = inverse_frequencies(1e4, 8, read(config, 128, 256)[1])
    theta = 1e4 * (2.0 * 256 / 128 - 1) ** (8 / 6)
    np.testing.assert_allclose(stretched, theta ** (-np.arange(0, 8, 2) / 8), rtol=1e-6)


def test_yarn_attention_factor_is_inferred_given_or_a_ratio():
    values = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    inferred = 0.1 * np.log(4.0) + 1
    assert read({"rope_scaling": values})[1].attention_factor == pytest.approx(inferred)
    given = read({"rope_scaling": values | {"attention_factor": 1.5}})[1]
    assert given.attention_factor == 1.5
    ratio = read({"rope_scaling": values | {"mscale": 2.0, "mscale_all_dim": 1.0}})[1]
    assert ratio.attention_factor == pytest.approx((0.2 * np.log(4.0) + 1) / inferred)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    values = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    plain = inverse_frequencies(1e4, 64, RopeScaling())
    ratio = inverse_frequencies(1e4, 64, read({"rope_scaling": values})[1]) / plain
    # 4096 positions are 32 rotations at pair 10.5 and one at pair 22.5: the ramp goes from 10 to 23
    np.testing.assert_allclose(ratio[:11], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[23:], 1 / 4, rtol=1e-6)
    np.testing.assert_allclose(ratio[11:23], 1 - 0.75 * np.arange(1, 13) / 13, rtol=1e-5)


def test_yarn_without_truncation_has_another_ramp():
    values = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    whole = inverse_frequencies(1e4, 64, read({"rope_scaling": values})[1])
    exact = inverse_frequencies(1e4, 64, read({"rope_scaling": values | {"truncate": False}})[1])
    assert 0 < np.abs(whole / exact - 1).max() < 0.2


def test_both_ways_of_writing_give_the_same():
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    new = read({"rope_parameters": llama3 | {"rope_theta": 5e5}})
    old = rope_from_hf({"rope_scaling": llama3}, default_theta=5e5, max_position=128, max_model_len=None)
    assert new == old
    assert new[1].original_length == 128
    assert read({"rope_scaling": None}) == (1e4, RopeScaling())


@pytest.mark.parametrize(
    ("values", "error", "parts"),
    [
        ({"rope_type": "longrope"}, UnsupportedModelError, ("rope_type='longrope'", "llama3")),
        ({"rope_type": "lama3"}, UnsupportedModelError, ("did you mean 'llama3'",)),
        ({"rope_type": "linear"}, CheckpointError, ("rope_scaling: the field 'factor' is missing",)),
        ({"rope_type": "linear", "factor": -1}, CheckpointError, ("factor=-1", "positive")),
        (
            {"type": "default", "partial_rotary_factor": 0.5},
            UnsupportedModelError,
            ("partial_rotary_factor=0.5",),
        ),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            CheckpointError,
            ("low_freq_factor=4.0", "below high_freq_factor=4.0"),
        ),
    ],
)
def test_a_wrong_scaling_is_named(values, error, parts):
    with pytest.raises(error) as caught:
        read({"rope_scaling": values})
    assert all(part in str(caught.value) for part in ("config.json", *parts))


def test_tables_are_the_angles_cosines_and_sines_times_the_factor():
    positions = np.array([0, 1, 5, 1000], np.int32)
    frequencies = inverse_frequencies(1e4, 8, RopeScaling())
    cos, sin = rope_tables(jnp.asarray(positions), frequencies, 1.5)
    angles = (positions.astype(np.float32)[:, None] * frequencies[None, :]).astype(np.float64)
    np.testing.assert_allclose(cos, 1.5 * np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin, 1.5 * np.sin(angles), atol=1e-6)
    with jax.enable_x64(True):
        assert rope_tables(jnp.asarray(positions), frequencies, 1.5)[0].dtype == jnp.float32


def test_rotation_turns_the_pairs_of_both_halves_and_rounds_once():
    x = np.random.default_rng(0).normal(size=(3, 2, 8)).astype(np.float32)
    angles = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)[:, None, :]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(rotate(jnp.asarray(x), cos, sin), expected, atol=1e-6)
    low = rotate(jnp.asarray(x, jnp.bfloat16), cos, sin)
    exact = rotate(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32), cos, sin)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_array_equal(low, exact.astype(jnp.bfloat16))
