"""Traces: what is told of requests, to an exporter in memory and to a collector that reads the real protocol."""

import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from checkpoint_tools import SHAPES, write_tiny_checkpoint
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from server_tools import NAME, ServerProcess, byte_engine, events, local_server

from jaxserve.server import tracing
from jaxserve.server.config import ServerConfig
from jaxserve.server.tracing import Tracing

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "Hello", "max_tokens": 6, "temperature": 0.5, "top_p": 0.9, "ignore_eos": True}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDED = "the request was ended before its answer"


@pytest.fixture(scope="module")
def traced():
    engine = byte_engine()
    with local_server(engine) as server:
        server.exporter = InMemorySpanExporter()
        server.service.tracing = Tracing("http://127.0.0.1:9", server.exporter)
        yield server


@pytest.fixture
def ask(traced):
    """Posts, and gives (the answer, the spans by name) when all is over."""

    def asking(body, path=COMPLETIONS, **headers):
        traced.exporter.clear()
        response = traced.post(path, body, headers=headers)
        traced.idle()
        return response, spans_of(traced)

    return asking


def spans_of(server):
    server.service.tracing._provider.force_flush()
    found = {}
    for span in server.exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def test_a_request_is_a_span_with_its_parts(ask):
    before = time.time_ns()
    response, spans = ask(BODY, **{"X-Request-Id": "mine"})
    after = time.time_ns()
    assert {name: len(found) for name, found in spans.items()} == {
        "llm_request": 1,
        "queue": 1,
        "prefill": 1,
        "decode": 1,
    }
    [whole] = spans["llm_request"]
    assert (whole.kind, whole.parent, whole.status.status_code) == (SpanKind.SERVER, None, StatusCode.UNSET)
    assert whole.resource.attributes["service.name"] == "jaxserve"
    told = dict(whole.attributes)
    latencies = {name.rpartition(".")[2]: told.pop(name) for name in list(told) if ".latency." in name}
    assert told == {
        "gen_ai.request.id": "mine",
        "gen_ai.response.model": NAME,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.n": 1,
        "gen_ai.usage.prompt_tokens": response.json()["usage"]["prompt_tokens"],
        "gen_ai.usage.completion_tokens": 6,
        "gen_ai.response.finish_reasons": ("length",),
    }
    parts = [spans[name][0] for name in ("queue", "prefill", "decode")]
    assert before < whole.start_time == parts[0].start_time
    assert whole.end_time < after
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        assert part.parent.span_id == whole.context.span_id
        assert part.start_time <= part.end_time <= whole.end_time
        assert following is None or part.end_time == following.start_time
    lengths = [(part.end_time - part.start_time) / 1e9 for part in parts]
    queue, prefill, decode = lengths
    assert latencies == pytest.approx(
        {
            "e2e": (whole.end_time - whole.start_time) / 1e9,
            "time_in_queue": queue,
            "time_to_first_token": queue + prefill,
            "time_in_model_prefill": prefill,
            "time_in_model_decode": decode,
            "time_in_model_inference": prefill + decode,
        },
        abs=1e-6,
    )
    assert decode > 0


def test_the_callers_span_is_the_parent(ask):
    state = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=value"}
    _, spans = ask(BODY, **state)
    [whole] = spans["llm_request"]
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert f"{whole.parent.span_id:016x}" == PARENT
    assert whole.context.trace_state["vendor"] == "value"
    assert {f"{span.context.trace_id:032x}" for found in spans.values() for span in found} == {TRACE}
    _, spans = ask(BODY, traceparent=f"00-{TRACE}-{PARENT}-00")  # the caller does not sample
    assert spans == {}
    _, spans = ask(BODY, traceparent="nonsense")
    assert spans["llm_request"][0].parent is None


def test_prompts_and_branches(ask):
    """A span a prompt; the answers of one prompt are one request."""
    response, spans = ask({**BODY, "prompt": ["Hello", "Good day"], "n": 3}, **{"X-Request-Id": "many"})
    assert {span.attributes["gen_ai.request.id"]: span for span in spans["llm_request"]}.keys() == {"many-0", "many-1"}
    for span in spans["llm_request"]:
        assert span.attributes["gen_ai.usage.completion_tokens"] == 18
        assert span.attributes["gen_ai.response.finish_reasons"] == ("length",) * 3
    counted = sum(span.attributes["gen_ai.usage.prompt_tokens"] for span in spans["llm_request"])
    assert counted == response.json()["usage"]["prompt_tokens"]
    assert len(spans["queue"]) == len(spans["decode"]) == 2


def test_streams_chats_and_prompts_alone(ask):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "stream": True, "stream_interval": 3}
    response, spans = ask(chat, CHAT)
    assert events(response)
    [whole] = spans["llm_request"]
    assert whole.attributes["gen_ai.usage.completion_tokens"] <= 5
    assert "Hi" not in str(dict(whole.attributes))
    _, spans = ask({**BODY, "max_tokens": 0, "echo": True})
    assert set(spans) <= {"llm_request", "queue", "prefill"}
    assert spans["llm_request"][0].attributes["gen_ai.usage.completion_tokens"] == 0


def test_what_is_refused_is_no_request(ask):
    response, spans = ask({**BODY, "temperature": -1})
    assert response.status_code == 400
    assert spans == {}


def test_a_request_that_is_ended_is_an_error(traced, ask):
    with traced.client.stream("POST", COMPLETIONS, json={**BODY, "max_tokens": 400, "stream": True}) as response:
        next(response.iter_lines())
    traced.idle()
    [whole] = spans_of(traced)["llm_request"][-1:]
    assert (whole.status.status_code, whole.status.description) == (StatusCode.ERROR, ENDED)
    assert whole.end_time > whole.start_time
    complete = traced.engine.scheduler.complete
    traced.engine.scheduler.complete = lambda entry, token, finite: complete(entry, token, False)
    response, spans = ask(BODY)
    traced.engine.scheduler.complete = complete
    assert response.status_code == 500
    assert spans["llm_request"][0].status.status_code == StatusCode.ERROR
    assert "not finite" in spans["llm_request"][0].status.description


class Collector(HTTPServer):
    """Takes OTLP over HTTP and keeps the spans."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Take)
        self.spans, self.services, self.paths = [], set(), set()
        self.endpoint = f"http://127.0.0.1:{self.server_port}/v1/traces"


class Take(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/x-protobuf"
        self.server.paths.add(self.path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.services |= {
                a.value.string_value for a in resource.resource.attributes if a.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.server.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@contextmanager
def collector():
    server = Collector()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def check_collected(found, num_requests):
    assert (found.paths, found.services) == ({"/v1/traces"}, {"jaxserve"})
    whole = [span for span in found.spans if span.name == "llm_request"]
    assert len(whole) == num_requests
    for span in whole:
        assert span.trace_id.hex() == TRACE
        assert span.parent_span_id.hex() == PARENT
        parts = [part for part in found.spans if part.parent_span_id == span.span_id]
        assert [part.name for part in parts] == ["queue", "prefill", "decode"]
        assert all(span.start_time_unix_nano <= part.start_time_unix_nano for part in parts)
        assert all(part.end_time_unix_nano <= span.end_time_unix_nano for part in parts)
        assert abs(span.start_time_unix_nano / 1e9 - time.time()) < 120


def test_a_collector_gets_them_when_the_server_ends():
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with collector() as found:
        with local_server(otlp_traces_endpoint=found.endpoint) as server:
            for _ in range(2):
                assert server.post(COMPLETIONS, BODY, headers=headers).status_code == 200
        check_collected(found, 2)


def test_a_collector_that_is_not_there_holds_nobody_up(monkeypatch):
    """Neither requests nor the server's end."""
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with local_server(otlp_traces_endpoint=f"http://127.0.0.1:{port}/v1/traces") as server:
        assert server.post(COMPLETIONS, BODY).status_code == 200
        begun = time.monotonic()
    assert time.monotonic() - begun < 3


@pytest.mark.slow
def test_a_server_process_with_an_engine_in_another(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "model")
    options = [part for name, value in {"model": folder, **SHAPES}.items() for part in (f"--{name}", str(value))]
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with collector() as found:
        server = ServerProcess(*options, "--run-in", "process", "--otlp-traces-endpoint", found.endpoint)
        try:
            assert server.client.post(COMPLETIONS, json=BODY, headers=headers).status_code == 200
            server.signal()
            assert server.wait() == 0
        finally:
            server.close()
        check_collected(found, 1)


def test_without_traces_nothing_of_it_is_imported():
    code = """
import sys
from jaxserve import EngineConfig
from jaxserve.server import run
from jaxserve.server.config import ServerConfig
from jaxserve.server.service import Service
Service(ServerConfig(), EngineConfig())
print([name for name in sys.modules if name.partition(".")[0] == "opentelemetry"])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_without_the_extra_and_with_wrong_endpoints(monkeypatch):
    for endpoint in ("localhost:4318", "grpc://localhost:4317", "", 4318):
        with pytest.raises(ValueError, match="otlp_traces_endpoint"):
            ServerConfig(otlp_traces_endpoint=endpoint)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"otlp_traces_endpoint needs opentelemetry.*jaxserve\[otel\]"):
        Tracing("http://localhost:4318/v1/traces")
