"""What speculation gains, by kind of prompt and by load: pairs of runs with and without drafts, on the same prompts.

A cell is a group of prompts and a concurrency. Every prompt is computed once before (its pages stay in the prefix
cache), so that the time is that of decoding. "Without" is an engine of its own, without speculation: one that has a
draft head computes the head's keys even for requests that decline drafts.
"""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.engine import Engine
from jaxserve.sampling_params import SamplingParams

OUTPUT_TOKENS = 64
PAIRS = 3
PROMPTS = {1: 8, 4: 16, 16: 32, 64: 64}  # concurrency: prompts
# Spec-Bench (Xia et al. 2024): MT-bench's categories, ten prompts each, are one group; the others stand alone.
CHAT = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}

Prompts = Sequence[list[int]]


class Engines(NamedTuple):
    """Of one model, with the same options but for speculation."""

    without: Engine
    with_: Engine


@dataclass
class Cell:
    """One measured cell. Seconds are those of a whole run; rates are of its drafts."""

    group: str
    concurrency: int
    prompts: int
    seconds_with: list[float] = field(default_factory=list)
    seconds_without: list[float] = field(default_factory=list)
    output_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    steps: int = 0

    @property
    def speedup(self) -> float:
        """The median of the pairs' ratios."""
        return statistics.median(
            without / with_ for with_, without in zip(self.seconds_with, self.seconds_without, strict=True)
        )

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_tokens / max(self.draft_tokens, 1)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a step yields where there is a draft."""
        return 1 + self.accepted_tokens / max(self.drafts, 1)

    def row(self) -> list[str]:
        milliseconds = [
            1e3 * statistics.median(seconds) / self.output_tokens * self.concurrency
            for seconds in (self.seconds_without, self.seconds_with)
        ]
        return [
            self.group,
            str(self.concurrency),
            *(f"{value:.1f}" for value in milliseconds),
            f"{self.speedup:.2f}",
            f"{self.acceptance_rate:.2f}",
            f"{self.mean_accepted_length:.2f}",
            f"{self.draft_tokens / max(self.output_tokens, 1):.2f}",
            " ".join(f"{accepted / max(self.drafts, 1):.2f}" for accepted in self.accepted_at),
        ]


HEADINGS = (
    "group",
    "concurrency",
    "ms/token without",
    "ms/token with",
    "speed-up",
    "acceptance",
    "accepted length",
    "drafts/token",
    "accepted as 1st, 2nd, ...",
)


def groups_of(file: str | Path) -> dict[str, list[str]]:
    """The first turn of each prompt of a JSONL file, by group (`category`; one group where there is none)."""
    found: dict[str, list[str]] = defaultdict(list)
    with Path(file).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                text = entry["turns"][0] if "turns" in entry else entry["prompt"]
            except (ValueError, KeyError, IndexError, TypeError):
                raise ValueError(
                    f"{file}, line {number}: must be an object with `turns` (a list of texts) or `prompt`"
                ) from None
            category = entry.get("category", "all")
            found["chat" if category in CHAT else category].append(text)
    return dict(found)


def spread(prompts: Sequence[Any], count: int) -> list[Any]:
    """`count` prompts from all over a group, so that categories within it are all there."""
    count = min(count, len(prompts))
    return [prompts[index * len(prompts) // count] for index in range(count)]


def measure_cell(engines: Engines, group: str, concurrency: int, prompts: Prompts, pairs: int = PAIRS) -> Cell:
    """Run the prompts, `concurrency` at once, without and with drafts in turn."""
    cell = Cell(group, concurrency, len(prompts))
    for engine in engines:
        _run(engine, prompts, concurrency, 1)  # the prefix cache is filled
        _run(engine, prompts[:concurrency], concurrency, OUTPUT_TOKENS)  # and the programs compiled
    for _ in range(pairs):
        without, tokens = _run(engines.without, prompts, concurrency, OUTPUT_TOKENS)
        engines.with_.reset_stats()
        with_, same = _run(engines.with_, prompts, concurrency, OUTPUT_TOKENS)
        if tokens != same:
            raise RuntimeError(f"{group}, {concurrency} at once: speculation changed the tokens")
        cell.seconds_without.append(without)
        cell.seconds_with.append(with_)
        _count(cell, engines.with_.stats(), sum(map(len, tokens)))
    return cell


def _count(cell: Cell, stats: dict[str, Any], tokens: int) -> None:
    """The counts of the last run."""
    cell.output_tokens, cell.steps = tokens, stats["steps"]
    cell.drafts, cell.draft_tokens = stats["spec_num_drafts"], stats["spec_num_draft_tokens"]
    cell.accepted_tokens = stats["spec_num_accepted_tokens"]
    places = (name for name in stats if name.startswith("spec_num_accepted_tokens_pos_"))
    cell.accepted_at = [stats[name] for name in places]


def _run(engine: Engine, prompts: Prompts, concurrency: int, output_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds, and the tokens of each prompt."""
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    waiting, tokens = list(enumerate(prompts))[::-1], [[] for _ in prompts]
    running = 0
    started = time.perf_counter()
    while waiting or running:
        while waiting and running < concurrency:
            index, prompt = waiting.pop()
            engine.add_request(str(index), prompt, params)
            running += 1
        for output in engine.step():
            tokens[int(output.request_id)] += output.outputs[0].token_ids
            running -= output.finished
    return time.perf_counter() - started, tokens


def run_cells(
    engines: Engines,
    groups: dict[str, Prompts],
    concurrencies: Sequence[int],
    journal: Path | None,
    report: Callable[[Cell], None],
) -> list[Cell]:
    """Every cell, those first that the journal (JSON lines) knows already; each is appended as soon as it is there."""
    cells = [Cell(**json.loads(line)) for line in journal.read_text().splitlines()] if _exists(journal) else []
    known = {(cell.group, cell.concurrency) for cell in cells}
    for cell in cells:
        report(cell)
    for group, prompts in groups.items():
        for concurrency in concurrencies:
            if (group, concurrency) in known:
                continue
            cell = measure_cell(engines, group, concurrency, spread(prompts, PROMPTS.get(concurrency, concurrency)))
            cells.append(cell)
            report(cell)
            if journal is not None:
                with journal.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(asdict(cell)) + "\n")
    return cells


def _exists(journal: Path | None) -> bool:
    return journal is not None and journal.exists()


def summary(cells: Sequence[Cell]) -> str:
    """The geometric mean of the speed-ups, and the worst cell."""
    worst = min(cells, key=lambda cell: cell.speedup)
    mean = statistics.geometric_mean(cell.speedup for cell in cells)
    return (
        f"speed-up: geometric mean {mean:.2f} over {len(cells)} cells, "
        f"lowest {worst.speedup:.2f} ({worst.group}, {worst.concurrency} at once)"
    )


def plot(cells: Sequence[Cell], file: Path) -> None:
    """The speed-ups as a picture: one group of bars a group, one bar a concurrency. RuntimeError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError("no picture without matplotlib: pip install 'jaxserve[plot]'") from None

    groups = list(dict.fromkeys(cell.group for cell in cells))
    concurrencies = sorted({cell.concurrency for cell in cells})
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(concurrencies)
    for place, concurrency in enumerate(concurrencies):
        of_group = {cell.group: cell.speedup for cell in cells if cell.concurrency == concurrency}
        at = [index + (place - (len(concurrencies) - 1) / 2) * width for index in range(len(groups))]
        axes.bar(at, [of_group.get(group, 0) for group in groups], width, label=f"{concurrency} at once")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel("speed-up in decoding")
    figure.legend(loc="outside upper center", ncols=len(concurrencies))
    figure.savefig(file)
