"""The noise: known answers, uniformity, independence, and no dependence on JAX's configuration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxserve.kernels_pallas.verify_draft import noise

# Each statistical test fails by chance with this probability per comparison; seeds are fixed.
ALPHA = 1e-4


def bits(seed: tuple[int, int], positions: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """[positions, ids] random bits."""
    seeds = jnp.broadcast_to(jnp.array(seed, jnp.uint32), (len(positions), 2))
    keys = noise.row_keys(seeds, jnp.asarray(positions, jnp.int32))
    return np.asarray(noise.token_bits(keys[:, :1], keys[:, 1:], jnp.asarray(ids, jnp.int32)[None]))


@pytest.mark.parametrize(
    ("key", "counter", "answer"),
    [  # Random123's known-answer file
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_known_answers(key, counter, answer):
    pair = lambda words: tuple(jnp.array([word], jnp.uint32) for word in words)
    assert tuple(int(word[0]) for word in noise.threefry_2x32(pair(key), pair(counter))) == answer


@pytest.mark.parametrize("seed", [(0, 0), (1, 0), (0, 1), (2**32 - 1, 2**32 - 1)])
def test_uniform_over_ids_and_over_positions(seed):
    both = noise.uniform(jnp.asarray(bits(seed, np.arange(200), np.arange(1000))))
    for sample in (both[0], both[:, 0], both[7], both[:, 999], both.ravel()):
        assert scipy.stats.kstest(np.asarray(sample, np.float64), "uniform").pvalue > ALPHA


def test_every_bit_is_fair_and_uncorrelated_with_its_neighbours():
    drawn = np.unpackbits(bits((3, 4), np.arange(256), np.arange(512)).view(np.uint8)).reshape(256, 512, 32)
    signs = drawn.astype(np.int8) * 2 - 1
    products = [signs, signs[:-1] * signs[1:], signs[:, :-1] * signs[:, 1:], signs[:, :-64] * signs[:, 64:]]
    for values in products:
        z = values.sum(axis=(0, 1)) / np.sqrt(values[..., 0].size)
        assert np.abs(z).max() < scipy.stats.norm.isf(ALPHA / 64)


def test_near_seeds_positions_and_ids_give_unrelated_noise():
    base = bits((5, 6), np.arange(64), np.arange(1024))
    others = [
        bits((6, 6), np.arange(64), np.arange(1024)),
        bits((5, 7), np.arange(64), np.arange(1024)),
        bits((5, 6), np.arange(1, 65), np.arange(1024)),
        bits((5, 6), np.arange(64), np.arange(1, 1025)),
    ]
    for other in others:
        correlation = np.corrcoef(base.ravel(), other.ravel())[0, 1]
        assert abs(correlation) * np.sqrt(base.size) < scipy.stats.norm.isf(ALPHA / 2)


def test_uniform_stays_inside_the_unit_interval():
    ends = np.asarray(noise.uniform(jnp.array([0, 1, 2, 2**32 - 1], jnp.uint32)))
    assert 0 < ends[0] == ends[1] < ends[2] < ends[3] < 1
    keys = jnp.zeros((1, 2), jnp.uint32)
    assert np.isfinite(noise.negative_gumbel(keys, jnp.arange(100_000, dtype=jnp.int32)[None])).all()


def test_negative_gumbel_has_its_distribution():
    keys = noise.row_keys(jnp.array([[1, 2]], jnp.uint32), jnp.array([3], jnp.int32))
    drawn = np.asarray(noise.negative_gumbel(keys, jnp.arange(100_000, dtype=jnp.int32)[None]), np.float64)[0]
    assert scipy.stats.kstest(-drawn, "gumbel_r").pvalue > ALPHA


def test_the_users_prng_and_x64_settings_change_nothing():
    def draw():
        seeds, positions = jnp.array([[9, 8]], jnp.uint32), jnp.array([5], jnp.int32)
        return np.asarray(jax.jit(noise.row_keys)(seeds, positions)), bits((1, 2), np.arange(3), np.arange(9))

    before = draw()
    settings = [jax.default_prng_impl("rbg"), jax.threefry_partitionable(False), jax.enable_x64(True)]
    for setting in settings:
        with setting:
            after = draw()
        for one, other in zip(before, after, strict=True):
            assert one.dtype == other.dtype == np.uint32
            np.testing.assert_array_equal(one, other)
