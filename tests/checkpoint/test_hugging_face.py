import gc
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from golden_models import load_golden, write_checkpoint
from safetensors.numpy import save_file

from jaxserve.checkpoint.hugging_face import (
    dtype_of,
    load_hugging_face,
    read_config,
    read_generation_defaults,
    read_headers,
    resolve_model,
)
from jaxserve.models.config import CheckpointError, ModelConfig, UnsupportedModelError

GOLDEN = load_golden("qwen2")  # tied
SHARD = "model-00001-of-00003.safetensors"


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(GOLDEN, tmp_path / "model")


@pytest.fixture
def sharded(tmp_path):
    return write_checkpoint(GOLDEN, tmp_path / "sharded", shards=3)


def with_weights(folder, **changes):
    return write_checkpoint(GOLDEN._replace(weights=GOLDEN.weights | changes), folder)


def edit_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def leaves(decoder):
    return jax.tree.leaves(nnx.state(decoder))


def refused(folder, *parts, error=CheckpointError):
    """Loading raises, its message has all the parts, and no array was made on a device."""
    gc.collect()  # what earlier tests left in reference cycles
    before = len(jax.live_arrays())
    with pytest.raises(error) as caught:
        load_hugging_face(folder)
    assert len(jax.live_arrays()) <= before
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, str(caught.value)


def test_shards_give_what_one_file_gives(folder, sharded):
    one, many = leaves(load_hugging_face(folder)), leaves(load_hugging_face(sharded))
    assert len(one) == 2 + 3 * 7
    for a, b in zip(one, many, strict=True):
        np.testing.assert_array_equal(a, b)


def test_dtypes_of_storage_and_computation(tmp_path, folder):
    stored = {name: value.astype(ml_dtypes.bfloat16) for name, value in GOLDEN.weights.items()}
    low = write_checkpoint(GOLDEN._replace(weights=stored, config=GOLDEN.config | {"dtype": None}), tmp_path / "low")
    assert {leaf.dtype for leaf in leaves(load_hugging_face(folder))} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in leaves(load_hugging_face(low))} == {jnp.dtype("bfloat16")}
    widened = load_hugging_face(low, dtype=jnp.float32)
    for a, b in zip(leaves(widened), leaves(load_hugging_face(folder)), strict=True):
        np.testing.assert_array_equal(a, b)  # the goldens' weights are exact in bfloat16


def test_a_mesh_splits_the_model(folder, cpu_devices):
    mesh = jax.sharding.Mesh(np.array(cpu_devices[:2]), ("model",))
    decoder = load_hugging_face(folder, mesh=mesh)
    assert len(decoder.layers[0].gate_up[...].sharding.device_set) == 2
    assert decoder.layers[0].gate_up[...].addressable_shards[0].data.shape == (64, 2, 48)


def test_dtype_of():
    config = ModelConfig.from_hf(GOLDEN.config | {"dtype": "float16"})
    assert dtype_of(config) == jnp.float16
    assert dtype_of(config, "bfloat16") == jnp.bfloat16
    assert dtype_of(ModelConfig.from_hf(GOLDEN.config | {"dtype": None})) == jnp.float32
    with pytest.raises(CheckpointError, match=r"dtype='bfloat' is not supported .did you mean 'bfloat16'"):
        dtype_of(config, "bfloat")


def test_ends_of_sequence_of_both_configs(folder):
    assert read_config(folder).eos_token_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert read_config(folder).eos_token_ids == (2, 7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "end"}))
    refused(folder, "generation_config.json", "eos_token_id='end'")


def test_generation_defaults(folder):
    assert read_generation_defaults(folder) == {}
    file = folder / "generation_config.json"
    llama = {"bos_token_id": 1, "do_sample": True, "eos_token_id": [2, 7], "temperature": 0.6, "top_p": 0.9}
    file.write_text(json.dumps(llama | {"max_length": 4096, "transformers_version": "4.42.3"}))
    assert read_generation_defaults(folder) == {"temperature": 0.6, "top_p": 0.9}
    rest = {"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 512, "temperature": None}
    file.write_text(json.dumps(rest | {"do_sample": False}))
    expected = {"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05, "max_tokens": 512}
    assert read_generation_defaults(folder) == expected


@pytest.mark.parametrize(("content", "part"), [("{", "not valid JSON"), ("[0.6]", "not a JSON object")])
def test_a_broken_generation_config(folder, content, part):
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {part}"):
        read_generation_defaults(folder)


def test_junk_and_an_equal_tied_head_are_accepted(tmp_path):
    junk = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    head = {"lm_head.weight": GOLDEN.weights["model.embed_tokens.weight"]}
    load_hugging_face(with_weights(tmp_path, **junk, **head))


def test_a_tied_head_of_its_own_is_refused(tmp_path):
    head = GOLDEN.weights["model.embed_tokens.weight"] + np.float32(1)
    refused(with_weights(tmp_path, **{"lm_head.weight": head}), "lm_head.weight", "tie_word_embeddings=true")


def test_missing_and_unused_tensors(tmp_path):
    weights = {name: value for name, value in GOLDEN.weights.items() if name != "model.norm.weight"}
    weights["model.extra"] = np.ones(3, np.float32)
    folder = write_checkpoint(GOLDEN._replace(weights=weights), tmp_path)
    refused(folder, str(folder), "missing: model.norm.weight", "not used by the model: model.extra")


def test_a_wrong_shape(tmp_path):
    folder = with_weights(tmp_path, **{"model.norm.weight": np.ones(63, np.float32)})
    refused(folder, "'model.norm.weight' has shape [63]", "[64]")


def test_a_dtype_that_is_not_supported(tmp_path):
    folder = with_weights(tmp_path, **{"model.norm.weight": np.ones(64, np.int8)})
    refused(folder, "model.safetensors", "'model.norm.weight' has dtype I8", "BF16", error=UnsupportedModelError)


def test_missing_files(folder, sharded):
    (sharded / SHARD).unlink()
    refused(sharded, SHARD, "missing")
    (folder / "model.safetensors").unlink()
    refused(folder, str(folder), "model.safetensors.index.json")
    (folder / "config.json").unlink()
    refused(folder, "config.json", "missing")


@pytest.mark.parametrize(("bytes_left", "part"), [(-4, "its tensors end at"), (100, "header alone"), (3, "header")])
def test_truncated_files(sharded, bytes_left, part):
    content = (sharded / SHARD).read_bytes()
    (sharded / SHARD).write_bytes(content[:bytes_left])
    refused(sharded, SHARD, "truncated", part)


def test_a_file_with_a_tail(folder):
    with (folder / "model.safetensors").open("ab") as stream:
        stream.write(b"more")
    refused(folder, "model.safetensors", "longer than its header says")


def write_header(file, header, data=b""):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


@pytest.mark.parametrize(
    ("header", "part"),
    [
        (b"{nonsense", "not valid JSON"),
        (b"[]", "not a JSON object"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "entry of tensor 'a' is malformed"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "tensor 'a' takes bytes 0 to 4"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, "tensor 'a' takes bytes -4 to 0"),
    ],
)
def test_malformed_headers(folder, header, part):
    write_header(folder / "model.safetensors", header, b"\0" * 4)
    refused(folder, "model.safetensors", part)


def test_an_index_that_does_not_fit(sharded):
    index_file = sharded / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())["weight_map"]
    edit_json(index_file, weight_map=index | {"ghost": SHARD})
    refused(sharded, "index.json", "tensor 'ghost' is not in " + SHARD)
    edit_json(index_file, weight_map=index | {"ghost": "../" + SHARD})
    refused(sharded, "index.json", "no plain file name")
    edit_json(index_file, weight_map={})
    refused(sharded, "index.json", "weight_map={}")
    edit_json(index_file, weight_map=index)
    other = "model-00002-of-00003.safetensors"
    twice = read_headers(sharded)
    duplicate = next(name for name, tensor in twice.items() if tensor.file.name == SHARD)
    part = {name: GOLDEN.weights[name] for name, tensor in twice.items() if tensor.file.name == other}
    save_file(part | {duplicate: GOLDEN.weights[duplicate]}, sharded / other)
    refused(sharded, other, f"tensor {duplicate!r} is also in another file")


def test_config_errors_come_through(folder):
    edit_json(folder / "config.json", hidden_act="gelu")
    refused(folder, "config.json", "hidden_act='gelu'")
    (folder / "config.json").write_text("{")
    refused(folder, "config.json", "not valid JSON")


def test_a_local_folder_resolves_to_itself(folder):
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize("name", ["no-such-folder", "/no/such/folder", "a/b/c"])
def test_a_name_that_is_neither_folder_nor_hub_id(name):
    with pytest.raises(CheckpointError) as error:
        resolve_model(name)
    assert f"model={name!r}" in str(error.value)
    assert "owner/name" in str(error.value)


def test_a_hub_id_is_found_in_the_local_cache_offline(tmp_path):
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--someone--tiny"
    write_checkpoint(GOLDEN, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    script = (
        "from jaxserve.checkpoint.hugging_face import *\n"
        "folder = resolve_model('someone/tiny')\n"
        "print(folder, read_config(folder).architecture)\n"
        "try:\n    resolve_model('someone/absent')\n"
        "except CheckpointError as error:\n    print(error)\n"
    )
    # huggingface_hub reads its environment when it is imported: hence a process of its own
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found, absent = result.stdout.strip().split("\n")
    assert found == f"{repository / 'snapshots' / commit} Qwen2ForCausalLM"
    assert "model='someone/absent' is not an existing folder" in absent
    assert "HF_HOME" in absent
    assert "path of a folder" in absent
