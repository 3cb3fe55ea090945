"""A job over two actors, of which one is killed."""

import os
import signal
import threading
import time

import pytest
from evaluation_tools import CHOICE, GENERATE, TEXTS, lines_of, run_job, without_times, write_job

from jaxserve.evaluation import executors, job

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,  # a cluster and three engines to start
    pytest.mark.filterwarnings("ignore:os.fork"),  # JAX is loaded here before Ray starts its processes
]


def test_an_actor_is_lost_and_the_results_are_the_same(model, tmp_path, monkeypatch):
    for name in ("local", "ray"):
        (tmp_path / name).mkdir()
    tasks = ({**GENERATE, "sampling": {"max_tokens": 60, "temperature": 1.0, "ignore_eos": True}}, CHOICE, TEXTS)
    models = [{"name": "tiny", "max_num_seqs": 2}]
    run_job(write_job(tmp_path / "local", model, *tasks, models=models))
    path = write_job(tmp_path / "ray", model, *tasks, models=models, executor="ray", num_actors=2)
    made, killed = [], []

    class Watched(executors.RayExecutor):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    def kill_one():
        file = tmp_path / "ray" / "results" / "tiny" / "adding.jsonl"
        while not made:
            time.sleep(0.01)
        pid = ray.get(made[0].actors[0].pid.remote())  # answered when its engine is there
        while not (file.exists() and file.read_bytes().count(b"\n") >= 1):
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    monkeypatch.setattr(job, "RayExecutor", Watched)
    thread = threading.Thread(target=kill_one)
    thread.start()
    run_job(path)
    thread.join()
    assert killed
    assert made[0].num_lost == 1
    for task in tasks:
        files = [tmp_path / name / "results" / "tiny" / f"{task['name']}.jsonl" for name in ("local", "ray")]
        assert without_times(files[0]) == without_times(files[1])
        assert [line["item"] for line in lines_of(files[1])] == list(range(len(lines_of(files[0]))))
