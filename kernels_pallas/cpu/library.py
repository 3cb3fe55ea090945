"""Builds native.cc with the system's compiler, once per machine, and registers its functions with XLA.

The library is kept in the engine's cache folder under the hash of everything it depends on. The hash is part of
the names under which XLA knows the functions, so a compiled program names the very library that it calls.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import jaxlib

from jaxserve.config import cache_folder

_log = logging.getLogger("jaxserve")
_SOURCE = Path(__file__).with_name("native.cc")
# The contraction of a * b + c is asked for by name: ISO C++ mode has it off in GCC, and bits depend on it.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-shared", "-fPIC", "-w")
_COMPILERS = ("c++", "g++", "clang++")
_BUILD_SECONDS = 300
_lock = threading.Lock()
_asked: dict[str, "Native | Unavailable"] = {}  # by cache folder and compiler
_registered: dict[str, "Native"] = {}  # by the library's hash; XLA takes a name once in a process


class Native(NamedTuple):
    """The names of the functions for `jax.ffi.ffi_call`."""

    linear: str
    rms_norm: str
    paged_attention: str


class Unavailable(NamedTuple):
    """Why there is no library here."""

    reason: str


def load_native() -> Native | Unavailable:
    """The functions of native.cc, built at first use; a second call costs nothing. Never raises."""
    with _lock:
        key = f"{cache_folder()} {os.environ.get('CXX', '')}"
        if key not in _asked:
            try:
                _asked[key] = _register(_built(cache_folder() / "native"))
            except _CannotBuild as error:
                _asked[key] = Unavailable(str(error))
                _log.warning("native functions for the CPU are not used: %s", error)
        return _asked[key]


class _CannotBuild(Exception):
    pass


def _built(folder: Path) -> Path:
    """The library of this source, compiler and machine, compiled now if it is not there."""
    if jax.default_backend() != "cpu":
        raise _CannotBuild(f"the backend is {jax.default_backend()}")
    compiler, version = _compiler()
    depends = [_SOURCE.read_text(), version, *_FLAGS, jaxlib.__version__, cpu_description()]
    path = folder / f"{hashlib.sha256('\n'.join(depends).encode()).hexdigest()[:16]}.so"
    if not path.exists():
        _build(compiler, path)
    return path


def _compiler() -> tuple[str, str]:
    """The path and the version of the compiler that CXX names, or of the first that there is."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else _COMPILERS
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise _CannotBuild(f"no C++ compiler was found ({', '.join(names)})")
    try:
        return found, subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise _CannotBuild(f"{found} does not run: {error}") from error


def _build(compiler: str, path: Path) -> None:
    """Compile to a file of another name first: other processes may want the same library."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        os.close(handle)
        command = [compiler, *_FLAGS, "-isystem", jax.ffi.include_dir(), str(_SOURCE), "-o", temporary]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=_BUILD_SECONDS)
        os.replace(temporary, path)
    except subprocess.CalledProcessError as error:
        first = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr[:200])
        raise _CannotBuild(f"{compiler} failed: {first}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise _CannotBuild(f"it could not be built: {error}") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def _register(path: Path) -> Native:
    if path.stem in _registered:
        return _registered[path.stem]
    try:
        library = ctypes.CDLL(str(path))
        functions = {
            "linear": library.JaxserveLinear,
            "rms_norm": library.JaxserveRmsNorm,
            "paged_attention": library.JaxservePagedAttention,
        }
    except (OSError, AttributeError) as error:
        raise _CannotBuild(f"{path} cannot be loaded: {error}") from error
    names = {name: f"jaxserve_{name}_{path.stem}" for name in functions}
    for name, function in functions.items():
        jax.ffi.register_ffi_target(names[name], jax.ffi.pycapsule(function), platform="cpu")
    _registered[path.stem] = Native(**names)
    return _registered[path.stem]


@cache
def cpu_description() -> str:
    """The machine's architecture and, where the system tells them, its instruction sets and model."""
    lines = [platform.machine()]
    if Path("/proc/cpuinfo").exists():
        told = Path("/proc/cpuinfo").read_text().splitlines()
        lines += sorted({line for line in told if line.startswith(("flags", "Features", "model name"))})
    return "\n".join(lines)
