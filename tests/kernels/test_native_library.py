"""Building the native library: once per machine, safely beside other processes, and never an obstacle."""

import logging
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels_pallas.cpu import library
from jaxserve.kernels_pallas.cpu.library import Native, Unavailable, load_native
from jaxserve.kernels_pallas.cpu.linear import NativeLinear, choose_norm
from jaxserve.kernels_pallas.matmul import choose_linear
from jaxserve.kernels_pallas.paged_attention import choose_attention
from jaxserve.kernels_pallas.paged_attention.native import NativeAttention
from jaxserve.kernels_pallas.paged_attention.reference import Prepared

has_compiler = pytest.mark.skipif(
    not any(map(shutil.which, library._COMPILERS)), reason="there is no C++ compiler here"
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, which this process has loaded nothing from."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    return tmp_path


def compiler(folder, body: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@has_compiler
def test_it_is_built_once_for_all_threads_and_processes(cache):
    code = "from jaxserve.kernels_pallas.cpu.library import load_native; print(load_native().linear)"
    start = lambda: subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    processes = [start(), start()]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: load_native(), range(4)))
    names = {process.communicate()[0].strip() for process in processes}
    assert names == {results[0].linear}
    assert results.count(results[0]) == 4
    [built] = (cache / "native").iterdir()  # and nothing half-built stays behind
    assert built.suffix == ".so"
    assert built.stem in results[0].linear
    before = built.stat().st_mtime_ns
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    assert built.stat().st_mtime_ns == before


def assert_plain_path(caplog, why: str) -> None:
    assert why in load_native().reason
    assert [record.name for record in caplog.records] == ["jaxserve"]  # one line, however often it is asked
    assert why in caplog.text
    assert choose_attention("auto").name == "xla"
    assert choose_linear("auto", jnp.dtype("float32")) is None
    assert choose_norm(native=True) is None
    assert len(caplog.records) == 1
    with pytest.raises(ValueError, match=r"^attention_backend='native': .* works here: "):
        choose_attention("native")
    with pytest.raises(ValueError, match=r"^linear_backend='native': .* works here: "):
        choose_linear("native", jnp.dtype("float32"))


def test_without_a_compiler_the_plain_path_is_taken(cache, monkeypatch, caplog):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(cache))
    assert_plain_path(caplog, "no C++ compiler was found (c++, g++, clang++)")


def test_a_compiler_that_fails_is_no_obstacle(cache, monkeypatch, caplog):
    body = 'case "$1" in --version) echo 1.0;; *) echo "native.cc:1: error: what is this" >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", compiler(cache, body))
    assert_plain_path(caplog, "native.cc:1: error: what is this")
    assert not list((cache / "native").iterdir())


def test_a_compiler_that_builds_something_else_is_no_obstacle(cache, monkeypatch, caplog):
    monkeypatch.setenv(
        "CXX", compiler(cache, '[ "$1" = --version ] && echo 1.0 && exit; for last; do :; done; echo junk > "$last"')
    )
    assert_plain_path(caplog, "cannot be loaded")


def test_a_folder_that_cannot_be_written_is_no_obstacle(cache, monkeypatch, caplog):
    (cache / "native").write_text("a file where the folder should be")
    monkeypatch.setenv("CXX", compiler(cache, "echo 1.0"))
    assert_plain_path(caplog, "could not be built")


def test_another_backend_does_not_even_look_for_a_compiler(cache, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(library.jax, "default_backend", lambda: "gpu")
    assert load_native() == Unavailable("the backend is gpu")


@has_compiler
@pytest.mark.slow
def test_the_names_of_functions_change_with_the_source(cache, monkeypatch):
    first = load_native()
    assert isinstance(first, Native)
    changed = cache / "native.cc"
    changed.write_text(library._SOURCE.read_text() + "// another library\n")
    monkeypatch.setattr(library, "_SOURCE", changed)
    monkeypatch.setenv("JAXSERVE_CACHE", str(cache / "other"))
    second = load_native()
    assert not set(first) & set(second)


@has_compiler
@pytest.mark.skipif("avx512_bf16" not in library.cpu_description().split(), reason="this CPU has no AVX-512 BF16")
def test_the_instructions_for_bfloat16_change_no_bits(tmp_path, monkeypatch):
    """Against a library that does without them, over products and attention of many shapes."""
    here = load_native()
    monkeypatch.setattr(library, "_FLAGS", (*library._FLAGS, "-mno-avx512bf16"))
    plain = library._register(library._built(tmp_path))
    assert plain.linear != here.linear
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.bfloat16)
    for count, depth, columns in [(1, 64, 1), (5, 576, 1500), (12, 128, 65), (25, 1536, 576), (130, 300, 40)]:
        x, weight = normal(count, depth), normal(depth, columns)
        products = [
            NativeLinear(native.linear)(x, weight, jnp.float32, count=jnp.int32(count)) for native in (here, plain)
        ]
        np.testing.assert_array_equal(*products)
    for head_dim, heads, kv_heads, window in [(64, 9, 3, None), (128, 4, 4, 70), (32, 8, 1, None), (48, 6, 2, 5)]:
        q, pages = normal(45, heads, head_dim), normal(40, 2, kv_heads, 16, head_dim)
        table = jnp.asarray(random.permutation(39).reshape(3, 13), jnp.int32)
        slot = jnp.asarray([0] * 7 + [1] * 35 + [2] * 3, jnp.int32)
        position = jnp.asarray([*range(195, 202), *range(35), 63, 64, -1], jnp.int32)
        prepared = Prepared(table, slot, position)
        attention = [
            NativeAttention(native.paged_attention)(q, pages, prepared, scale=head_dim**-0.5, window=window)
            for native in (here, plain)
        ]
        np.testing.assert_array_equal(*attention)
