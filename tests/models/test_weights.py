import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_models import GOLDEN_NAMES, load_golden

from jaxserve.models.config import CheckpointError, ModelConfig
from jaxserve.models.registry import Fuse
from jaxserve.models.weights import (
    build_decoder,
    check_tensors,
    decoder_leaves,
    fuse_tensors,
    random_decoder,
    tensor_shapes,
)

GOLDEN = load_golden("qwen2")
CONFIG = ModelConfig.from_hf(GOLDEN.config)  # 4 query heads of 16, 2 KV heads, biases, tied
FOUND = {name: value.shape for name, value in GOLDEN.weights.items()}


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_names_and_shapes_are_those_that_transformers_stores(name):
    golden = load_golden(name)
    stored = {name: value.shape for name, value in golden.weights.items()}
    assert tensor_shapes(ModelConfig.from_hf(golden.config)) == stored


def test_missing_and_unused_tensors_are_both_listed():
    found = dict(FOUND)
    del found["model.norm.weight"]
    found["model.extra.weight"] = (3,)
    with pytest.raises(CheckpointError) as error:
        check_tensors(CONFIG, found, "a/folder")
    assert "a/folder" in str(error.value)
    assert "missing: model.norm.weight" in str(error.value)
    assert "not used by the model: model.extra.weight" in str(error.value)


def test_biases_that_the_config_denies_are_unused_tensors():
    with pytest.raises(CheckpointError, match=r"missing: none; not used .*layers\.0\.self_attn\.k_proj\.bias"):
        check_tensors(dataclasses.replace(CONFIG, qkv_bias=False), FOUND, "folder")


def test_stored_frequencies_are_ignored():
    check_tensors(CONFIG, FOUND | {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}, "folder")


def test_a_wrong_shape_is_named():
    found = FOUND | {"model.layers.1.mlp.down_proj.weight": (64, 95)}
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight' has shape \[64, 95\].*\[64, 96\]"):
        check_tensors(CONFIG, found, "folder")


def test_long_lists_are_cut():
    with pytest.raises(CheckpointError, match=r"and \d+ more"):
        check_tensors(CONFIG, {}, "folder")


def test_queries_of_a_group_come_before_its_key_and_value():
    q, k, v = (GOLDEN.weights[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkv")
    fused = fuse_tensors(Fuse.QKV, [q, k, v], CONFIG)
    assert fused.shape == (64, 2, 4 * 16)
    group = 1
    np.testing.assert_array_equal(fused[:, group, :32], q[32:64].T)
    np.testing.assert_array_equal(fused[:, group, 32:48], k[16:32].T)
    np.testing.assert_array_equal(fused[:, group, 48:], v[16:32].T)


def test_the_other_fusions():
    weights = {name.removeprefix("model.layers.0."): value for name, value in GOLDEN.weights.items()}
    out, gate, up = (weights[n] for n in ("self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"))
    np.testing.assert_array_equal(fuse_tensors(Fuse.OUT, [out], CONFIG)[1, 5], out[:, 32 + 5])
    fused = fuse_tensors(Fuse.GATE_UP, [gate, up], CONFIG)
    np.testing.assert_array_equal(fused[:, 1], up.T)
    np.testing.assert_array_equal(fused[:, 0], gate.T)


def test_leaves_are_cast_copied_and_in_their_place():
    read_names = []

    def read(name):
        read_names.append(name)
        return GOLDEN.weights[name]

    decoder = build_decoder(CONFIG, dtype=jnp.bfloat16, read=read)
    assert sorted(read_names) == sorted(GOLDEN.weights)
    state = nnx.state(decoder)
    shapes = [leaf.shape for leaf in decoder_leaves(CONFIG)]
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == shapes
    assert all(leaf.dtype == jnp.bfloat16 and jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    np.testing.assert_array_equal(
        np.asarray(decoder.layers[2].down[...], np.float32),
        GOLDEN.weights["model.layers.2.mlp.down_proj.weight"].T,
    )


def test_leaves_are_no_views_of_what_was_read():
    weights = {}
    for name, value in GOLDEN.weights.items():
        buffer = np.empty(value.nbytes + 64, np.uint8)
        aligned = buffer[-buffer.ctypes.data % 64 :][: value.nbytes]  # JAX aliases aligned memory on the CPU
        weights[name] = aligned.view(np.float32).reshape(value.shape)
        weights[name][...] = value
    decoder = build_decoder(CONFIG, dtype=jnp.float32, read=weights.__getitem__)
    for value in weights.values():
        value[...] = np.nan
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(nnx.state(decoder)))


def test_a_mesh_splits_the_leaves(cpu_devices):
    mesh = jax.sharding.Mesh(np.array(cpu_devices[:2]), ("model",))
    decoder = build_decoder(CONFIG, dtype=jnp.float32, read=GOLDEN.weights.__getitem__, mesh=mesh)
    qkv = decoder.layers[0].qkv[...]
    assert {shard.data.shape for shard in qkv.addressable_shards} == {(64, 1, 64)}
    assert decoder.embed[...].sharding.is_fully_replicated
    config = dataclasses.replace(CONFIG, intermediate_size=97)
    with pytest.raises(ValueError, match="does not divide intermediate_size=97"):
        build_decoder(config, dtype=jnp.float32, read=GOLDEN.weights.__getitem__, mesh=mesh)


def test_a_reader_that_returns_a_wrong_shape_is_caught():
    def read(name):
        value = GOLDEN.weights[name]
        return value[:-1] if name == "model.norm.weight" else value

    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: shape \(63,\) instead of \(64,\) for norm\.scale"):
        build_decoder(CONFIG, dtype=jnp.float32, read=read)


def test_random_decoders_follow_their_seed_and_have_sharp_logits():
    @nnx.jit
    def run(decoder):
        return decoder.logits(decoder(jnp.arange(32, dtype=jnp.int32), jnp.arange(32, dtype=jnp.int32)))

    first, again, other = (np.asarray(run(random_decoder(CONFIG, seed))) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.5
    assert 0.5 < first.std() < 2
