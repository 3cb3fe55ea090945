"""A model split over two CPU devices gives one device's logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_tools import TINY, run

from jaxserve import Engine, SamplingParams
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.weights import build_decoder, tensor_shapes
from jaxserve.runner import inputs, slots

CONFIG = ModelConfig.from_hf(
    {**TINY, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
)
OPTIONS = {
    "num_pages": 32,
    "max_num_batched_tokens": 8,
    "max_num_seqs": 8,
    "max_model_len": 64,
    "deterministic": False,
}


@pytest.fixture(scope="module")
def mesh(cpu_devices):
    return jax.sharding.Mesh(np.array(cpu_devices[:2]), ("model",))


def decoder(mesh, config: ModelConfig = CONFIG) -> Decoder:
    random = np.random.default_rng(0)
    tensors = {
        name: np.float32(random.standard_normal(shape) / np.sqrt(shape[-1]) + (len(shape) == 1))
        for name, shape in tensor_shapes(config).items()
    }
    return build_decoder(config, dtype=jnp.dtype("float32"), read=tensors.__getitem__, mesh=mesh)


def body_logits(engine: Engine, prompt: list[int]) -> tuple[np.ndarray, str]:
    """The logits behind a prompt of one step, computed by hand from the body's hidden row; the body's text."""
    runner = engine.runner
    params = SamplingParams(max_tokens=1)
    runner.admit(
        slots.pack_admission(0, prompt, [3], 0, 0, params, 0, len(prompt), None, runner.max_len, runner.max_pages)
    )
    tokens = runner.buckets.token_bucket(len(prompt))
    packed = inputs.pack_body(inputs.Runs.of([(0, 0, len(prompt), True)]), [], tokens, 8, runner.step.attention.work)
    (program,) = (p for p in runner.programs() if p.key == ("body", tokens))
    body = runner.compiler.get(program)
    runner.kv, runner.slots, hidden, finite = body(runner.weights, runner.kv, runner.slots, packed)
    assert finite.all()
    return np.asarray(hidden)[len(prompt) - 1] @ np.asarray(runner.weights.head), body.as_text()


def test_two_devices_give_the_logits_and_the_generation_of_one(mesh, tmp_path_factory):
    cache = str(tmp_path_factory.getbasetemp() / "compiled")
    prompt = list(range(100, 108))
    requests = [
        (prompt, SamplingParams(max_tokens=20, temperature=0, logprobs=20)),
        (list(range(7, 47)), SamplingParams(max_tokens=8, temperature=0.7, seed=5, logprobs=20, n=2)),
    ]
    found = []
    for devices in (None, mesh):
        options = OPTIONS | {"mesh": devices, "compilation_cache_dir": cache}
        with Engine(decoder=decoder(devices), **options) as engine:
            logits, text = body_logits(engine, prompt)
            assert ("all-reduce" in text) == (devices is not None)
            pages = engine.runner.kv[0].pages
            assert pages.sharding.shard_shape(pages.shape)[2] == (4 if devices is None else 2)
            found.append((logits, run(engine, requests)))
    (logits, results), (split_logits, split_results) = found
    assert np.abs(logits).max() > 1  # or 1e-5 would mean nothing
    np.testing.assert_allclose(split_logits, logits, atol=1e-5)
    for result, split in zip(results, split_results, strict=True):
        for one, two in zip(result.outputs, split.outputs, strict=True):
            assert two.token_ids == one.token_ids
            for a, b in zip(one.logprobs, two.logprobs, strict=True):
                common = a.keys() & b.keys()  # the last places may swap
                assert len(common) >= 19
                np.testing.assert_allclose([b[i].logprob for i in common], [a[i].logprob for i in common], atol=1e-5)


def test_a_head_count_that_the_mesh_does_not_divide_is_refused(mesh):
    config = dataclasses.replace(CONFIG, num_kv_heads=1, num_heads=2)
    message = "mesh axis 'model' of size 2 does not divide num_key_value_heads=1"
    with pytest.raises(ValueError, match=message):
        Engine(decoder=decoder(None, config), mesh=mesh, **OPTIONS)


def test_a_mesh_without_the_axis_is_refused(cpu_devices):
    wrong = jax.sharding.Mesh(np.array(cpu_devices[:2]), ("data",))
    with pytest.raises(ValueError, match="lack the axis 'model'"):
        Engine(decoder=decoder(None), mesh=wrong, **OPTIONS)
