"""The Containerfile: what it names exists, and its steps work outside a container. No image is built here."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import httpx
import pytest
from checkpoint_tools import SHAPES, write_tiny_checkpoint
from jsonargparse import ArgumentParser

from jaxserve.cli import serve
from jaxserve.cli.options import STRICT
from jaxserve.server.config import ServerConfig

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VENV = "/opt/venv"


def instructions():
    """[(target, instruction, its arguments)]"""
    found, target = [], None
    for line in (ROOT / "Containerfile").read_text().splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            if word == "FROM":
                target = rest.partition(" AS ")[2]
            found.append((target, word, rest))
    return found


def of(word):
    return [(target, rest) for target, kind, rest in instructions() if kind == word]


def copied():
    """[(source, destination in the image's folder)]"""
    pairs = []
    for _, rest in of("COPY"):
        *sources, destination = shlex.split(rest)
        several = destination.endswith("/")
        pairs += [(s, Path(destination) / Path(s).name if several else Path(destination)) for s in sources]
    return pairs


def installed():
    """{target: the extras with which it is installed}"""
    runs = [(target, shlex.split(rest)) for target, rest in of("RUN") if rest.startswith("scripts/install.sh")]
    assert {run[1] for _, run in runs} == {VENV}
    return {target: run[2].split(",") for target, run in runs}


def test_the_instructions_and_targets_are_those_that_we_mean():
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "USER"}
    assert {word for _, word, _ in instructions()} <= known
    bases = [rest.split(" AS ") for _, rest in of("FROM")]
    assert [name for _, name in bases] == ["source", "cuda", "cpu"]  # the last one is what is built unasked
    assert [base for base, _ in bases[1:]] == ["source", "source"]
    assert {target for target, _ in of("USER")} == {"cuda", "cpu"}  # nothing runs as root


def test_everything_that_is_copied_exists_and_is_let_in():
    let_in = [line.removeprefix("!") for line in (ROOT / ".containerignore").read_text().splitlines() if line[0] == "!"]
    assert all((ROOT / name).exists() for name in let_in)
    for source, _ in copied():
        assert (ROOT / source).exists()
        assert Path(source).parts[0] in let_in
    needed = {"pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    needed |= set(PROJECT["tool"]["setuptools"]["package-dir"].values())
    assert needed <= {source for source, _ in copied()}


def test_extras_python_and_port_exist():
    extras = PROJECT["project"]["optional-dependencies"]
    assert installed().keys() == {"cuda", "cpu"}
    for target, wanted in installed().items():
        assert set(wanted) <= set(extras)
        assert any(extra.startswith("cuda") for extra in wanted) == (target == "cuda")
    [(_, python)] = of("ARG")
    assert f">={python.removeprefix('PYTHON=')}" == PROJECT["project"]["requires-python"]
    [(_, port)] = of("EXPOSE")
    assert int(port) == ServerConfig().port
    assert f"127.0.0.1:{port}/health" in of("HEALTHCHECK")[0][1]


def test_the_entrypoint_is_a_command_with_its_options():
    command, subcommand, *options = json.loads(of("ENTRYPOINT")[0][1])
    assert command == f"{VENV}/bin/{next(iter(PROJECT['project']['scripts']))}"
    assert subcommand == "serve"
    parser = ArgumentParser(**STRICT)
    serve.add_options(parser)
    parsed = parser.parse_args(options)
    assert (parsed.host, parsed.port) == ("0.0.0.0", 8000)


def test_environment_variables_are_read_by_somebody():
    named = {pair.partition("=")[0] for _, rest in of("ENV") for pair in rest.split()}
    assert named - {"HF_HOME", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"} == {"JAXSERVE_CACHE"}
    assert '"JAXSERVE_CACHE"' in (ROOT / "jaxserve" / "config.py").read_text()


def test_the_script_says_what_is_missing():
    result = subprocess.run([ROOT / "scripts" / "install.sh"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "FOLDER is missing" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_steps_give_a_server_with_the_page(tmp_path):
    """The copied files alone, the script with the extras of the CPU's target, and the entry point."""
    source, venv = tmp_path / "source", tmp_path / "venv"
    for name, destination in copied():
        into = source / destination
        into.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, into, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, into)
    script = [source / "scripts" / "install.sh", venv, ",".join(installed()["cpu"])]
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run(script, check=True, timeout=800, env={**plain, "PYTHON": sys.executable})
    command = [part.replace(VENV, str(venv)) for part in json.loads(of("ENTRYPOINT")[0][1])]
    command = [part.replace("0.0.0.0", "127.0.0.1") for part in command]
    model = write_tiny_checkpoint(tmp_path / "model")
    options = [part for name, value in {"model": model, **SHAPES}.items() for part in (f"--{name}", str(value))]
    process = subprocess.Popen([*command, *options, "--port", "0"], stderr=subprocess.PIPE, text=True, env=plain)
    try:
        url = next(found[1] for line in process.stderr if (found := re.search(r"listening at (http://\S+)", line)))
        with httpx.Client(base_url=url, timeout=60) as client:
            assert client.get("/page/main.js").text == (ROOT / "server" / "page" / "main.js").read_text()
            until = time.monotonic() + 120
            while client.get("/ready").status_code != 200:
                assert time.monotonic() < until
                time.sleep(0.2)
            answer = client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3, "ignore_eos": True})
            assert answer.json()["usage"]["completion_tokens"] == 3
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
