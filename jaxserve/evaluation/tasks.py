"""A task made of its data: items with their prompts, the work of each for an engine, and its final line of results."""

import hashlib
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.evaluation.config import DataConfig, JobConfig, TaskConfig
from jaxserve.evaluation.data import Row, read_rows
from jaxserve.evaluation.metrics import Answered, Metric, total_of
from jaxserve.evaluation.postprocess import Postprocess, plain_number
from jaxserve.evaluation.templates import render, render_choices
from jaxserve.evaluation.work import Result, Work

# Options that say how an engine runs and not what it computes: a job may be resumed with others.
_RUNNING = frozenset(
    (
        *("num_pages", "memory_utilization", "max_num_seqs", "max_num_batched_tokens", "scheduling_policy"),
        *("priority_aging_s", "enable_prefix_caching", "enable_chunked_prefill", "async_scheduling", "page_size"),
        *("compile", "compilation_cache_dir", "speculative_config", "mesh"),
    )
)


@dataclass(frozen=True)
class Item:
    """One line of the data, ready to be asked.

    question: the item's own part of the prompt, without the examples before it.
    prompt: all of it, a text or messages.
    answers: the texts that are scored after the prompt, without the delimiter.
    right: the index of the right one, -1 where there are none.
    """

    index: int
    row: Row
    question: str
    prompt: str | list[dict[str, str]]
    target: str | None = None
    answers: tuple[str, ...] = ()
    right: int = -1


@dataclass(frozen=True)
class Solved:
    """A data line with its question and the parts of its answer."""

    question: str
    target: str | None
    answers: tuple[str, ...]
    right: int


class Task:
    """A task and its items. Everything that data and templates can get wrong is found here, before a model is there."""

    def __init__(self, config: TaskConfig, job: JobConfig):
        self.config, self.metrics = config, config.built_metrics()
        self._seed = job.seed
        self._params = config.params() if config.kind == "generate" else None
        self._postprocess = Postprocess.parse(config.postprocess)
        rows = self._rows(config.data)
        self._draw_examples(rows)
        self.items = [self._item(index, row) for index, row in enumerate(rows[: config.limit])]
        self._try_metrics(self.items[0])

    def _rows(self, data: DataConfig) -> list[Row]:
        try:
            return read_rows(data)
        except ValueError as error:
            raise ValueError(f"task {self.config.name}: {error}") from None

    def _draw_examples(self, rows: list[Row]) -> None:
        """The examples, one more than are shown where an item may be among them."""
        fewshot = self.config.fewshot
        self._examples: list[tuple[int, str, str]] = []  # (number of its line if it may be an item, question, answer)
        if fewshot is None or fewshot.num == 0:
            return
        own = fewshot.data is None
        source = rows if own else self._rows(fewshot.data)
        wanted = fewshot.num + own
        if len(source) < wanted:
            raise ValueError(f"task {self.config.name}: fewshot.num={fewshot.num}: there are {len(source)} data lines")
        seed = self._seed if fewshot.seed is None else fewshot.seed
        drawn = random.Random(f"{seed}/{self.config.name}").sample(range(len(source)), wanted)
        self._examples = [(index if own else -1, *self._example(source[index])) for index in drawn]

    def _example(self, row: Row) -> tuple[str, str]:
        """Question and answer."""
        solved, template = self._solved(row), self.config.fewshot.target
        return solved.question, solved.target if template is None else self._render(template, "fewshot.target", row)

    # ---- items ------------------------------------------------------------------------------------------

    def _render(self, template: str, field: str, row: Row) -> str:
        return self._checked(row, render, template, field, row.values)

    def _checked(self, row: Row, function, *arguments) -> Any:
        try:
            return function(*arguments)
        except ValueError as error:
            raise ValueError(f"{row.place}: task {self.config.name}: {error}") from None

    def _solved(self, row: Row) -> Solved:
        config = self.config
        question = self._render(config.prompt, "prompt", row)
        if not question:
            raise ValueError(f"{row.place}: task {config.name}: prompt: it is empty")
        if config.kind == "perplexity":
            return Solved(question, None, (), -1)
        target = self._render(config.target, "target", row)
        if config.kind == "generate":
            if self._postprocess.kind == "number":
                target = plain_number(target.strip()) or target
            return Solved(question, target, (), -1)
        if config.kind == "classification":
            answers = config.labels
        else:
            answers = tuple(self._checked(row, render_choices, config.choices, row.values))
        right = self._checked(row, _position, target.strip(), answers, config.kind)
        return Solved(question, answers[right], answers, right)

    def _item(self, index: int, row: Row) -> Item:
        solved = self._solved(row)
        prompt = self._prompt(index, row, solved.question)
        return Item(index, row, solved.question, prompt, solved.target, solved.answers, solved.right)

    def _prompt(self, index: int, row: Row, question: str) -> str | list[dict[str, str]]:
        config = self.config
        shown = [(asked, answer) for place, asked, answer in self._examples if place != index]
        shown = shown[: config.fewshot.num] if shown else []
        if not config.chat:
            parts = [f"{asked}{config.delimiter}{answer}{config.fewshot.separator}" for asked, answer in shown]
            return "".join([*parts, question])
        messages = []
        if config.system is not None:
            messages.append({"role": "system", "content": self._render(config.system, "system", row)})
        for asked, answer in shown:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": question}]

    def _try_metrics(self, item: Item) -> None:
        """A function that cannot score even the right answer is found before a model is loaded."""
        for metric, given in zip(self.metrics, self.config.metrics, strict=True):
            if isinstance(given, Mapping):
                self._vector(metric, item, Answered(item.target, item.target, item.row.values))

    # ---- work and lines ---------------------------------------------------------------------------------

    def work(self, key: Any, item: Item) -> Work:
        """What an engine has to do for the item."""
        config = self.config
        params = None
        if self._params is not None:
            seed = self._params.seed if self._params.seed is not None else _seed(self._seed, config.name, item.index)
            params = replace(self._params, seed=seed)
        answers = tuple(config.delimiter + answer for answer in item.answers)
        kind = {"generate": "generate", "perplexity": "perplexity"}.get(config.kind, "score")
        return Work(key, kind, item.prompt, answers, params, config.window, config.stride)

    def identity(self, item: Item, engine: EngineConfig) -> dict[str, Any]:
        """What makes a line in a result file that of this item: its number, its prompt, and everything else."""
        config = self.config
        asked = {name: value for name, value in asdict(config).items() if name in _ASKED}
        computed = {name: str(value) for name, value in vars(engine).items() if name not in _RUNNING}
        drafts = engine.speculative_config
        if drafts is not None and drafts.acceptance == "rejection":  # other tokens, of the same distribution
            computed["speculative_config"] = str(drafts)
        settings = [asked, computed, self._seed if self._params is not None else None, item.target, item.answers]
        return {"item": item.index, "prompt_sha256": _digest(item.prompt), "settings": _digest(settings)[:16]}

    def line(self, item: Item, identity: dict[str, Any], result: Result) -> dict[str, Any]:
        """The item's final line. ValueError for a metric that fails."""
        line = {**identity, "prompt": item.question}
        if item.target is not None:
            line["target"] = item.target
        line |= {"choices": list(item.answers)} if item.answers else {}
        line |= result.values
        if result.error is not None:
            line["error"] = result.error
        else:
            answered = self._answered(item, result)
            if self.config.kind != "perplexity":
                line["prediction"] = answered.prediction
            vectors = {metric.name: self._vector(metric, item, answered) for metric in self.metrics}
            line["scores"] = {name: float(total_of(name)(np.array(vector))) for name, vector in vectors.items()}
            line["vectors"] = vectors
        seconds = round(result.seconds, 3)
        return {**line, "time": {"seconds": seconds, "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}}

    def _answered(self, item: Item, result: Result) -> Answered:
        values = result.values
        if self.config.kind == "generate":
            return Answered(self._postprocess.apply(values["output"]), item.target, item.row.values)
        if self.config.kind == "perplexity":
            sizes = {"words": len(item.question.split()), "bytes": len(item.question.encode())}
            return Answered(
                values=item.row.values, logprob=values["logprob"], tokens=values["num_scored_tokens"], **sizes
            )
        sums = np.array(values["logprobs"])
        per_byte = sums / [max(len(answer.encode()), 1) for answer in item.answers]
        by = {"sum": sums, "per_byte": per_byte, "per_token": sums / values["num_tokens"]}
        best = {name: int(np.argmax(scores)) for name, scores in by.items()}
        return Answered(item.answers[best["sum"]], item.target, item.row.values, best, item.right)

    def _vector(self, metric: Metric, item: Item, answered: Answered) -> list[float]:
        try:
            return [float(value) for value in metric.vector(answered)]
        except Exception as error:  # a user's function may fail in any way
            kind = type(error).__name__
            where = f"{item.row.place}: task {self.config.name}: metrics"
            raise ValueError(f"{where}: {metric.name!r} fails for this item: {kind}: {error}") from error


# What of a task decides an item's line, besides its prompt, its target and its choices.
_ASKED = frozenset(("kind", "chat", "delimiter", "sampling", "postprocess", "metrics", "labels", "window", "stride"))


def _position(target: str, answers: Sequence[str], kind: str) -> int:
    if kind == "classification":
        if target not in answers:
            raise ValueError(f"target={target!r}: target must be one of the labels {', '.join(answers)}")
        return answers.index(target)
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(answers)]
    if len(target) == 1 and target in letters:
        return letters.index(target)
    if target.isascii() and target.isdigit() and int(target) < len(answers):
        return int(target)
    rule = f"must be a letter from A to {letters[-1]} or a number from 0 to {len(answers) - 1}"
    raise ValueError(f"target={target!r}: target {rule}")


def _digest(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _seed(seed: int, task: str, index: int) -> int:
    return int(_digest(f"{seed}/{task}/{index}")[:15], 16)
