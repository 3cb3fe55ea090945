"""`/v1/embeddings` as the official client uses it, and in batches: the vectors are those of `LLM.embed`."""

import base64
import json

import numpy as np
import openai
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from server_tools import byte_engine, local_server

from jaxserve import LLM, PoolingParams
from jaxserve.evaluation.batch import BatchEngine, read_batch
from jaxserve.server.tracing import Tracing

TEXTS = ["Hello", "a longer text " * 12, "Hello there", "x"]
URL = "/v1/embeddings"


@pytest.fixture(scope="module")
def server():
    with local_server(byte_engine(runner="pooling", pooler_config={"pooling_type": "MEAN"})) as server:
        yield server
        server.idle()


@pytest.fixture(scope="module")
def llm():
    with LLM(engine=byte_engine(runner="pooling", pooler_config={"pooling_type": "MEAN"})) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_official_client(client, llm):
    expected = llm.embed(TEXTS)
    answer = client.embeddings.create(model="tiny", input=TEXTS)  # it asks for base64 by itself
    assert (answer.object, answer.model) == ("list", "tiny")
    assert [item.index for item in answer.data] == [0, 1, 2, 3]
    for item, want in zip(answer.data, expected, strict=True):
        assert np.array(item.embedding, np.float32).tobytes() == want.embedding.tobytes()
        assert np.linalg.norm(item.embedding) == pytest.approx(1)
    count = sum(len(result.prompt_token_ids) for result in expected)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    floats = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="float", user="somebody")
    assert np.array(floats.data[0].embedding, np.float32).tobytes() == expected[0].embedding.tobytes()


def test_token_ids_dimensions_and_base64(server, client, llm):
    ids = [[5, 6, 7], list(range(10, 60))]
    [first, second] = llm.embed(ids, PoolingParams(dimensions=9))
    answer = client.embeddings.create(model="tiny", input=ids, dimensions=9)
    assert np.array(answer.data[1].embedding, np.float32).tobytes() == second.embedding.tobytes()
    answer = client.embeddings.create(model="tiny", input=ids[0], dimensions=9)
    assert np.array(answer.data[0].embedding, np.float32).tobytes() == first.embedding.tobytes()
    [raw] = llm.embed("Hello", PoolingParams(normalize=False))
    body = {"input": "Hello", "normalize": False, "encoding_format": "base64"}
    answer = server.post(URL, body).json()
    assert base64.b64decode(answer["data"][0]["embedding"]) == raw.embedding.astype("<f4").tobytes()


WRONG = [
    ({"input": ""}, "input", "it holds no tokens"),
    ({"input": []}, "input", "it holds no tokens"),
    ({"input": ["a", ""]}, "input", "it holds no tokens"),
    ({"input": [1, 300]}, "input", "must be integers from 0 to 299"),
    ({"input": ["a", 1]}, "input", "valid"),
    ({"input": "a" * 600}, "input", "must be at most max_model_len=512"),
    ({"input": ["a"] * 300}, "input", "must be at most 256"),
    ({"input": "a", "dimensions": 65}, "dimensions", "at most 64"),
    ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
    ({"input": "a", "dimension": 3}, "dimension", "did you mean 'dimensions'"),
    ({"dimensions": 3}, "input", "required"),
]


@pytest.mark.parametrize(("body", "field", "message"), WRONG)
def test_what_cannot_be_is_a_400_that_names_the_field(server, body, field, message):
    answer = server.post(URL, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field
    assert message in error["message"]


def test_one_kind_of_engine_does_not_do_the_other_kinds_work(server, shared):
    for where, path, body, needs in (
        (shared, URL, {"input": "Hello"}, "not made for embeddings"),
        (server, "/v1/completions", {"prompt": "Hello"}, "embeddings only"),
        (server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "embeddings only"),
    ):
        answer = where.post(path, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "model"
        assert needs in answer.json()["error"]["message"]


def test_in_a_batch(llm, tmp_path):
    bodies = [{"input": TEXTS, "encoding_format": "base64"}, {"input": "Hello", "dimensions": 99}, {"input": [5, 6]}]
    lines = [{"custom_id": str(i), "method": "POST", "url": URL, "body": body} for i, body in enumerate(bodies)]
    lines.append({"custom_id": "3", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello"}})
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine = BatchEngine(llm.engine, "tiny")
    answers = dict(engine.answers(iter(enumerate(read_batch(file))), 8))
    assert [answers[i]["response"]["status_code"] for i in range(4)] == [200, 400, 200, 400]
    for item, want in zip(answers[0]["response"]["body"]["data"], llm.embed(TEXTS), strict=True):
        assert base64.b64decode(item["embedding"]) == want.embedding.tobytes()
    assert answers[1]["response"]["body"]["error"]["param"] == "dimensions"
    found = answers[2]["response"]["body"]
    assert np.array(found["data"][0]["embedding"], np.float32).tobytes() == llm.embed([[5, 6]])[0].embedding.tobytes()
    assert found["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    llm.engine.check_integrity()


def test_embeddings_are_traced(server):
    exporter = InMemorySpanExporter()
    server.service.tracing = tracing = Tracing("http://127.0.0.1:9", exporter)
    try:
        assert server.post(URL, {"input": "Hello"}).status_code == 200
        server.idle()
        tracing._provider.force_flush()
    finally:
        server.service.tracing = None
    spans = {span.name: dict(span.attributes) for span in exporter.get_finished_spans()}
    assert {"llm_request", "queue"} <= spans.keys()
    assert spans["llm_request"]["gen_ai.usage.prompt_tokens"] == 5
    assert "gen_ai.request.temperature" not in spans["llm_request"]
