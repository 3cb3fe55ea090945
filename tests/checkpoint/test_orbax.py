"""The tree in Orbax's format: what is restored has every bit of what was saved; a key that does not fit is an error."""

import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_tools import SHAPES, write_tiny_checkpoint
from flax import nnx
from golden_models import load_golden, write_checkpoint

from jaxserve import LLM, SamplingParams
from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.hugging_face import load_hugging_face
from jaxserve.checkpoint.loading import load_decoder
from jaxserve.checkpoint.orbax import holds_orbax, load_orbax, save_orbax
from jaxserve.models.config import CheckpointError


def leaves(decoder):
    return jax.tree.leaves(nnx.state(decoder))


def assert_same_bits(decoder, expected):
    for found, want in zip(leaves(decoder), leaves(expected), strict=True):
        assert found.dtype == want.dtype
        assert np.asarray(found).tobytes() == np.asarray(want).tobytes()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("original"))


@pytest.fixture(scope="module")
def stored(original, tmp_path_factory):
    return convert(str(original), tmp_path_factory.mktemp("stored") / "model", format="orbax")


@pytest.fixture
def copy(stored, tmp_path):
    return Path(shutil.copytree(stored, tmp_path / "copy"))


def edit_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(folder, *parts):
    """Loading raises, its message has all the parts, and no array was left on a device."""
    gc.collect()
    before = len(jax.live_arrays())
    with pytest.raises(CheckpointError) as caught:
        load_decoder(folder)
    assert len(jax.live_arrays()) <= before
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, str(caught.value)


@pytest.mark.parametrize("name", ["llama_biases", "qwen2", "qwen3", "smollm3"])
def test_every_bit_of_every_kind_of_parameter(tmp_path, name):
    decoder = load_hugging_face(write_checkpoint(load_golden(name), tmp_path))
    assert not holds_orbax(tmp_path)
    save_orbax(decoder, tmp_path)
    assert holds_orbax(tmp_path)
    assert_same_bits(load_orbax(tmp_path), decoder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_is_cast_as_from_the_original(tmp_path, dtype):
    """Values that 16 bits cannot hold, ties and subnormal numbers among them."""
    golden = load_golden("qwen3")
    noise = np.random.default_rng(0).standard_normal(golden.weights["model.norm.weight"].shape, np.float32)
    noise[:4] = 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1e-40, 2.0**-25  # halfway up, halfway down, and nearly nothing
    folder = write_checkpoint(golden._replace(weights=golden.weights | {"model.norm.weight": noise}), tmp_path)
    save_orbax(load_hugging_face(folder), folder)
    assert_same_bits(load_orbax(folder, dtype=dtype), load_hugging_face(folder, dtype=dtype))
    expected = noise.astype(jnp.dtype(dtype))
    assert np.asarray(load_orbax(folder, dtype=dtype).norm.scale[...]).tobytes() == expected.tobytes()


def test_stored_in_bfloat16_and_widened(original, tmp_path):
    folder = convert(str(original), tmp_path / "model", dtype="bfloat16", format="orbax")
    assert json.loads((folder / "orbax" / "jaxserve.json").read_text()) == {
        "model": "Qwen3ForCausalLM",
        "dtype": "bfloat16",
        "layout": 1,
    }
    decoder = load_decoder(folder)
    assert {leaf.dtype for leaf in leaves(decoder)} == {jnp.dtype(ml_dtypes.bfloat16)}
    # the goldens' weights are exact in bfloat16
    assert_same_bits(load_decoder(folder, dtype="float32"), load_hugging_face(original))


def test_restored_onto_a_mesh(original, stored, cpu_devices):
    mesh = jax.sharding.Mesh(np.array(cpu_devices[:2]), ("model",))
    decoder, expected = load_decoder(stored, mesh=mesh), load_hugging_face(original, mesh=mesh)
    assert_same_bits(decoder, expected)
    for found, want in zip(leaves(decoder), leaves(expected), strict=True):
        assert found.sharding == want.sharding
    assert decoder.layers[0].gate_up[...].addressable_shards[0].data.shape == (64, 2, 48)


def test_a_tree_saved_from_a_mesh_is_the_same_tree(original, tmp_path, cpu_devices):
    mesh = jax.sharding.Mesh(np.array(cpu_devices[:2]), ("model",))
    shutil.copytree(original, tmp_path / "model")
    save_orbax(load_hugging_face(original, mesh=mesh), tmp_path / "model")
    decoder = load_decoder(tmp_path / "model")
    assert_same_bits(decoder, load_hugging_face(original))
    assert all(len(leaf.sharding.device_set) == 1 for leaf in leaves(decoder))


def test_where_jax_puts_arrays(stored, cpu_devices):
    with jax.default_device(cpu_devices[1]):
        decoder = load_orbax(stored)
    assert {device for leaf in leaves(decoder) for device in leaf.devices()} == {cpu_devices[1]}


@pytest.mark.parametrize("devices", [1, 2])
def test_an_engine_answers_the_same(original, stored, cpu_devices, devices):
    mesh = jax.sharding.Mesh(np.array(cpu_devices[:devices]), ("model",)) if devices > 1 else None
    params = [
        SamplingParams(temperature=0, max_tokens=8, logprobs=3),
        SamplingParams(temperature=0.9, seed=3, max_tokens=8, logprobs=3),
    ]
    results = []
    for folder in (original, stored):
        with LLM(str(folder), mesh=mesh, **SHAPES) as llm:
            results.append([result.outputs[0] for result in llm.generate(["Once upon", "a time"], params)])
    for ours, theirs in zip(*results, strict=True):
        assert (ours.text, ours.token_ids, ours.logprobs) == (theirs.text, theirs.token_ids, theirs.logprobs)


def test_other_programs_read_the_tree(original, stored):
    """Its names are the parameters' paths, with Orbax's own API and no help from jaxserve."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(stored.absolute() / "orbax")
    decoder = load_hugging_face(original)
    np.testing.assert_array_equal(tree["layers"]["1"]["down"], decoder.layers[1].down[...])
    np.testing.assert_array_equal(tree["embed"], decoder.embed[...])


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"layout": 2}, "layout=2, but this version of jaxserve reads layout 1"),
        ({"layout": None}, "layout=None"),
        ({"model": "LlamaForCausalLM"}, "model='LlamaForCausalLM', but config.json describes 'Qwen3ForCausalLM'"),
        ({"dtype": "bfloat16"}, "is stored as float32, but jaxserve.json says bfloat16"),
        ({"dtype": "int8"}, "dtype='int8', but it must be one of float32"),
    ],
)
def test_a_key_that_does_not_fit(copy, changes, part):
    edit_json(copy / "orbax" / "jaxserve.json", **changes)
    refused(copy, str(copy / "orbax"), part)


def test_a_config_that_does_not_fit(copy):
    edit_json(copy / "config.json", intermediate_size=98)
    refused(copy, str(copy / "orbax"), "parameter 'layers.0.down' has shape [96, 64]", "asks for [98, 64]")
    edit_json(copy / "config.json", intermediate_size=96, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    refused(copy, "the parameter 'layers.2.", "is missing")
    edit_json(copy / "config.json", num_hidden_layers=1)
    refused(copy, "the parameter 'layers.1.", "is not used by the model")


def test_a_tree_that_orbax_cannot_read(copy):
    (copy / "orbax" / "_METADATA").write_text("{nonsense")
    refused(copy, str(copy / "orbax"), "Orbax cannot read the tree")


def test_missing_and_damaged_data(copy, tmp_path):
    """In a process of its own: the reads that Orbax leaves running when one fails disturb later tests."""
    largest = max((copy / "orbax").rglob("*"), key=lambda file: file.stat().st_size).relative_to(copy)
    folders = [Path(shutil.copytree(copy, tmp_path / name)) for name in ("gone", "cut", "empty")]
    (folders[0] / largest).unlink()
    (folders[1] / largest).write_bytes((copy / largest).read_bytes()[:1000])
    shutil.rmtree(folders[2] / "orbax" / "ocdbt.process_0")
    script = (
        "import sys, pathlib\nfrom jaxserve.checkpoint.loading import load_decoder\n"
        "for folder in sys.argv[1:]:\n"
        "    try:\n        load_decoder(pathlib.Path(folder))\n"
        "    except ValueError as error:\n        print(type(error).__name__, str(error)[:200].replace(chr(10), ' '))\n"
    )
    command = [sys.executable, "-c", script, *map(str, folders)]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()
    assert len(lines) == len(folders)
    for line, folder in zip(lines, folders, strict=True):
        assert line.startswith(f"CheckpointError {folder / 'orbax'}: Orbax cannot read the tree")


def test_a_damaged_key(copy):
    (copy / "orbax" / "jaxserve.json").write_text("[")
    refused(copy, "jaxserve.json", "not valid JSON")


def test_a_mesh_that_does_not_fit(stored, cpu_devices):
    mesh = jax.sharding.Mesh(np.array(cpu_devices[:2]), ("data",))
    with pytest.raises(ValueError, match="lack the axis 'model'"):
        load_decoder(stored, mesh=mesh)


def test_orbax_is_imported_when_it_is_needed(original):
    script = (
        "import sys, pathlib, jaxserve.cli; from jaxserve.checkpoint.loading import load_decoder;"
        "load_decoder(pathlib.Path(sys.argv[1]));"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'orbax', 'tensorstore'}))"
    )
    command = [sys.executable, "-c", script, str(original)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "[]"
