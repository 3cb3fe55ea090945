"""`gpu_check` runs every section, interpreted, in a virtual environment with the packages of the GPU machine alone."""

import json
import subprocess
import venv
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import jaxserve
from jaxserve.bench.report import Report

ALLOWED = ("jax", "flax", "numpy", "jaxtyping")
ELSEWHERE = ("kernels_pallas", "models", "server")  # packages of jaxserve that stand beside it


def brought_by(packages: tuple[str, ...]) -> dict[str, Path]:
    """The top-level files and folders of these packages and of what they require, here."""
    found, seen, todo = {}, set(), list(packages)
    while todo:
        name = todo.pop().lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue
        needed = map(Requirement, installed.requires or ())
        todo += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
        tops = {file.parts[0] for file in installed.files} - {"..", "__pycache__"}
        found |= {top: Path(installed.locate_file(top)) for top in tops}
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The interpreter of a virtual environment with links to just the allowed packages, and to ours without what it
    requires elsewhere."""
    folder = tmp_path_factory.mktemp("gpu_machine")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name, path in brought_by(ALLOWED).items():
        (site / name).symlink_to(path)
    ours = {path.name: path for path in Path(jaxserve.__path__[0]).iterdir()}
    ours |= {name: Path(import_module(f"jaxserve.{name}").__path__[0]) for name in ELSEWHERE}
    (site / "jaxserve").mkdir()
    for name, path in ours.items():
        (site / "jaxserve" / name).symlink_to(path)
    return folder / "bin/python"


def run(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    # Isolated from this process's folder and PYTHONPATH, where more could be imported.
    return subprocess.run([python, "-I", *arguments], capture_output=True, text=True, timeout=1500, cwd=cwd)


def check(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    return run(python, "-m", "jaxserve.bench.gpu_check", *arguments, cwd=cwd)


def rows_of(python: Path, *arguments: str, cwd: Path) -> list[dict]:
    """The rows of an interpreted check, none of which failed."""
    found = check(python, "--interpret", "--limit", "1500", "--json", "rows.json", *arguments, cwd=cwd)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    rows = json.loads((cwd / "rows.json").read_text())
    assert not [row for row in rows if row["ok"] is False]
    return rows


def test_it_needs_the_gpu_machines_packages_only(python, tmp_path):
    """All sections are imported; the cheapest are run."""
    rows = rows_of(python, "--only", "ceilings", "product bits", cwd=tmp_path)
    assert [row["value"] for row in rows if row["ok"]] == ["same bits", "same bits"]
    assert [row["unit"] for row in rows if row["section"] == "ceilings"] == ["TB/s", "TFLOP/s", "s"]


@pytest.mark.slow
def test_every_section_runs_interpreted(python, tmp_path):
    rows = rows_of(python, cwd=tmp_path)
    judged = {row["section"] for row in rows if row["ok"]}
    numbers_and_bits = {
        f"{part} {what}" for part in ("attention", "verification", "product") for what in ("numbers", "bits")
    }
    assert judged == numbers_and_bits | {"step bits"}
    timed = {row["section"] for row in rows if row["share"] is not None}
    kinds = "decode", "decode of other pages", "draft attention", "prefill", "verification", "product"
    speed = {f"{part} speed" for part in kinds}
    assert timed == {"ceilings", "decode steps", *speed}
    steps = {row["name"] for row in rows if row["section"] == "decode steps" and row["unit"] in ("ms", "us")}
    how = "1 layers, {}command buffers, batch 2, context 70"
    assert steps == {how.format(no) + host for no in ("", "no ") for host in ("", ": host")}


def test_nothing_else_is_there(python, tmp_path):
    for name in ("transformers", "starlette", "tokenizers", "pytest"):
        found = run(python, "-c", f"import {name}", cwd=tmp_path)
        assert f"No module named '{name}'" in found.stderr


def test_without_a_gpu_it_says_what_it_needs(python, tmp_path):
    found = check(python, cwd=tmp_path)
    assert found.returncode == 2
    assert "needs a GPU of compute capability 9.0 (Hopper), this is cpu; see --interpret" in found.stderr


def test_a_section_that_fails_is_a_row_and_the_rest_runs(capsys, tmp_path):
    report = Report(60.0)
    report.section("first", lambda report: report.add("one", 1.0, "s", share=0.5))
    report.section("second", lambda report: 1 / 0)
    report.section("third", lambda report: report.add("bits", "differ", ok=False))
    report.limit_s = 0.0
    report.section("fourth", lambda report: report.add("never", "run"))
    report.section("last", lambda report: report.add("never", "run"), needed=False)
    assert report.finish(tmp_path / "rows.json") == 1
    names = [(row.section, row.name) for row in report.failed]
    assert names == [("second", "stopped"), ("third", "bits"), ("fourth", "all of it")]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows[0] == {"section": "first", "name": "one", "value": 1.0, "unit": "s", "share": 0.5, "ok": None}
    out = capsys.readouterr().out
    assert "| first | one | 1 | s | 50% |  |" in out
    assert "second | stopped | ZeroDivisionError: division by zero | FAILED" in out
