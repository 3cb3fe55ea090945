"""`gpu_check` runs every section, interpreted, where only the packages of the GPU machine can be imported."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from jaxserve.bench.report import Report

ALLOWED = ("jax", "flax", "numpy", "jaxtyping")

# A finder in front of all others that refuses what the allowed packages do not bring.
RUN = """
import sys, json
refused = set(json.loads(sys.argv[1]))
class Refuse:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r} on the GPU machine", name=name)
sys.meta_path.insert(0, Refuse)
from jaxserve.bench import gpu_check
sys.exit(gpu_check.main(sys.argv[2:]))
"""


def not_brought_by(packages: tuple[str, ...]) -> list[str]:
    """The import names of everything installed but these packages and what they require."""
    wanted, todo = set(), list(packages)
    while todo:
        name = todo.pop()
        if name in wanted:
            continue
        try:
            needed = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:
            continue
        wanted.add(name)
        todo += [r.name.lower() for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    normal = lambda name: name.lower().replace("_", "-")
    wanted = {normal(name) for name in wanted}
    wanted.add("jaxserve")  # without what it requires elsewhere
    return [top for top, names in packages_distributions().items() if not wanted & set(map(normal, names))]


def check(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    names = json.dumps(not_brought_by(ALLOWED))
    command = [sys.executable, "-c", RUN, names, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=cwd)


def rows_of(*arguments: str, cwd: Path) -> list[dict]:
    """The rows of an interpreted check, none of which failed."""
    found = check("--interpret", "--limit", "1500", "--json", "rows.json", *arguments, cwd=cwd)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    rows = json.loads((cwd / "rows.json").read_text())
    assert not [row for row in rows if row["ok"] is False]
    return rows


def test_it_needs_the_gpu_machines_packages_only(tmp_path):
    """All sections are imported; the cheapest are run."""
    rows = rows_of("--only", "ceilings", "product bits", cwd=tmp_path)
    assert [row["value"] for row in rows if row["ok"]] == ["same bits", "same bits"]
    assert [row["unit"] for row in rows if row["section"] == "ceilings"] == ["TB/s", "TFLOP/s", "s"]


@pytest.mark.slow
def test_every_section_runs_interpreted(tmp_path):
    rows = rows_of(cwd=tmp_path)
    judged = {row["section"] for row in rows if row["ok"]}
    numbers_and_bits = {
        f"{part} {what}" for part in ("attention", "verification", "product") for what in ("numbers", "bits")
    }
    assert judged == numbers_and_bits | {"step bits"}
    timed = {row["section"] for row in rows if row["share"] is not None}
    speed = {f"{part} speed" for part in ("decode", "draft attention", "prefill", "verification", "product")}
    assert timed == {"ceilings", "decode steps", *speed}
    steps = {row["name"] for row in rows if row["section"] == "decode steps" and row["unit"] in ("ms", "us")}
    how = "1 layers, {}command buffers, batch 2, context 70"
    assert steps == {how.format(no) + host for no in ("", "no ") for host in ("", ": host")}


def test_the_blocker_blocks(tmp_path):
    code = RUN.replace("from jaxserve.bench import gpu_check", "import transformers")
    names = json.dumps(not_brought_by(ALLOWED))
    found = subprocess.run([sys.executable, "-c", code, names], capture_output=True, text=True, cwd=tmp_path)
    assert "No module named 'transformers' on the GPU machine" in found.stderr


def test_without_a_gpu_it_says_what_it_needs(tmp_path):
    found = check(cwd=tmp_path)
    assert found.returncode == 2
    assert "needs a GPU of compute capability 9.0 (Hopper), this is cpu; see --interpret" in found.stderr


def test_a_section_that_fails_is_a_row_and_the_rest_runs(capsys, tmp_path):
    report = Report(60.0)
    report.section("first", lambda report: report.add("one", 1.0, "s", share=0.5))
    report.section("second", lambda report: 1 / 0)
    report.section("third", lambda report: report.add("bits", "differ", ok=False))
    report.limit_s = 0.0
    report.section("fourth", lambda report: report.add("never", "run"))
    assert report.finish(tmp_path / "rows.json") == 1
    names = [(row.section, row.name) for row in report.failed]
    assert names == [("second", "stopped"), ("third", "bits"), ("fourth", "all of it")]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows[0] == {"section": "first", "name": "one", "value": 1.0, "unit": "s", "share": 0.5, "ok": None}
    out = capsys.readouterr().out
    assert "| first | one | 1 | s | 50% |  |" in out
    assert "second | stopped | ZeroDivisionError: division by zero | FAILED" in out
