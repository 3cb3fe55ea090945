"""What an engine has measured, and how Prometheus reads it: vLLM's names and meanings with `jaxserve:` for `vllm:`.

A leaf: knows no engine. Times are in seconds, from the engine's own clock (`time.monotonic`).
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from jaxserve.request import Request

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Number = int | float

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TOKEN_GAPS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_FIRST_TOKEN = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
_BRANCHES = (1, 2, 5, 10, 20)

_HISTOGRAMS: dict[str, tuple[Sequence[Number], str]] = {
    "iteration_tokens_total": (_STEP_TOKENS, "Tokens computed per step."),
    "time_to_first_token_seconds": (_FIRST_TOKEN, "From a request's arrival to its first token."),
    "inter_token_latency_seconds": (_TOKEN_GAPS, "Between a request's steps with new tokens."),
    "request_time_per_output_token_seconds": (_TOKEN_GAPS, "A request's mean time per token after the first."),
    "e2e_request_latency_seconds": (_REQUEST, "From a request's arrival to its end."),
    "request_queue_time_seconds": (_REQUEST, "From a request's arrival to its place in a step."),
    "request_prefill_time_seconds": (_REQUEST, "From a request's place in a step to its first token."),
    "request_decode_time_seconds": (_REQUEST, "From a request's first token to its last."),
    "request_inference_time_seconds": (_REQUEST, "From a request's place in a step to its last token."),
    "request_prompt_tokens": (_LENGTHS, "Tokens of prompts."),
    "request_generation_tokens": (_LENGTHS, "Tokens of answers."),
    "request_params_max_tokens": (_LENGTHS, "The parameter max_tokens, where it is given."),
    "request_params_n": (_BRANCHES, "The parameter n."),
}

_GAUGES = {
    "num_requests_running": "Requests in the batch.",
    "num_requests_waiting": "Requests that wait for a place.",
    "kv_cache_usage_perc": "Share of the pages that requests own; cached pages that nobody owns count as free.",
    "kv_waste": "Share of the owned positions that hold nothing, over all steps.",
    "padding_waste": "Share of the computed positions that were padding, over all steps.",
    "spec_mean_accepted_length": "Tokens of a step in which a request has a draft, over all of them.",
    "spec_mean_draft_length": "Draft tokens given to a request in the last step.",
}

_COUNTERS = {
    "num_preemptions": "Requests that gave back their pages and were computed again.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "prompt_tokens": "Tokens of prompts.",
    "generation_tokens": "Tokens sampled.",
    "steps": "Steps.",
    "constrained_steps": "Steps in which some row had a form to keep: their heads waited for masks.",
    "computed_tokens": "Positions computed, those of recomputed requests included.",
    "compilations": "Programs compiled or loaded.",
    "compilations_after_warmup": "Programs compiled while requests waited for them.",
}
_FINISHED = "request_success_"


class Histogram:
    """Observations counted by the first bound that they do not exceed."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[Number]):
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: Number, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


@dataclass(frozen=True)
class Figures:
    """An engine's `stats()` and, by name, (counts per bound and beyond, sum of the observations)."""

    stats: dict[str, int | float | str] = field(default_factory=dict)
    histograms: dict[str, tuple[list[int], Number]] = field(default_factory=dict)


class EngineMetrics:
    """The distributions that an engine keeps: a branch of a request counts as one request."""

    def __init__(self):
        self._histograms = {name: Histogram(bounds) for name, (bounds, _) in _HISTOGRAMS.items()}

    def figures(self, stats: dict[str, int | float | str]) -> Figures:
        return Figures(stats, {name: (list(h.counts), h.total) for name, h in self._histograms.items()})

    def step(self, num_tokens: int) -> None:
        self._observe("iteration_tokens_total", num_tokens)

    def took_tokens(self, requests: Iterable[Request]) -> None:
        """A step has brought new tokens for these requests."""
        now, since, count = monotonic(), None, 0
        intervals = self._histograms["inter_token_latency_seconds"]
        for request in requests:
            last, request.last_token_time = request.last_token_time, now
            if last is None:
                request.first_token_time = now
                self._observe("time_to_first_token_seconds", now - request.arrival_time)
            elif last == since:  # most of them had their last tokens in the same step
                count += 1
            else:
                if count:
                    intervals.observe(now - since, count)
                since, count = last, 1
        if count:
            intervals.observe(now - since, count)

    def finished(self, request: Request) -> None:
        """The request has ended as it should."""
        now = monotonic()
        self._observe("e2e_request_latency_seconds", now - request.arrival_time)
        self._observe("request_prompt_tokens", request.num_prompt_tokens)
        num_output = len(request.token_ids) - request.num_prompt_tokens
        self._observe("request_generation_tokens", num_output)
        self._observe("request_params_n", request.params.n)
        if request.params.max_tokens is not None:
            self._observe("request_params_max_tokens", request.params.max_tokens)
        scheduled, first, last = request.scheduled_time, request.first_token_time, request.last_token_time
        self._observe("request_queue_time_seconds", scheduled - request.arrival_time)
        if first is not None:
            self._observe("request_prefill_time_seconds", first - scheduled)
            self._observe("request_decode_time_seconds", last - first)
            self._observe("request_inference_time_seconds", last - scheduled)
            if num_output > 1:
                self._observe("request_time_per_output_token_seconds", (last - first) / (num_output - 1))

    def _observe(self, name: str, value: Number) -> None:
        self._histograms[name].observe(value)


def exposition(figures: Figures, model_name: str) -> bytes:
    """The figures in Prometheus' text format, with those of this process."""
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(figures, model_name))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Collector:
    """Makes Prometheus' families of figures."""

    def __init__(self, figures: Figures, model_name: str):
        self._figures = figures
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator["Metric"]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        names, values = list(self._labels), list(self._labels.values())
        stats = self._figures.stats
        for found, family in ((_GAUGES, GaugeMetricFamily), (self._counters(), CounterMetricFamily)):
            for name in found.keys() & stats.keys():
                metric = family(f"jaxserve:{name}", found[name], labels=names)
                metric.add_metric(values, stats[name])
                yield metric
        finished = CounterMetricFamily(
            "jaxserve:request_success", "Requests that ended.", labels=[*names, "finished_reason"]
        )
        for name in stats:
            if name.startswith(_FINISHED):
                finished.add_metric([*values, name.removeprefix(_FINISHED)], stats[name])
        yield finished
        for name, (counts, total) in self._figures.histograms.items():
            bounds, meaning = _HISTOGRAMS[name]
            metric = HistogramMetricFamily(f"jaxserve:{name}", meaning, labels=names)
            metric.add_metric(values, _cumulative(bounds, counts), total)
            yield metric
        yield self._cache_config(GaugeMetricFamily)

    def _counters(self) -> dict[str, str]:
        what = "Drafts (one a request and step), their tokens, those accepted, and those by place in the draft."
        speculation = {name: what for name in self._figures.stats if name.startswith("spec_num_")}
        return _COUNTERS | speculation

    def _cache_config(self, family: type) -> "Metric":
        """A constant, told by its labels."""
        told = {
            name: str(self._figures.stats.get(name, "")) for name in ("num_pages", "max_model_len", "deterministic")
        }
        metric = family("jaxserve:cache_config_info", "The engine's sizes.", labels=[*self._labels, *told])
        metric.add_metric([*self._labels.values(), *told.values()], 1)
        return metric


def _cumulative(bounds: Sequence[Number], counts: Sequence[int]) -> list[tuple[str, int]]:
    buckets, so_far = [], 0
    for bound, count in zip([*bounds, float("inf")], counts, strict=True):
        so_far += count
        buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), so_far))
    return buckets
