"""A job from its configuration to result files and a report. It may be stopped at any moment and run again."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jaxserve.evaluation.config import JobConfig, ModelEntry
from jaxserve.evaluation.executors import Executor, LocalExecutor, RayExecutor
from jaxserve.evaluation.html_report import write_report
from jaxserve.evaluation.report import Run, build_report
from jaxserve.evaluation.results import ResultsFile, item_by_identity
from jaxserve.evaluation.tasks import Task
from jaxserve.evaluation.work import Work
from jaxserve.progress import item_bar


class Job:
    """A job whose data, templates and existing results have been checked; `run` loads models.

    Raises ValueError, naming file, line and field, for whatever can be known to be wrong without a model.
    """

    def __init__(self, config: JobConfig, *, overwrite: bool = False):
        self.config = config
        self.tasks = [Task(task, config) for task in config.tasks]
        self._folder = Path(config.output)
        self._files: dict[tuple[str, str], ResultsFile] = {}
        self._identities: dict[tuple[str, str], list[dict[str, Any]]] = {}
        with ExitStack() as opened:
            for model in config.models:
                for task in self.tasks:
                    opened.callback(self._open(model, task, overwrite).close)
            self._opened = opened.pop_all()

    def _open(self, model: ModelEntry, task: Task, overwrite: bool) -> ResultsFile:
        key, path = (model.name, task.config.name), self.results_path(model.name, task.config.name)
        self._identities[key] = identities = [task.identity(item, model.engine) for item in task.items]
        self._files[key] = ResultsFile(path, len(identities), item_by_identity(identities), overwrite=overwrite)
        return self._files[key]

    def results_path(self, model: str, task: str) -> Path:
        return self._folder / model / f"{task}.jsonl"

    @property
    def num_missing(self) -> int:
        return sum(len(file.missing) for file in self._files.values())

    def run(self, *, use_tqdm: bool | None = None) -> dict[str, Any]:
        """Compute what is missing, write report.json and report.html, and return the report."""
        total = sum(len(task.items) for task in self.tasks) * len(self.config.models)
        with item_bar(total, total - self.num_missing, use_tqdm) as bar:
            for model in self.config.models:
                bar.set_description_str(model.name)
                if any(self._files[model.name, task.config.name].missing for task in self.tasks):
                    self._run_model(model, bar)
                for task in self.tasks:
                    self._files[model.name, task.config.name].finish()
        return self._report()

    def _run_model(self, model: ModelEntry, bar) -> None:
        executor = self._executor(model)
        try:
            for result in executor.run(self._works(model)):
                index, number = result.key
                task = self.tasks[index]
                item, key = task.items[number], (model.name, task.config.name)
                self._files[key].append(number, task.line(item, self._identities[key][number], result))
                bar.update()
        finally:
            executor.close()

    def _works(self, model: ModelEntry) -> Iterator[Work]:
        for index, task in enumerate(self.tasks):
            for number in self._files[model.name, task.config.name].missing:
                yield task.work((index, number), task.items[number])

    def _executor(self, model: ModelEntry) -> Executor:
        if self.config.executor == "ray":
            return RayExecutor(model.engine, self.config.num_actors, self.config.ray_address)
        return LocalExecutor(model.engine)

    def _report(self) -> dict[str, Any]:
        runs = [
            Run(task.config.name, model.name, self._lines(model, task), str(self.results_path(model.name, name)))
            for task in self.tasks
            for model in self.config.models
            for name in [task.config.name]
        ]
        report = build_report(runs, samples=self.config.bootstrap, seed=self.config.seed)
        write_report(self._folder, "report", report, runs)
        return report

    def _lines(self, model: ModelEntry, task: Task) -> list[dict[str, Any]]:
        lines = self._files[model.name, task.config.name].lines
        return [lines[number] for number in sorted(lines)]

    def close(self) -> None:
        """Let others write the result files."""
        self._opened.close()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_) -> None:
        self.close()
