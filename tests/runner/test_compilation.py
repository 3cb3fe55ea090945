"""Ahead-of-time compilation: the engine's own persistent cache, its counters, and nothing global."""

import json
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from engine_tools import run, tiny_engine

from jaxserve import SamplingParams
from jaxserve.runner.compilation import Compiler, Program

ONE = jax.devices()[:1]
THREE = jnp.arange(3, dtype=jnp.float32)


def program(name: str = "double", bucket: int = 3, function=lambda x: x * jnp.float32(2)) -> Program:
    return Program(name, bucket, function, (jax.ShapeDtypeStruct((bucket,), jnp.float32),), donate=())


def counts(compiler: Compiler) -> tuple[int, int, int]:
    return compiler.num_compiled, compiler.num_loaded, compiler.num_after_warmup


def test_a_second_compiler_loads_what_the_first_one_compiled(tmp_path):
    first = Compiler(tmp_path / "new" / "folder", ONE)
    assert first.get(program())(THREE).tolist() == [0, 2, 4]
    assert first.get(program()) is first.get(program())
    assert counts(first) == (1, 0, 0)
    second = Compiler(tmp_path / "new" / "folder", ONE)
    assert second.get(program())(THREE).tolist() == [0, 2, 4]
    assert counts(second) == (0, 1, 0)
    assert list(second.executables()) == [("double", 3)]


def test_what_this_process_has_lowered_is_not_traced_again(tmp_path):
    traced = []

    def scaled(factor, x):
        traced.append(factor)
        return x * jnp.float32(factor)

    def answer(factor: int, folder=tmp_path, size: int = 3, **options) -> list[float]:
        compiler = Compiler(folder, ONE)
        compiler.options = options
        return compiler.get(program(bucket=size, function=partial(scaled, factor)))(THREE[:size]).tolist()

    assert answer(2) == answer(2) == [0, 2, 4]
    assert traced == [2]
    assert answer(3) == [0, 3, 6]
    assert answer(2, size=2) == [0, 2]
    assert answer(2, xla_backend_optimization_level=1) == [0, 2, 4]
    with jax.default_matmul_precision("float32"):
        assert answer(2) == [0, 2, 4]
    assert traced == [2, 3, 2, 2, 2]
    assert answer(3, tmp_path / "empty") == [0, 3, 6]  # the name is known, the entry is not there
    assert traced == [2, 3, 2, 2, 2, 3]


def test_another_program_of_the_same_name_is_another_entry(tmp_path):
    Compiler(tmp_path, ONE).get(program())
    other = Compiler(tmp_path, ONE)
    assert other.get(program(function=lambda x: x * jnp.float32(3)))(THREE).tolist() == [0, 3, 6]
    assert counts(other) == (1, 0, 0)


def test_another_structure_of_the_same_computation_is_another_entry(tmp_path):
    """An entry keeps the trees of arguments and results: they belong to what names it."""

    def compiled_for(*arguments):
        function = lambda *args: sum(jax.tree.leaves(args), jnp.zeros((), jnp.float32))
        shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arguments)
        return Compiler(tmp_path, ONE).get(Program("sum", 3, function, shapes, donate=()))(*arguments)

    assert compiled_for(THREE, THREE).tolist() == [0, 2, 4]
    assert compiled_for((THREE, THREE)).tolist() == [0, 2, 4]


@pytest.mark.parametrize("damage", [lambda whole: whole[: len(whole) // 2], lambda whole: b"", lambda whole: b"x"])
def test_a_torn_entry_is_compiled_and_written_again(tmp_path, damage):
    Compiler(tmp_path, ONE).get(program())
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    second = Compiler(tmp_path, ONE)
    assert second.get(program())(THREE).tolist() == [0, 2, 4]
    assert counts(second) == (1, 0, 0)
    third = Compiler(tmp_path, ONE)
    third.get(program())
    assert counts(third) == (0, 1, 0)


def test_a_folder_that_cannot_be_made_costs_nothing_but_time(tmp_path):
    (tmp_path / "file").write_text("in the way")
    compiler = Compiler(tmp_path / "file" / "cache", ONE)
    assert compiler.get(program())(THREE).tolist() == [0, 2, 4]
    assert counts(compiler) == (1, 0, 0)


def test_a_torn_entry_in_a_folder_that_may_not_be_written_is_compiled(tmp_path, monkeypatch):
    Compiler(tmp_path, ONE).get(program())
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(b"torn")

    def refuse(*_, **__):
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    assert Compiler(tmp_path, ONE).get(program())(THREE).tolist() == [0, 2, 4]


def test_warm_up_reports_progress_and_later_programs_count():
    compiler, reports = Compiler(None, ONE), []
    programs = [program(bucket=bucket) for bucket in (5, 3, 2)]
    compiler.warm_up(programs, lambda *report: reports.append(report))
    assert reports == [(1, 3, "double[5]"), (2, 3, "double[3]"), (3, 3, "double[2]")]
    for known in programs:
        compiler.get(known)
    assert counts(compiler) == (3, 0, 0)
    compiler.get(program("late"))
    assert counts(compiler) == (4, 0, 1)
    compiler.clear()
    assert compiler.executables() == {}


def test_a_program_that_does_not_compile_fails_warm_up():
    def broken(x):
        raise RuntimeError("broken on purpose")

    with pytest.raises(RuntimeError, match="broken on purpose"):
        Compiler(None, ONE).warm_up([program(), program("broken", function=broken)])


# ---- nothing global -------------------------------------------------------------------------------------

OPTIONS = {  # those of test_step.py: in one session its programs come from this cache
    "num_pages": 1021,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 8,
    "max_model_len": 128,
    "deterministic": False,
}
PROMPT = list(range(20, 33))
SCRIPT = """
    import json, sys
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_default_prng_impl", "rbg")
    jax.config.update("jax_default_matmul_precision", "bfloat16")
    before = dict(jax.config.values)
    sys.path.insert(0, sys.argv[1])
    from engine_tools import run, tiny_engine
    from jaxserve import SamplingParams

    with tiny_engine("float32", compilation_cache_dir="", **json.loads(sys.argv[2])) as engine:
        params = SamplingParams(max_tokens=8, temperature=0.8, seed=3, logprobs=1)
        (result,) = run(engine, [(json.loads(sys.argv[3]), params)])
    after = dict(jax.config.values)
    assert after == before, {name: (before[name], after[name]) for name in after if after[name] != before[name]}
    output = result.outputs[0]
    print(json.dumps([output.token_ids, output.cumulative_logprob]))
"""


@pytest.mark.slow
def test_an_engine_changes_no_setting_of_jax_and_foreign_ones_change_no_result(tmp_path_factory):
    """The other process has x64, another generator and a low default precision."""
    tests = Path(__file__).parents[1]
    arguments = [str(tests), json.dumps(OPTIONS), json.dumps(PROMPT)]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    token_ids, logprob = json.loads(done.stdout)
    cache = str(tmp_path_factory.getbasetemp() / "compiled")
    with tiny_engine("float32", compilation_cache_dir=cache, **OPTIONS) as engine:
        params = SamplingParams(max_tokens=8, temperature=0.8, seed=3, logprobs=1)
        (result,) = run(engine, [(PROMPT, params)])
    assert result.outputs[0].token_ids == token_ids
    assert result.outputs[0].cumulative_logprob == logprob


def test_after_a_warm_up_nothing_compiles(tmp_path_factory):
    cache = str(tmp_path_factory.getbasetemp() / "compiled")
    with tiny_engine("float32", compilation_cache_dir=cache, compile="warmup", **OPTIONS) as engine:
        programs = len(engine.runner.programs())
        assert engine.stats()["compilations"] == programs
        greedy = SamplingParams(max_tokens=9, temperature=0)
        run(engine, [(PROMPT, greedy), (PROMPT[:3], SamplingParams(max_tokens=5, n=2, logprobs=3))] * 3)
        assert engine.stats()["compilations_after_warmup"] == 0
        assert engine.stats()["compilations"] == programs
