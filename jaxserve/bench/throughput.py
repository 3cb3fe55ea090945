"""Offline throughput: a batch of requests, all there from the start, run to the end. `jaxserve bench throughput`."""

import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from jaxserve.bench.workload import Item
from jaxserve.engine import Engine
from jaxserve.progress import progress_bar
from jaxserve.sampling_params import SamplingParams


@dataclass(frozen=True)
class Report:
    """What a run did. Wastes are shares: of computed positions that were padding, of owned KV positions unused.

    `peak_memory` is in bytes, of the device where its allocator tells, else of this process since its start.
    """

    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    steps: int
    padding_waste: float
    kv_waste: float
    prefix_cache_hits: int
    preemptions: int
    compilations_while_measured: int
    peak_memory: int

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds

    def as_dict(self) -> dict[str, Any]:
        rates = {"output_tokens_per_s": self.output_tokens_per_s, "total_tokens_per_s": self.total_tokens_per_s}
        return asdict(self) | rates | {"requests_per_s": self.requests / self.seconds}

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.output_tokens_per_s:.1f} output tokens/s, {self.total_tokens_per_s:.1f} tokens/s, "
            f"{self.requests / self.seconds:.2f} requests/s\n"
            f"  {self.requests} requests, {self.prompt_tokens} prompt and {self.output_tokens} output tokens in "
            f"{self.seconds:.2f} s, {self.steps} steps\n"
            f"  padding waste {self.padding_waste:.1%}, KV waste {self.kv_waste:.1%}, {self.prefix_cache_hits} prompt "
            f"tokens from the prefix cache, {self.preemptions} preemptions\n"
            f"  peak memory {self.peak_memory / 2**30:.2f} GiB, "
            f"{self.compilations_while_measured} compilations while measured"
        )


def measure(
    engine: Engine,
    name: str,
    work: list[Item],
    params: SamplingParams,
    *,
    repeats: int = 1,
    warm_up: bool = True,
    show: bool | None = None,
) -> Report:
    """The fastest of `repeats` runs of the work, each with an empty prefix cache, after one to warm up.

    `params` are those of every request but for `max_tokens`, which the work says. `show`: a progress bar.
    """
    if warm_up:
        _run(engine, work, params, show)
    reports = []
    for _ in range(repeats):
        engine.scheduler.pool.drop_cache()
        engine.reset_stats()
        compiled = engine.stats()["compilations"]
        started = time.perf_counter()
        _run(engine, work, params, show)
        seconds = time.perf_counter() - started
        stats = engine.stats()
        reports.append(
            Report(
                name=name,
                requests=len(work),
                prompt_tokens=stats["prompt_tokens"],
                output_tokens=stats["generation_tokens"],
                seconds=seconds,
                steps=stats["steps"],
                padding_waste=stats["padding_waste"],
                kv_waste=stats["kv_waste"],
                prefix_cache_hits=stats["prefix_cache_hits"],
                preemptions=stats["num_preemptions"],
                compilations_while_measured=stats["compilations"] - compiled,
                peak_memory=peak_memory(),
            )
        )
    return min(reports, key=lambda report: report.seconds)


def _run(engine: Engine, work: list[Item], params: SamplingParams, show: bool | None) -> None:
    for index, item in enumerate(work):
        engine.add_request(str(index), item.prompt, replace(params, max_tokens=item.output))
    with progress_bar(len(work), show) as progress:
        while engine.has_unfinished():
            for delta in engine.step():
                progress.update(delta)


def peak_memory() -> int:
    """Bytes: the peak of the first device's allocator, or of this process where the device has none (a CPU)."""
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if peak:
        return peak
    import resource  # of Unix only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
