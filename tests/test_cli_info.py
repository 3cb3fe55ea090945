"""`jaxserve info` against the engine that the same options start."""

import json

import pytest
from checkpoint_tools import SHAPES, write_tiny_checkpoint
from cli_tools import flags, refused, run

from jaxserve import LLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("info") / "model")


def engine_flags(folder):
    both = flags(folder)
    return both[: both.index("--sampling.temperature")]


@pytest.mark.parametrize("deterministic", [True, False])
def test_it_says_what_the_engine_becomes(capsys, folder, deterministic, monkeypatch):
    options = {**SHAPES, "deterministic": deterministic, "dtype": "bfloat16"}
    with LLM(str(folder), **options) as llm:
        engine = llm.engine
        expected = {
            "model": str(folder),
            "tokenizer": str(folder),
            "dtype": "bfloat16",
            "max_model_len": engine.max_model_len,
            "memory": str(engine.memory_plan).removeprefix("memory: "),
            "token_buckets": list(engine.runner.buckets.tokens),
            "row_buckets": list(engine.runner.buckets.rows),
            "policy": "fcfs",
        }
    monkeypatch.setattr("jaxserve.startup.load_decoder", lambda *_, **__: pytest.fail("weights were loaded"))
    arguments = [*engine_flags(folder), "--dtype", "bfloat16", "--deterministic", str(deterministic).lower()]
    status, out, err = run(capsys, "info", *arguments, "--json", "true")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert {name: found[name] for name in expected} == expected
    assert found["deterministic"].startswith(f"{deterministic}".lower())
    assert "4 heads" in found["architecture"]
    status, out, _ = run(capsys, "info", *arguments)
    assert status == 0
    assert [line.split(":")[0] for line in out.splitlines()] == list(found)


def test_what_starting_would_refuse(capsys, folder):
    refused(capsys, "info", *engine_flags(folder), "--num-pages", 2, parts=["max_model_len=128", "32"], status=1)
    refused(capsys, "info", "--model", "no-such", parts=["model='no-such'"], status=1)
    refused(capsys, "info", "--temperature", 0, parts=["temperature"])
