"""What an evaluation job's YAML file may say. Errors name the file, the line and the field. Knows no JAX."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, no_type_check

import yaml

from jaxserve.config import EngineConfig
from jaxserve.evaluation.metrics import METRICS_OF_KIND, Metric, metric_of
from jaxserve.evaluation.postprocess import Postprocess
from jaxserve.evaluation.templates import compiled_choices, compiled_template
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.config import DEMO_NAME
from jaxserve.validation import check_names, is_integer, require

KINDS = ("generate", "multiple_choice", "perplexity", "classification")
EXECUTORS = ("local", "ray")
FORMATS = ("jsonl", "csv", "parquet")
_NAME = re.compile(r"[\w][\w.\-]*")
_FIELD = re.compile(r"^(\w+)(?:[=:\[]| must )|has no field '(\w+)'|unexpected keyword argument '(\w+)'")


class ConfigError(ValueError):
    """What is wrong with a job, with file and line."""


@no_type_check  # it checks itself: the tests' type checker would come first with another error
@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where a task's lines come from.

    Attributes:
        path: a JSONL, CSV or Parquet file, relative to the job's file.
        format: `jsonl`, `csv` or `parquet`; None goes by the file's suffix.
        dataset: instead of a file: the name or folder of a Hugging Face dataset (extra `datasets`).
        subset: the dataset's configuration.
        split: the dataset's split.
    """

    path: str | None = None
    format: str | None = None
    dataset: str | None = None
    subset: str | None = None
    split: str = "test"

    def __post_init__(self):
        for name in ("path", "dataset", "subset", "split"):
            value = getattr(self, name)
            valid = value is None or (isinstance(value, str) and value != "")
            require(valid, name, value, "a text that is not empty")
        if (self.path is None) == (self.dataset is None):
            raise ValueError("path: a file must be given as path, or a dataset as dataset, and not both")
        require(self.format in (None, *FORMATS), "format", self.format, f"one of {', '.join(FORMATS)}")


@no_type_check
@dataclass(frozen=True, kw_only=True)
class FewshotConfig:
    """Solved examples before the question: the same for every item, so that they are computed once.

    Attributes:
        num: how many. An item that is one of them gets another in its place.
        data: where they are drawn from; None is the task's own data.
        target: the template of an example's answer; None is the task's `target`.
        separator: the text between examples (plain prompts).
        seed: what draws them; None is the job's seed.
    """

    num: int
    data: DataConfig | None = None
    target: str | None = None
    separator: str = "\n\n"
    seed: int | None = None

    def __post_init__(self):
        require(is_integer(self.num) and self.num >= 0, "num", self.num, "an integer of at least 0")
        require(isinstance(self.separator, str), "separator", self.separator, "a text")
        valid = self.seed is None or (is_integer(self.seed) and self.seed >= 0)
        require(valid, "seed", self.seed, "None or an integer of at least 0")
        if self.target is not None:
            compiled_template(self.target, "target")


@no_type_check
@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """One task. Templates are Jinja's, over the names of a data line; an unknown name is an error.

    Attributes:
        name: of the task and its result file.
        kind: `generate` samples an answer; `multiple_choice` takes the choice of the highest log-likelihood;
            `classification` likewise among `labels`; `perplexity` scores whole texts.
        data: a file's path or a `DataConfig`.
        prompt: the template of the question, or of the text for `perplexity`.
        target: the template of the right answer: for `multiple_choice` a letter or a number from 0, for
            `classification` one of the labels.
        chat: whether the prompt is a user's message for the model's chat template.
        system: the template of a system message (needs `chat`).
        choices: `multiple_choice`: templates, or an expression for a list of texts.
        labels: `classification`: the labels, the same for every item.
        delimiter: the text between prompt and answer; None is a space, and nothing in chats.
        fewshot: solved examples; see `FewshotConfig`.
        sampling: `generate`: a dict of `SamplingParams` fields; greedy and 256 tokens unless it says otherwise.
        postprocess: `generate`: what finds the answer in the text; see `postprocess.py`.
        metrics: names of metrics, or dicts with `function: module:name`; None takes those of the kind.
        window: `perplexity`: tokens of a window; None is `max_model_len`.
        stride: `perplexity`: new tokens in each window but the first; None is half a window.
        limit: the first so many lines only.
    """

    name: str
    kind: str
    data: DataConfig
    prompt: str
    target: str | None = None
    chat: bool = False
    system: str | None = None
    choices: str | tuple[str, ...] | None = None
    labels: tuple[str, ...] | None = None
    delimiter: str | None = None
    fewshot: FewshotConfig | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    postprocess: Any = None
    metrics: tuple[Any, ...] | None = None
    window: int | None = None
    stride: int | None = None
    limit: int | None = None

    def __post_init__(self):
        valid = isinstance(self.name, str) and _NAME.fullmatch(self.name) is not None
        require(valid, "name", self.name, "a word of letters, digits, '-', '_' and '.'")
        require(self.kind in KINDS, "kind", self.kind, f"one of {', '.join(KINDS)}")
        require(isinstance(self.data, DataConfig), "data", self.data, "a file's path or a dict")
        require(isinstance(self.chat, bool), "chat", self.chat, "True or False")
        require(self.delimiter is None or isinstance(self.delimiter, str), "delimiter", self.delimiter, "a text")
        for name in ("window", "stride", "limit"):
            value = getattr(self, name)
            require(value is None or (is_integer(value) and value >= 1), name, value, "an integer of at least 1")
        if self.window is not None:
            valid = 1 <= (self.stride or self.window // 2) < self.window
            require(valid, "stride", self.stride, f"from 1 to window - 1, and window is {self.window}")
        self._check_kind()
        for name in ("prompt", "target", "system"):
            if getattr(self, name) is not None:
                compiled_template(getattr(self, name), name)
        require(self.system is None or self.chat, "system", self.system, "left out unless chat is true")
        self._check_answers()
        if self.delimiter is None:
            object.__setattr__(self, "delimiter", "" if self.chat else " ")

    def _check_kind(self) -> None:
        """Fields that only some kinds have, and those that a kind must have."""
        wanted = {"choices": ("multiple_choice",), "labels": ("classification",)}
        wanted |= {"sampling": ("generate",), "postprocess": ("generate",)}
        wanted |= dict.fromkeys(("window", "stride"), ("perplexity",))
        wanted |= dict.fromkeys(("target", "fewshot"), tuple(kind for kind in KINDS if kind != "perplexity"))
        for name, kinds in wanted.items():
            given = getattr(self, name)
            if given and self.kind not in kinds:
                raise ValueError(f"{name}: it must be left out for kind={self.kind!r}")
            if given is None and self.kind in kinds and name in ("choices", "labels", "target"):
                raise ValueError(f"{name}: kind={self.kind!r} must have it")
        if self.kind == "perplexity" and self.chat:
            raise ValueError("chat: it must be left out for kind='perplexity'")

    def _check_answers(self) -> None:
        if self.kind == "multiple_choice":
            compiled_choices(self.choices)
        if self.kind == "classification":
            labels = self.labels
            valid = isinstance(labels, list | tuple) and len(labels) > 1 and all(isinstance(x, str) for x in labels)
            require(valid and len(set(labels)) == len(labels), "labels", labels, "two or more different texts")
            object.__setattr__(self, "labels", tuple(labels))
        require(isinstance(self.sampling, Mapping), "sampling", self.sampling, "a dict of sampling parameters")
        try:
            params = self.params()
        except (TypeError, ValueError) as error:
            raise ValueError(f"sampling: {error}") from None
        require(params.n == 1, "sampling", dict(self.sampling), "without n: there is one answer per item")
        Postprocess.parse(self.postprocess)
        given = METRICS_OF_KIND[self.kind][:1] if self.metrics is None else self.metrics
        valid = isinstance(given, list | tuple) and len(given) > 0
        require(valid, "metrics", given, "a list of at least one metric")
        object.__setattr__(self, "metrics", tuple(given))
        names = [metric.name for metric in self.built_metrics()]
        require(len(set(names)) == len(names), "metrics", names, "different names")

    def params(self) -> SamplingParams:
        """The sampling parameters of an item, without its seed."""
        return SamplingParams.from_dict({"temperature": 0.0, "max_tokens": 256, **self.sampling})

    def built_metrics(self) -> list[Metric]:
        return [metric_of(given, self.kind, self.labels) for given in self.metrics]


@dataclass(frozen=True)
class ModelEntry:
    """One of the models of a job."""

    name: str
    engine: EngineConfig


@no_type_check
@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """A whole job.

    Attributes:
        tasks, models: what is run, each task with each model.
        output: the folder of the results.
        seed: draws few-shot examples, the seeds of sampled answers, and bootstrap samples.
        bootstrap: resamples for a confidence interval.
        executor: `local` runs in this process, `ray` on actors that each have an engine (extra `ray`).
        num_actors: of executor `ray`.
        ray_address: of a running Ray cluster; None starts Ray on this machine.
    """

    tasks: tuple[TaskConfig, ...]
    models: tuple[ModelEntry, ...]
    output: str
    seed: int = 0
    bootstrap: int = 1000
    executor: str = "local"
    num_actors: int = 2
    ray_address: str | None = None

    def __post_init__(self):
        require(isinstance(self.output, str) and bool(self.output), "output", self.output, "a folder's path")
        require(is_integer(self.seed) and 0 <= self.seed < 2**63, "seed", self.seed, "an integer from 0 to 2**63 - 1")
        for name, least in (("bootstrap", 1), ("num_actors", 1)):
            value = getattr(self, name)
            require(is_integer(value) and value >= least, name, value, f"an integer of at least {least}")
        require(self.executor in EXECUTORS, "executor", self.executor, f"one of {', '.join(EXECUTORS)}")
        for name in ("tasks", "models"):
            names = [entry.name for entry in getattr(self, name)]
            require(len(names) > 0, name, names, "a list of at least one")
            require(len(set(names)) == len(names), name, names, "of different names")


@no_type_check
def load_job(file: str | Path, overrides: Mapping[str, Any] | None = None) -> JobConfig:
    """The job that a YAML file describes.

    `overrides`: `output`, `limit`, `data` (a path for the only task, or {task: path}) and `engine` (options for all
    models). Raises ConfigError with file, line and field.
    """
    file = Path(file)
    return _Parser(file, overrides or {}).job()


class _Parser:
    """One YAML file on its way to a JobConfig; knows the line of every key."""

    def __init__(self, file: Path, overrides: Mapping[str, Any]):
        try:
            text = file.read_text(encoding="utf-8")
            self.raw, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f" line {mark.line + 1}:" if mark else ""
            raise ConfigError(f"{file}:{line} no YAML: {getattr(error, 'problem', None) or error}") from None
        self.file, self.overrides = file, overrides
        self.lines = {} if node is None else dict(_lines(node, ()))

    def job(self) -> JobConfig:
        raw = self._mapping(self.raw, ())
        known = [field.name for field in dataclasses.fields(JobConfig)]
        wrong = next((name for name in raw if name not in (*known, "engine")), None)
        if wrong is not None:
            raise self.error((wrong,), f"{wrong}: unknown field: a job has engine, {', '.join(known)}")
        values = {name: value for name, value in raw.items() if name != "engine"}
        values |= {name: self.overrides[name] for name in ("output",) if self.overrides.get(name) is not None}
        if "output" not in values:
            values["output"] = f"results/{self.file.stem}"
        values["models"] = self._models(raw)
        tasks = self._list(raw, "tasks")
        given, known = self.overrides.get("data"), [task.get("name") for task in tasks if isinstance(task, Mapping)]
        wrong = [name for name in given if name not in known] if isinstance(given, Mapping) else []
        if wrong:
            raise ConfigError(f"data: {wrong[0]!r}: there is no such task in {self.file}")
        values["tasks"] = tuple(self._task(task, ("tasks", index), len(tasks)) for index, task in enumerate(tasks))
        return self._build(JobConfig, values, ())

    def _models(self, raw: Mapping) -> tuple[ModelEntry, ...]:
        shared = self._mapping(raw.get("engine") or {}, ("engine",))
        engine_overrides = self.overrides.get("engine") or {}
        entries = self._list(raw, "models") if "models" in raw else [{"name": _model_name(shared.get("model"))}]
        models = []
        for index, entry in enumerate(entries):
            where = ("models", index) if "models" in raw else ("engine",)
            entry = dict(self._mapping(entry, where))
            name = entry.pop("name", None) or _model_name(entry.get("model", shared.get("model")))
            if not _NAME.fullmatch(str(name)):
                raise self.error(
                    (*where, "name"), f"name={name!r}: name must be a word: letters, digits, '-', '_', '.'"
                )
            for place, options in ((("engine",), shared), (where, entry)):
                self._build(EngineConfig, options, place)
            models.append(ModelEntry(str(name), EngineConfig.from_dict({**shared, **entry, **engine_overrides})))
        return tuple(models)

    def _task(self, raw: Any, where: tuple, num_tasks: int) -> TaskConfig:
        values = dict(self._mapping(raw, where))
        path = self._data_override(values.get("name"), num_tasks)
        values["data"] = DataConfig(path=path) if path else self._data(values.get("data"), (*where, "data"))
        if values.get("fewshot") is not None:
            fewshot = dict(self._mapping(values["fewshot"], (*where, "fewshot")))
            if fewshot.get("data") is not None:
                fewshot["data"] = self._data(fewshot["data"], (*where, "fewshot", "data"))
            values["fewshot"] = self._build(FewshotConfig, fewshot, (*where, "fewshot"))
        if self.overrides.get("limit") is not None:
            values["limit"] = self.overrides["limit"]
        return self._build(TaskConfig, values, where)

    def _data_override(self, task: Any, num_tasks: int) -> str | None:
        """A path from the command line is relative to where the command runs."""
        given = self.overrides.get("data")
        if given is None:
            return None
        if isinstance(given, str):
            if num_tasks > 1:
                raise ConfigError(f"data={given!r}: with several tasks it must be given as TASK=PATH")
            return str(Path(given).absolute())
        return str(Path(given[task]).absolute()) if task in given else None

    def _data(self, raw: Any, where: tuple) -> DataConfig:
        raw = {"path": raw} if isinstance(raw, str) else self._mapping(raw, where)
        data = self._build(DataConfig, raw, where)
        path = None if data.path is None else str(self.file.parent / Path(data.path).expanduser())
        return dataclasses.replace(data, path=path)

    def _list(self, raw: Mapping, name: str) -> list:
        value = raw.get(name)
        if not isinstance(value, list) or not value:
            raise self.error((name,), f"{name}={value!r}: {name} must be a list of at least one")
        return value

    def _mapping(self, raw: Any, where: tuple) -> Mapping:
        if not isinstance(raw, Mapping) or not all(isinstance(key, str) for key in raw):
            raise self.error(where, f"{raw!r}: it must hold fields by name")
        return raw

    def _build(self, cls: type, values: Mapping, where: tuple) -> Any:
        try:
            check_names(cls, values)
            return cls(**values)
        except (TypeError, ValueError) as error:
            found = _FIELD.search(str(error))
            name = next((part for part in found.groups() if part), None) if found else None
            raise self.error((*where, name) if (*where, name) in self.lines else where, str(error)) from None

    def error(self, path: tuple, message: str) -> ConfigError:
        """The message with the file, the line of the nearest field above, and where that is."""
        while path and path not in self.lines:
            path = path[:-1]
        at = f" line {self.lines[path]}:" if path in self.lines else ""
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        return ConfigError(f"{self.file}:{at} {place + ': ' if place else ''}{message}")


def _lines(node: yaml.Node, path: tuple):
    """(path of keys and indices, line from 1) of everything below a YAML node."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line + 1
            yield from _lines(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, index), value.start_mark.line + 1
            yield from _lines(value, (*path, index))


def _model_name(model: Any) -> str:
    return re.sub(r"[^\w.\-]+", "-", Path(str(model)).name) if model else DEMO_NAME
