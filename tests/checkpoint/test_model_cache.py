"""A GGUF file as a model: converted once, found again, converted anew when it has changed."""

import os

import pytest
from test_gguf import tensors, write_gguf

from jaxserve.checkpoint import model_cache
from jaxserve.checkpoint.gguf import GGUFError
from jaxserve.checkpoint.model_cache import converted_gguf


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))


def test_converted_once_until_it_changes(tmp_path, monkeypatch, capsys):
    path = write_gguf(tmp_path / "tiny.gguf", tensors())
    folder = converted_gguf(path)
    assert (folder / "config.json").is_file()
    assert (folder / "model.safetensors").is_file()
    assert "converting" in capsys.readouterr().err
    with monkeypatch.context() as context:
        context.setattr(model_cache, "convert_gguf", None)
        assert converted_gguf(path) == folder
    os.utime(path, ns=(1, 1))
    assert converted_gguf(path) != folder


def test_a_broken_file_leaves_nothing_behind(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tensors())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(GGUFError, match=r"tiny\.gguf"):
        converted_gguf(path)
    assert not list((tmp_path / "cache" / "gguf").glob("*"))
