"""The work of the offline benchmarks: requests of given lengths, greedy or sampled, the end of sequence ignored.

Imports NumPy only, so that peers in environments of their own can run the same work.
"""

import csv
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

TRACE_COLUMNS = ("ContextTokens", "GeneratedTokens")
TEXT_FIELDS = ("prompt", "text", "question", "turns", "messages")  # the first that a line has


class Item(NamedTuple):
    """One request: `prompt` token ids, `output` tokens to generate."""

    prompt: list[int]
    output: int


def _random_ids(source: np.random.Generator, count: int, vocab: int) -> list[int]:
    return source.integers(min(100, vocab // 2), vocab, count).tolist()


def trace(requests: int = 64, seed: int = 0, vocab: int = 49152) -> list[Item]:
    """Prompts of 16 to 768 tokens (median 120) and outputs of 8 to 256 (median 64), lognormal with sigma 0.8."""
    source = np.random.default_rng(seed)
    prompts = np.clip(np.exp(source.normal(np.log(120), 0.8, requests)), 16, 768).astype(int)
    outputs = np.clip(np.exp(source.normal(np.log(64), 0.8, requests)), 8, 256).astype(int)
    return [Item(_random_ids(source, int(p), vocab), int(o)) for p, o in zip(prompts, outputs, strict=True)]


def fixed(batch: int, prompt: int = 50, output: int = 64, seed: int = 1, vocab: int = 49152) -> list[Item]:
    """`batch` requests of the same lengths."""
    source = np.random.default_rng(seed)
    return [Item(_random_ids(source, prompt, vocab), output) for _ in range(batch)]


def csv_trace(file: str | Path, requests: int, seed: int = 0, vocab: int = 49152) -> list[Item]:
    """Random prompts with the lengths of a trace's first requests (columns ContextTokens, GeneratedTokens)."""
    source = np.random.default_rng(seed)
    items = []
    with Path(file).open(newline="", encoding="utf-8") as lines:
        rows = csv.DictReader(lines)
        if not set(TRACE_COLUMNS) <= set(rows.fieldnames or ()):
            raise ValueError(f"{file}: a trace must have the columns {', '.join(TRACE_COLUMNS)}")
        for row in rows:
            if len(items) == requests:
                break
            try:
                prompt, output = (max(int(row[column]), 1) for column in TRACE_COLUMNS)
            except (TypeError, ValueError):
                raise ValueError(f"{file}, line {rows.line_num}: its lengths must be integers") from None
            items.append(Item(_random_ids(source, prompt, vocab), output))
    return items


def jsonl_prompts(file: str | Path, requests: int) -> Iterator[str | list]:
    """The first prompts of a JSONL file: text, or the messages of a chat. Of several turns the first."""
    with Path(file).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if number > requests:
                return
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: not JSON: {error}") from None
            value = (
                next((entry[name] for name in TEXT_FIELDS if name in entry), None) if isinstance(entry, dict) else None
            )
            if isinstance(value, list) and value and isinstance(value[0], str):
                value = value[0]
            if not isinstance(value, str | list) or not value:
                raise ValueError(f"{file}, line {number}: must be an object with one of {', '.join(TEXT_FIELDS)}")
            yield value


def share_prefix(work: list[Item], length: int, share: float, seed: int = 0, vocab: int = 49152) -> list[Item]:
    """`length` tokens, the same ones, put before the prompts of a random `share` of the requests."""
    source = np.random.default_rng(seed)
    prefix = _random_ids(source, length, vocab)
    chosen = set(source.permutation(len(work))[: round(share * len(work))].tolist())
    return [Item(prefix + item.prompt, item.output) if i in chosen else item for i, item in enumerate(work)]


def fit(work: list[Item], max_model_len: int) -> tuple[list[Item], int]:
    """The work cut to what a context holds (outputs first keep their length), and how many requests were cut."""
    fitted = []
    for item in work:
        output = min(item.output, max_model_len - 1)
        fitted.append(Item(item.prompt[: max_model_len - output], output))
    return fitted, sum(new != old for new, old in zip(fitted, work, strict=True))


CASES: dict[str, list[Item]] = {
    "trace of 64": trace(64),
    "batch 1": fixed(1),
    "batch 8": fixed(8),
    "batch 32": fixed(32),
    "context 512": fixed(8, 448),
    "context 2,048": fixed(4, 1984),
}
WARM_UP = fixed(2, 16, 8)


def measure(name: str, run: Callable[[list[Item]], None], cases: list[str], repeats: int) -> None:
    """Print output tokens per second for each case: the best of `repeats`, after one more if they are several."""
    run(WARM_UP)
    for case in cases:
        if repeats > 1:
            run(CASES[case])
        best = min(seconds(run, CASES[case]) for _ in range(repeats))
        print(rate_line(name, case, CASES[case], best), flush=True)


def seconds(run: Callable[[list[Item]], None], work: list[Item]) -> float:
    started = time.perf_counter()
    run(work)
    return time.perf_counter() - started


def rate_line(name: str, case: str, work: list[Item], seconds: float) -> str:
    return f"{name:<24} {case:<12} {sum(item.output for item in work) / seconds:8.1f} output tokens/s"
