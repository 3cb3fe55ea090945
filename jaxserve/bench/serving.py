"""Load on a server and what its clients see of it. `jaxserve bench serve`."""

import asyncio
import csv
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.client import Client, Outcome

PERCENTILES = (50, 90, 99)
LIMITS = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e"}  # vLLM's names, and an outcome's


@dataclass(frozen=True)
class Load:
    """When requests come. `times` are seconds after the start; without them all may come at once.

    `concurrency`: the most that are under way; who has to wait for a place counts from when it gets it.
    """

    times: Sequence[float] | None = None
    concurrency: int | None = None

    @classmethod
    def poisson(cls, count: int, rate: float, seed: int = 0, concurrency: int | None = None) -> "Load":
        """`rate` requests per second on average; infinity is all at once."""
        if math.isinf(rate):
            return cls(None, concurrency)
        gaps = np.random.default_rng(seed).exponential(1 / rate, count)
        return cls((np.cumsum(gaps) - gaps[0]).tolist(), concurrency)

    @classmethod
    def trace(cls, file: str | Path, count: int, speed: float = 1.0, concurrency: int | None = None) -> "Load":
        """The arrivals of a trace's first requests (column TIMESTAMP), `speed` times as fast."""
        with Path(file).open(newline="", encoding="utf-8") as lines:
            stamps = [
                _seconds(row.get("TIMESTAMP"), file)
                for row, _ in zip(csv.DictReader(lines), range(count), strict=False)
            ]
        return cls([(stamp - stamps[0]) / speed for stamp in stamps], concurrency)


def _seconds(stamp: str | None, file: str | Path) -> float:
    try:
        return datetime.fromisoformat(stamp[:26]).timestamp()
    except (TypeError, ValueError):
        raise ValueError(f"{file}: TIMESTAMP={stamp!r}: TIMESTAMP must be a date and time") from None


async def drive(client: Client, bodies: Sequence[dict[str, Any]], load: Load) -> list[Outcome]:
    """Send all bodies as the load says; outcomes in their order."""
    places = asyncio.Semaphore(load.concurrency or len(bodies))
    origin = time.perf_counter()

    async def send(body: dict[str, Any]) -> Outcome:
        async with places:
            return await client.stream(body, origin)

    tasks = [asyncio.create_task(send(body)) async for body in _arriving(bodies, load.times, origin)]
    return await asyncio.gather(*tasks)


async def _arriving(bodies: Sequence, times: Sequence[float] | None, origin: float) -> AsyncIterator:
    for index, body in enumerate(bodies):
        if times is not None:
            await asyncio.sleep(max(origin + times[index] - time.perf_counter(), 0))
        yield body


@dataclass(frozen=True)
class ServingReport:
    """What clients saw. Times are in milliseconds; `series` holds every single one of them."""

    name: str
    requests: int
    failed: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    most_at_once: int
    goodput: float | None
    series: dict[str, list[float]] = field(repr=False)
    errors: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, outcomes: Sequence[Outcome], limits: dict[str, float] | None = None) -> "ServingReport":
        """`limits` in milliseconds by the names of LIMITS: requests that keep them all are good."""
        good = [outcome for outcome in outcomes if outcome.error is None]
        seconds = max(outcome.ended for outcome in outcomes) - min(outcome.started for outcome in outcomes)
        milliseconds = lambda values: [1000 * value for value in values if value is not None]
        errors: dict[str, int] = {}
        for outcome in outcomes:
            if outcome.error is not None:
                errors[outcome.error] = errors.get(outcome.error, 0) + 1
        kept = [outcome for outcome in good if _within(outcome, limits or {})]
        return cls(
            name=name,
            requests=len(good),
            failed=len(outcomes) - len(good),
            seconds=seconds,
            prompt_tokens=sum(outcome.prompt_tokens for outcome in good),
            output_tokens=sum(outcome.output_tokens for outcome in good),
            cached_tokens=sum(outcome.cached_tokens for outcome in good),
            most_at_once=_most_at_once(outcomes),
            goodput=len(kept) / seconds if limits else None,
            series={
                "TTFT": milliseconds(outcome.ttft for outcome in good),
                "TPOT": milliseconds(outcome.tpot for outcome in good),
                "ITL": milliseconds(gap for outcome in good for gap in outcome.gaps),
                "E2E": milliseconds(outcome.e2e for outcome in good),
            },
            errors=errors,
        )

    def percentiles(self, name: str) -> dict[str, float]:
        """Mean and percentiles of a series; nothing for an empty one."""
        values = self.series[name]
        if not values:
            return {}
        return {"mean": float(np.mean(values)), **{f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}}

    @property
    def rates(self) -> dict[str, float]:
        return {
            "requests_per_s": self.requests / self.seconds,
            "output_tokens_per_s": self.output_tokens / self.seconds,
            "total_tokens_per_s": (self.prompt_tokens + self.output_tokens) / self.seconds,
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything but the series, as JSON knows it."""
        names = ("name", "requests", "failed", "seconds", "prompt_tokens", "output_tokens", "cached_tokens")
        found = {name: getattr(self, name) for name in (*names, "most_at_once", "goodput", "errors")}
        return found | self.rates | {f"{name.lower()}_ms": self.percentiles(name) for name in self.series}

    def __str__(self) -> str:
        rates = self.rates
        lines = [
            f"{self.name}: {self.requests} requests ({self.failed} failed) in {self.seconds:.1f} s, "
            f"{self.most_at_once} at once at most",
            f"  {rates['requests_per_s']:.2f} requests/s, {rates['output_tokens_per_s']:.1f} output tokens/s, "
            f"{rates['total_tokens_per_s']:.1f} tokens/s; {self.prompt_tokens} prompt tokens "
            f"({self.cached_tokens} cached), {self.output_tokens} output tokens",
        ]
        if self.goodput is not None:
            lines.append(f"  goodput {self.goodput:.2f} requests/s")
        lines.append(
            "  milliseconds" + "".join(f"{column:>10}" for column in ("mean", *(f"p{p}" for p in PERCENTILES)))
        )
        for name in self.series:
            values = self.percentiles(name).values()
            lines.append(f"  {name:<12}" + "".join(f"{value:10.1f}" for value in values))
        lines += [f"  {count} x {error}" for error, count in self.errors.items()]
        return "\n".join(lines)


def parse_limits(text: str | None) -> dict[str, float]:
    """Limits in milliseconds from `ttft:500,tpot:50`."""
    limits = {}
    for part in (text or "").replace(",", " ").split():
        name, _, value = part.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in LIMITS or not limits[name] > 0:
            raise ValueError(f"goodput={part!r}: goodput must be {', '.join(f'{name}:MS' for name in LIMITS)}")
    return limits


def _within(outcome: Outcome, limits: dict[str, float]) -> bool:
    return all(1000 * (getattr(outcome, LIMITS[name]) or 0.0) <= limit for name, limit in limits.items())


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    changes = sorted([(o.started, 1) for o in outcomes] + [(o.ended, -1) for o in outcomes])
    return int(np.cumsum([change for _, change in changes]).max(initial=0))
