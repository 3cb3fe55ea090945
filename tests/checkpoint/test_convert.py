"""`jaxserve convert`: the folder that is written, what is in it, and what is refused."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoint_tools import GOLDEN, write_tiny_checkpoint
from flax import nnx
from golden_models import load_golden, write_checkpoint
from safetensors import safe_open
from safetensors.numpy import load_file
from test_gguf import convert as convert_tiny_gguf
from test_gguf import tensors, write_gguf

from jaxserve import cli
from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.hugging_face import load_hugging_face, read_config, read_generation_defaults
from jaxserve.checkpoint.loading import load_decoder
from jaxserve.checkpoint.orbax import holds_orbax
from jaxserve.models.config import CheckpointError
from jaxserve.text.tokenizer import Tokenizer


@pytest.fixture
def source(tmp_path):
    """The golden Qwen3 with values that bfloat16 cannot hold, a tokenizer and generation defaults."""
    folder = write_tiny_checkpoint(tmp_path / "source")
    noise = np.random.default_rng(0)
    weights = {name: value + noise.normal(0, 1e-2, value.shape) for name, value in weights_of(folder)}
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    write_checkpoint(GOLDEN._replace(weights=weights), folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": [2, 7]}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "LICENSE").write_text("Apache-2.0")
    (folder / "training_args.bin").write_bytes(b"not to be copied")
    return folder


def weights_of(folder):
    return load_file(folder / "model.safetensors").items()


def rounded_bits(values: np.ndarray) -> np.ndarray:
    """The bits of float32 values rounded to bfloat16, to nearest and to even: the upper half after adding a half."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def assert_same_values(decoder, expected):
    leaves = [jax.tree.leaves(nnx.state(model)) for model in (decoder, expected)]
    for found, want in zip(*leaves, strict=True):
        assert found.dtype == want.dtype
        assert np.asarray(found).tobytes() == np.asarray(want).tobytes()


def test_both_formats_in_bfloat16(source, tmp_path, capsys):
    output = convert(source, tmp_path / "new" / "output", dtype="bfloat16")
    assert output == tmp_path / "new" / "output"
    names = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {file.name for file in output.iterdir()} == names | {"LICENSE", "model.safetensors", "orbax"}
    assert [folder.name for folder in output.parent.iterdir()] == ["output"]
    found = load_file(output / "model.safetensors")
    originals = dict(weights_of(source))
    assert found.keys() == originals.keys()
    for name, value in originals.items():
        assert found[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(found[name].view(np.uint16), rounded_bits(value))
    with safe_open(output / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}  # transformers asks for it
    expected = load_hugging_face(source, dtype="bfloat16")
    assert_same_values(load_hugging_face(output), expected)
    assert_same_values(load_decoder(output), expected)
    progress = capsys.readouterr().err
    assert f"converting {source} to {output} in bfloat16" in progress
    assert "model.safetensors: 100%" in progress


def test_what_describes_the_model(source, tmp_path):
    output = convert(source, tmp_path / "output", dtype="float16")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, output))
    assert after == before | {"dtype": "float16", "torch_dtype": "float16"}
    assert read_config(output).dtype == "float16"
    assert read_config(output).eos_token_ids == (2, 7)
    assert read_generation_defaults(output) == {"temperature": 0.6}
    text = "some text"
    assert Tokenizer.from_folder(output).encode(text) == Tokenizer.from_folder(source).encode(text)
    assert (output / "chat_template.jinja").read_text() == "{{ messages }}"


@pytest.mark.parametrize("format", ["orbax", "hugging_face"])
def test_one_format(source, tmp_path, format):
    output = convert(str(source), str(tmp_path / "output"), format=format)
    assert (output / "model.safetensors").exists() == (format == "hugging_face")
    assert holds_orbax(output) == (format == "orbax")
    assert_same_values(load_decoder(output), load_hugging_face(source))  # auto: the model's own dtype


def test_shards_become_one_file_of_what_the_model_needs(tmp_path):
    """Left out: old buffers, and a head that is the embedding again."""
    golden = load_golden("qwen2")
    more = {"lm_head.weight": golden.weights["model.embed_tokens.weight"]}
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    source = write_checkpoint(golden._replace(weights=golden.weights | more), tmp_path / "source", shards=3)
    output = convert(source, tmp_path / "output")
    assert load_file(output / "model.safetensors").keys() == golden.weights.keys()
    assert not (output / "model.safetensors.index.json").exists()
    assert_same_values(load_hugging_face(output), load_hugging_face(source))


def test_values_that_a_dtype_cannot_hold(source, tmp_path):
    weights = dict(weights_of(source))
    weights["model.norm.weight"][3] = -7e4
    write_checkpoint(GOLDEN._replace(weights=weights), source)
    message = r"dtype='float16' cannot hold tensor 'model\.norm\.weight', which reaches 70000; use bfloat16"
    for format in ("both", "orbax"):
        with pytest.raises(CheckpointError, match=message):
            convert(source, tmp_path / "output", dtype="float16", format=format)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    output = convert(source, tmp_path / "output", dtype="bfloat16", format="orbax")
    with pytest.raises(CheckpointError, match=r"cannot hold the parameter 'norm\.scale'"):
        load_decoder(output, dtype="float16")


def test_a_gguf_file(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "tiny.gguf", tensors(), kind="Q8_0")
    output = convert(file, tmp_path / "output")
    _, exact = convert_tiny_gguf(file)
    found = load_file(output / "model.safetensors")
    for name, value in exact.items():
        np.testing.assert_array_equal(found[name].view(np.uint16), rounded_bits(value))
    assert_same_values(load_decoder(output), load_hugging_face(tmp_path / "tiny", dtype="bfloat16"))


def test_an_orbax_tree_as_the_source(source, tmp_path):
    tree = convert(source, tmp_path / "tree", format="orbax")
    for format in ("both", "hugging_face"):
        with pytest.raises(ValueError, match=rf"format='{format}': .*tree holds an Orbax tree only"):
            convert(tree, tmp_path / "output", format=format)
    output = convert(tree, tmp_path / "output", dtype="bfloat16", format="orbax")
    assert_same_values(load_decoder(output), load_hugging_face(source, dtype="bfloat16"))


def test_a_tree_of_another_layout_beside_safetensors(source, tmp_path):
    old = convert(source, tmp_path / "old")
    key = old / "orbax" / "jaxserve.json"
    key.write_text(json.dumps(json.loads(key.read_text()) | {"layout": 0}))
    with pytest.raises(CheckpointError, match="layout=0"):
        load_decoder(old)
    assert_same_values(load_decoder(convert(old, tmp_path / "new")), load_hugging_face(source))


def test_what_exists_is_replaced_only_when_asked(source, tmp_path):
    output = tmp_path / "output"
    output.mkdir()  # empty: nothing to lose
    convert(source, output, format="hugging_face")
    with pytest.raises(ValueError, match=r"output='.*output': output must be a folder that does not exist yet"):
        convert(source, output, format="orbax")
    convert(source, output, format="orbax", overwrite=True)
    assert holds_orbax(output)
    assert not (output / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output", "source"]


def test_overwrite_spares_what_is_no_model(source, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "letters.txt").write_text("dear")
    with pytest.raises(ValueError, match=r"output must be the folder of a model"):
        convert(source, home, overwrite=True)
    with pytest.raises(ValueError, match=r"output must be the folder of a model"):
        convert(source, home / "letters.txt", overwrite=True)
    with pytest.raises(ValueError, match=r"output must be another folder than that of the model"):
        convert(source, source, overwrite=True)
    inner = shutil.copytree(source, source / "inner")
    with pytest.raises(ValueError, match=r"output must be another folder than that of the model"):
        convert(inner, source, overwrite=True)
    assert (home / "letters.txt").read_text() == "dear"
    assert (source / "model.safetensors").is_file()


def test_a_failed_replacement_keeps_the_old_folder(source, tmp_path):
    output = convert(source, tmp_path / "output", format="hugging_face")
    (source / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="truncated"):
        convert(source, output, overwrite=True)
    load_hugging_face(output)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "gguf"}, "format='gguf': format must be one of orbax, hugging_face, both"),
        ({"dtype": "int8"}, "dtype='int8': dtype must be one of auto, float32"),
    ],
)
def test_wrong_options(source, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "output", **options)


def test_command_line(source, tmp_path, capsys):
    command = ["convert", str(source), "--output", str(tmp_path / "output"), "--dtype", "bfloat16"]
    assert cli.main(command) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'output'}\n"
    assert holds_orbax(tmp_path / "output")
    assert read_config(tmp_path / "output").dtype == "bfloat16"
    assert cli.main(command) == 1
    assert "unless overwrite is set" in capsys.readouterr().err
    assert cli.main([*command, "--overwrite", "--format=hugging_face"]) == 0
    assert not holds_orbax(tmp_path / "output")
    capsys.readouterr()
    assert cli.main(["convert", str(source)]) == 2
    assert "output" in capsys.readouterr().err
