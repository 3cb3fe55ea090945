import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_models import load_golden
from jax.sharding import PartitionSpec

from jaxserve.models.config import ModelConfig
from jaxserve.models.sharding import check_mesh, parameter_sharding, partition_spec
from jaxserve.models.weights import build_decoder, decoder_leaves

CONFIG = ModelConfig.from_hf(load_golden("llama_biases").config)


def test_every_parameter_has_a_spec_that_fits_its_shape(cpu_devices):
    mesh = jax.sharding.Mesh(np.array(cpu_devices[:2]), ("model",))
    config = dataclasses.replace(CONFIG, qk_norm=True)
    split = set()
    for leaf in decoder_leaves(config):
        local = parameter_sharding(mesh, leaf.path).shard_shape(leaf.shape)
        if local != leaf.shape:
            split.add(leaf.path.rpartition(".")[2])
    assert split == {"qkv", "qkv_bias", "out", "gate_up", "gate_up_bias", "down"}


def test_specs_by_path():
    assert partition_spec("layers.3.qkv") == PartitionSpec(None, "model", None)
    assert partition_spec("layers.11.attention_norm.scale") == PartitionSpec()
    assert partition_spec("embed") == PartitionSpec()
    with pytest.raises(ValueError, match=r"'layers\.0\.router'.*gate_up"):
        partition_spec("layers.0.router")


def test_a_mesh_must_divide_heads_and_columns(cpu_devices):
    mesh = jax.sharding.Mesh(np.array(cpu_devices[:2]), ("model",))
    check_mesh(CONFIG, mesh)
    with pytest.raises(ValueError, match="size 2 does not divide num_key_value_heads=1"):
        check_mesh(dataclasses.replace(CONFIG, num_kv_heads=1), mesh)
    with pytest.raises(ValueError, match="size 2 does not divide intermediate_size=97"):
        check_mesh(dataclasses.replace(CONFIG, intermediate_size=97), mesh)
    with pytest.raises(ValueError, match="lack the axis 'model'"):
        check_mesh(CONFIG, jax.sharding.Mesh(np.array(cpu_devices[:2]), ("data",)))


def test_a_split_model_gives_the_same_logits(cpu_devices):
    mesh = jax.sharding.Mesh(np.array(cpu_devices[:2]), ("model",))
    read = load_golden("llama_biases").weights.__getitem__
    tokens = jnp.arange(12, dtype=jnp.int32)

    def run(decoder):
        graphdef, state = nnx.split(decoder)

        def logits(state):
            decoder = nnx.merge(graphdef, state)
            return decoder.logits(decoder(tokens, tokens))

        program = jax.jit(logits).lower(state).compile()
        return program(state), program.as_text()

    alone, text = run(build_decoder(CONFIG, dtype=jnp.float32, read=read))
    assert "all-reduce" not in text
    split, text = run(build_decoder(CONFIG, dtype=jnp.float32, read=read, mesh=mesh))
    assert "all-reduce" in text
    np.testing.assert_allclose(split, alone, atol=1e-5)
