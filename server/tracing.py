"""OpenTelemetry traces: a span per request of the engine, with its time in the queue, in prefill and in decode.

vLLM's name and attributes for the span. Nothing of OpenTelemetry is imported unless traces are asked for. Spans are
made when a request has ended, from the times that came with its last output. Prompts and answers are never told.
"""

import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxserve.extras import optional
from jaxserve.outputs import RequestMetrics, RequestOutput
from jaxserve.pooling_params import PoolingParams
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

CONTEXT_HEADERS = (b"traceparent", b"tracestate")  # of W3C's Trace Context
CLOSE_SECONDS = 3.0
_EXTRA = ("otel", "otlp_traces_endpoint")


class Tracing:
    """Where spans go: to `endpoint`, the URL of a collector (OTLP over HTTP), unless an `exporter` is given.

    OpenTelemetry's own variables hold for what is not said here: OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS,
    OTEL_TRACES_SAMPLER. ValueError without the extra `otel`.
    """

    def __init__(self, endpoint: str, exporter: "SpanExporter | None" = None):
        sdk = optional("opentelemetry.sdk.trace", *_EXTRA)
        export = optional("opentelemetry.sdk.trace.export", *_EXTRA)
        resources = optional("opentelemetry.sdk.resources", *_EXTRA)
        otlp = optional("opentelemetry.exporter.otlp.proto.http.trace_exporter", *_EXTRA)
        propagation = optional("opentelemetry.trace.propagation.tracecontext", *_EXTRA)
        name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "jaxserve"}
        self._api = optional("opentelemetry.trace", *_EXTRA)
        self._provider = sdk.TracerProvider(resource=resources.Resource.create(name), shutdown_on_exit=False)
        self._exporter = otlp.OTLPSpanExporter(endpoint) if exporter is None else exporter
        self._provider.add_span_processor(export.BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("jaxserve")
        self._propagator = propagation.TraceContextTextMapPropagator()

    def request(self, headers: Mapping[str, str], arrival: float, attributes: dict[str, Any]) -> "RequestSpan":
        """The span of a request that begins; `headers` may name the caller's span, `arrival` is by `time.monotonic`."""
        return RequestSpan(self, self._propagator.extract(headers), arrival, attributes)

    def write(
        self,
        context: "Context",
        times: RequestMetrics,
        end: float,
        attributes: dict[str, Any],
        error: str | None,
    ) -> None:
        """A span and its parts; times are by `time.monotonic`."""
        zero = time.time_ns() - time.monotonic_ns()
        at = lambda seconds: zero + round(seconds * 1e9)
        scheduled, first, last = times.first_scheduled_time, times.first_token_time, times.last_token_time
        span = self._tracer.start_span(
            "llm_request",
            context,
            kind=self._api.SpanKind.SERVER,
            attributes=attributes,
            start_time=at(times.arrival_time),
        )
        inside = self._api.set_span_in_context(span, context)
        parts = {"queue": (times.arrival_time, scheduled), "prefill": (scheduled, first), "decode": (first, last)}
        for name, (begun, ended) in parts.items():
            if begun is not None and ended is not None:
                self._tracer.start_span(name, inside, start_time=at(begun)).end(at(ended))
        if error is not None:
            span.set_status(self._api.StatusCode.ERROR, error)
        span.end(at(end))

    def close(self) -> None:
        """Send what is left, but try for CLOSE_SECONDS only."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)
        if ending.is_alive():
            self._exporter.shutdown()  # wakes it where it waits to try again
            ending.join(CLOSE_SECONDS)


class RequestSpan:
    """One request on its way: it sees the outputs, and is written with the last of them or at `end`."""

    def __init__(self, tracing: Tracing, context: "Context", arrival: float, attributes: dict[str, Any]):
        self._tracing, self._context, self._arrival = tracing, context, arrival
        self._attributes = attributes
        self._num_tokens, self._reasons = 0, {}
        self._written = False

    def take(self, output: RequestOutput) -> None:
        self._num_tokens += sum(len(new.token_ids) for new in output.outputs)
        self._reasons |= {new.index: new.finish_reason for new in output.outputs if new.finished}
        if output.finished and output.metrics is not None:
            errors = [new.error or "the request has failed" for new in output.outputs if new.finish_reason == "error"]
            self._write(output.metrics, errors[0] if errors else None)

    def end(self) -> None:
        """The request is over, whether it has been answered or not."""
        if not self._written:
            self._write(RequestMetrics(self._arrival), "the request was ended before its answer")

    def _write(self, times: RequestMetrics, error: str | None) -> None:
        self._written = True
        end = time.monotonic()
        attributes = self._attributes | _latencies(times, end)
        attributes["gen_ai.usage.completion_tokens"] = self._num_tokens
        if self._reasons:
            attributes["gen_ai.response.finish_reasons"] = [reason for _, reason in sorted(self._reasons.items())]
        self._tracing.write(self._context, times, end, attributes, error)


def request_attributes(
    request_id: str, model: str, params: SamplingParams | PoolingParams, num_prompt_tokens: int
) -> dict[str, Any]:
    """What is known of a request when it begins."""
    given = {
        "gen_ai.request.id": request_id,
        "gen_ai.response.model": model,
        "gen_ai.usage.prompt_tokens": num_prompt_tokens,
    }
    asked = {name: getattr(params, name, None) for name in ("temperature", "top_p", "max_tokens", "n")}
    given |= {f"gen_ai.request.{name}": value for name, value in asked.items()}
    return {name: value for name, value in given.items() if value is not None}


def _latencies(times: RequestMetrics, end: float) -> dict[str, float]:
    """In seconds, those that are known."""
    arrival, scheduled = times.arrival_time, times.first_scheduled_time
    first, last = times.first_token_time, times.last_token_time
    spans = {
        "e2e": (arrival, end),
        "time_in_queue": (arrival, scheduled),
        "time_to_first_token": (arrival, first),
        "time_in_model_prefill": (scheduled, first),
        "time_in_model_decode": (first, last),
        "time_in_model_inference": (scheduled, last),
    }
    known = {name: (begun, ended) for name, (begun, ended) in spans.items() if None not in (begun, ended)}
    return {f"gen_ai.latency.{name}": ended - begun for name, (begun, ended) in known.items()}
