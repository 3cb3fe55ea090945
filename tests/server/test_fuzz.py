"""Whatever comes: no 500, valid JSON back, and a well-behaved client beside it whose answers stay exact."""

import json
import random
import socket
import string
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from server_tools import byte_engine, local_server

from jaxserve.server.embeddings import EmbeddingRequest
from jaxserve.server.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from jaxserve.server.responses import ResponsesRequest

TYPES = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
PROBE = {"prompt": "exact", "temperature": 0.9, "seed": 3, "max_tokens": 20, "ignore_eos": True, "logprobs": 2}
NUMBERS = [
    "0",
    "-0",
    "1",
    "-1",
    "0.5",
    "1e400",
    "-1e400",
    "1e-400",
    "NaN",
    "Infinity",
    "-Infinity",
    "1" * 50,
    "9" * 5000,
]
NUMBERS += ["2147483648", "9223372036854775808", "1.0", "1e2", "0x10", "01", "+1", "1e", "."]
TEXTS = [
    '"x"',
    '""',
    '"\\ud800"',
    '"\\udc00\\ud800"',
    '"\\u0000"',
    '"' + "y" * 70_000 + '"',
    '"\\ud83d\\ude42"',
    '"\x80"',
    '"a',
]
TEXTS += ['"{{ 1/0 }}"', '"<s>"', '"\\n"', "'x'"]
DEEP = ["[" * 100_000, "[" * 500 + "]" * 500, '{"a":' * 3000 + "1" + "}" * 3000, "[[[[]]]]", '[{"role": "user"}]']
OTHERS = [
    "null",
    "true",
    "false",
    "[]",
    "{}",
    "[null]",
    '{"": 1}',
    "[1, 2, 3]",
    '["a", "b"]',
    '{"1": 1}',
    "undefined",
    "",
]
OTHERS += ['[{"role": "user", "content": "hi"}]', '[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]']


def body(source, path):
    """Something like a request: right fields with wrong values, wrong fields, torn or shuffled bytes."""
    fields = {"prompt": '"hi"', "messages": '[{"role": "user", "content": "hi"}]', "tokens": "[1, 2]", "input": '"hi"'}
    known = list(TYPES[path].model_fields)
    pairs = {name: value for name, value in fields.items() if name in known and source.random() < 0.8}
    for _ in range(source.randint(0, 3)):
        name = source.choice(known) if source.random() < 0.9 else source.choice(string.ascii_letters)
        pairs[name] = source.choice(source.choice([NUMBERS, TEXTS, DEEP, OTHERS]))
    limit = next((name for name in ("max_tokens", "max_output_tokens") if name in known), None)
    pairs.setdefault(limit or "model", "3" if limit else "null")
    text = "{" + ", ".join(f'"{name}": {value}' for name, value in pairs.items()) + "}"
    raw = bytearray(text.encode("utf-8", "surrogatepass"))
    if source.random() < 0.2:
        for _ in range(source.randint(1, 4)):
            raw[source.randrange(len(raw))] = source.randrange(256)
    if source.random() < 0.05:
        raw = raw[: source.randrange(len(raw))]
    return bytes(raw)


def send(server, seed):
    source = random.Random(seed)
    path = source.choice(list(TYPES))
    content = body(source, path)
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=60)
    what = f"seed {seed}: {path} {content[:300]}: {response.status_code} {response.text[:300]}"
    assert response.status_code in (200, 400, 404, 413), what
    if response.headers["content-type"] == "application/json":
        answer = json.loads(response.text, parse_constant=lambda name: pytest.fail(f"{name} in {what}"))
        if response.status_code != 200:
            assert len(answer["error"]["message"]) < 1200, what
    else:
        assert response.text.endswith("data: [DONE]\n\n") or '"error"' in response.text, what
    return response.status_code


def half(server, seed):
    """A request that stops in the middle, slowly or at once, or was no HTTP."""
    source = random.Random(seed)
    content = json.dumps({"prompt": "x" * source.randint(1, 50_000)}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    data = head.encode() + content[: source.randrange(len(content))]
    data = source.choice([data, data[: source.randrange(1, 90)], source.randbytes(300), b"\x16\x03\x01" + bytes(99)])
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        for at in range(0, len(data), max(len(data) // source.randint(1, 3), 1)):
            try:
                client.sendall(data[at : at + max(len(data) // 3, 1)])
            except OSError:
                return
            time.sleep(source.choice([0, 0, 0.02]))


def attack(count, threads):
    engine = byte_engine(max_model_len=64)
    with local_server(engine, max_request_bytes=2**20, body_timeout=1) as server:
        expected = server.post("/v1/completions", PROBE).json()["choices"]
        over, exact = threading.Event(), []

        def behave():
            with httpx.Client(base_url=server.url, timeout=60) as client:
                while not over.is_set():
                    exact.append(client.post("/v1/completions", json=PROBE).json()["choices"] == expected)

        well_behaved = threading.Thread(target=behave)
        well_behaved.start()
        try:
            with ThreadPoolExecutor(threads) as pool:
                torn = [pool.submit(half, server, seed) for seed in range(count // 10)]
                statuses = list(pool.map(lambda seed: send(server, seed), range(count)))
                [one.result() for one in torn]
                big = json.dumps({"prompt": "x" * 10_000_000}).encode()
                headers = {"Content-Type": "application/json"}
                assert httpx.post(f"{server.url}/v1/completions", content=big, headers=headers).status_code == 413
        finally:
            over.set()
            well_behaved.join()
        assert len(exact) > 3
        assert all(exact)
        assert statuses.count(200) > count // 20
        assert statuses.count(400) > count // 4
        server.idle()


def test_nothing_that_comes_does_harm():
    attack(120, threads=4)


@pytest.mark.slow
def test_nothing_that_comes_does_harm_for_long():
    attack(3000, threads=8)
