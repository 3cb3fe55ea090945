"""Jobs and batches that are killed at any moment and continued: results are those of an uninterrupted run."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from evaluation_tools import GENERATE, run_job, without_times, write_job
from test_batch import SHAPES, comparable, completion, write


def whole_lines(path: Path) -> bytes:
    """What is in the file but for a torn last line; nothing if there is no file."""
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def kill(command: Sequence[str], file: Path, source: random.Random, total: int, lines: int, seconds: float = 0) -> int:
    """Run the command, which would give `file` `total` lines, and SIGKILL it soon after it has written so many `lines`
    more, or before that after so many `seconds`, if they are given; returns the process's id.
    """
    before = whole_lines(file)
    wanted, latest = before.count(b"\n") + lines, time.monotonic() + (seconds or 120)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and time.monotonic() < latest:
            if whole_lines(file).count(b"\n") >= wanted:
                time.sleep(source.random() * 0.02)
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    after = whole_lines(file)
    assert after.startswith(before)
    assert (0 if seconds else wanted) <= after.count(b"\n") < total
    return process.pid


def run_to_the_end(command: Sequence[str], file: Path) -> float:
    """Run the command, which writes a new `file`; returns the seconds from its start to the first line."""
    begin, first = time.monotonic(), 0.0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            first = first or bool(whole_lines(file)) * (time.monotonic() - begin)
            time.sleep(0.01)
    assert process.returncode == 0
    assert first > 0
    return first


def ten_moments(source: random.Random, first: float, lines: int) -> list[dict[str, Any]]:
    """When to `kill`, in any order: four times by the clock while a process starts that has `first` seconds to its
    first line, else within so many `lines`.
    """
    moments = [{"lines": lines, "seconds": first * source.uniform(at, at + 0.25)} for at in (0.0, 0.25, 0.5, 0.75)]
    moments += [{"lines": source.randint(1, lines)} for _ in range(6)]
    source.shuffle(moments)
    return moments


# ---- jobs -------------------------------------------------------------------------------------------------


def counted_job(model, folder, num_items):
    """(command, results file, file of "process item" for every scoring) of a job with a metric that keeps count."""
    folder.mkdir(exist_ok=True)
    (folder / "counting_metric.py").write_text(
        "import os\n"
        "def counted(found, target, line):\n"
        f"    with open({str(folder / 'scored')!r}, 'a') as file:\n"
        "        file.write(f\"{os.getpid()} {line['a']}\\n\")\n"
        "    return float(found == target)\n"
    )
    task = {**GENERATE, "metrics": ["accuracy", {"function": "counting_metric:counted"}]}
    path = write_job(folder, model, task, models=[{"name": "tiny"}])
    rows = [{"a": n, "b": 3 * n % 7} for n in range(num_items)]
    (folder / "adding.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "jaxserve.cli", "eval", str(path)]
    return command, folder / "results" / "tiny" / "adding.jsonl", folder / "scored"


def scored_by(pid, scored):
    """The items that a process has scored, but for its trial of the metric before a model is loaded."""
    pairs = [line.split() for line in scored.read_text().splitlines()] if scored.exists() else []
    return [int(item) for process, item in pairs if int(process) == pid][1:]


def killed_and_continued(job, moments, source, num_items):
    """Kill the job at each moment, then run it to its end; none scores again what is in the file."""
    command, file, scored = job
    for moment in moments:
        items = lambda: {json.loads(line)["item"] for line in whole_lines(file).splitlines()}
        before = items()
        mine = scored_by(kill(command, file, source, num_items, **moment), scored)
        assert not before & set(mine)
        assert items() - before <= set(mine)
        assert len(mine) <= len(items() - before) + 1  # it is killed between a scoring and its line
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def test_a_killed_job_is_continued(model, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path / "once")  # the metric, as the command line has it
    job = counted_job(model, tmp_path / "killed", 40)
    killed_and_continued(job, [{"lines": 5}], random.Random(0), 40)
    run_job(counted_job(model, tmp_path / "once", 40)[0][-1])
    assert without_times(job[1]) == without_times(tmp_path / "once" / "results" / "tiny" / "adding.jsonl")


@pytest.mark.slow  # twelve processes
def test_ten_kills_change_nothing(model, tmp_path):
    num_items, source = 400, random.Random(1)
    once, killed = (counted_job(model, tmp_path / name, num_items) for name in ("once", "killed"))
    first = run_to_the_end(*once[:2])
    killed_and_continued(killed, ten_moments(source, first, lines=25), source, num_items)
    assert without_times(killed[1]) == without_times(once[1])
    assert len(killed[2].read_text().splitlines()) <= num_items + 10 + 11  # each kill, each process's trial


# ---- batches ----------------------------------------------------------------------------------------------


@pytest.mark.slow  # twelve processes
def test_a_killed_batch_is_continued(model, tmp_path):
    lines = [completion(f"r{n}", f"number {n}", temperature=1.0, max_tokens=30) for n in range(100)]
    write(tmp_path / "in.jsonl", lines)
    command = [sys.executable, "-m", "jaxserve.cli", "batch", "-i", str(tmp_path / "in.jsonl")]
    command += ["--engine.model", str(model), *SHAPES, "--engine.max_num_seqs", "2", "-o"]
    once, out, source = tmp_path / "once", tmp_path / "out", random.Random(0)
    first = run_to_the_end([*command, str(once)], once)
    for moment in ten_moments(source, first, lines=4):
        kill([*command, str(out)], out, source, len(lines), **moment)
    kept = whole_lines(out).splitlines()
    assert subprocess.run([*command, str(out)], check=False).returncode == 0
    assert set(kept) <= set(out.read_bytes().splitlines())
    read = lambda path: comparable([json.loads(line) for line in path.read_text().splitlines()])
    assert read(out) == read(once)
