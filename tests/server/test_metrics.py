"""Figures against what was asked for, and Prometheus' own parser."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_tools import NAME, byte_engine, local_server, metrics

from jaxserve.metrics import EngineMetrics, Histogram, exposition
from jaxserve.server.middleware import GUARDED

COMPLETIONS = "/v1/completions"
VLLM = {  # vLLM's names, without prefix
    "gauge": ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"],
    "counter": [
        "num_preemptions",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
    ],
    "histogram": [
        "iteration_tokens_total",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
    ],
}


@pytest.fixture(scope="module")
def measured():
    """The families after three requests, one of them of two answers, and one that is wrong."""
    with local_server(byte_engine()) as server:
        prompt = "A prompt of more than one page, which comes twice."
        for body in (
            {"prompt": prompt, "max_tokens": 5},
            {"prompt": prompt, "max_tokens": 9},
            {"prompt": "x" * 7, "max_tokens": 20, "n": 2},
            {"prompt": ""},
        ):
            server.post(COMPLETIONS, {"temperature": 0.5, "ignore_eos": True, **body})
        server.idle()
        text = server.client.get("/metrics")
        assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
        yield {family.name: family for family in text_string_to_metric_families(text.text)}, metrics(server.client)


def test_vllms_names_and_types(measured):
    families, _ = measured
    for kind, names in VLLM.items():
        for name in names:
            family = families[f"jaxserve:{name}"]
            assert family.type == kind
            labels = {sample.labels["model_name"] for sample in family.samples}
            assert labels == {NAME}


def test_the_values(measured):
    _, values = measured
    counted = {
        "prompt_tokens_total": 50 + 50 + 7,
        "generation_tokens_total": 5 + 9 + 40,
        "prefix_cache_queries_total": 107,
        "prefix_cache_hits_total": 48,
        'request_success_total{finished_reason="length"}': 4,
        "request_generation_tokens_count": 4,
        "request_generation_tokens_sum": 54,
        "request_prompt_tokens_sum": 50 + 50 + 7 + 7,
        "time_to_first_token_seconds_count": 4,
        "inter_token_latency_seconds_count": 4 + 8 + 38,
        "request_params_n_sum": 1 + 1 + 2 + 2,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "num_preemptions_total": 0,
    }
    assert {name: values[f"jaxserve:{name}"] for name in counted} == counted
    assert values["jaxserve:iteration_tokens_total_sum"] == values["jaxserve:computed_tokens_total"]
    assert values["jaxserve:iteration_tokens_total_count"] == values["jaxserve:steps_total"]
    whole = values["jaxserve:e2e_request_latency_seconds_sum"]
    parts = [values[f"jaxserve:request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode")]
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(whole, rel=0.2)
    assert values["jaxserve:request_inference_time_seconds_sum"] == pytest.approx(sum(parts[1:]))
    assert values["process_open_fds"] > 0


def test_a_bound_belongs_to_its_bucket():
    histogram = Histogram((1, 2, 5))
    for value in (0, 1, 1.5, 2, 5, 6):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1, 1], 15.5)


def test_buckets_are_cumulative():
    kept = EngineMetrics()
    for tokens in (1, 8, 9, 100_000):
        kept.step(tokens)
    text = exposition(kept.figures({}), "m").decode()
    [family] = [f for f in text_string_to_metric_families(text) if f.name == "jaxserve:iteration_tokens_total"]
    found = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert (found["1.0"], found["8.0"], found["16.0"], found["16384.0"], found["+Inf"]) == (1, 2, 3, 3, 4)


def test_metrics_need_no_key():
    assert not "/metrics".startswith(GUARDED)
