"""The official client drives every endpoint of a real server process with the demo model; curl and httpx stream."""

import asyncio
import json
import subprocess

import httpx
import openai
import pytest
from server_tools import ServerProcess, joined

from jaxserve import LLM, SamplingParams

MODEL = "SmolLM2-135M-Instruct"
KEY = "secret-1"
# As few programs as there can be: one body and one head.
SHAPES = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 16, "num_pages": 256}
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def server():
    options = [part for name, value in SHAPES.items() for part in (f"--{name}", value)]
    process = ServerProcess(*options, "--api-key", '["other", "secret-1"]')
    yield process
    process.signal()
    assert process.wait() == 0
    process.close()
    assert "Traceback" not in process.log


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def answers():
    """What the library says: a completion, a chat and two sampled completions."""
    with LLM(**SHAPES) as llm:
        sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=5, n=2, max_tokens=12)
        greedy = SamplingParams(**GREEDY, logprobs=2)
        return {
            "completion": llm.generate("The capital of France is", greedy)[0],
            "chat": llm.chat(FRANCE, greedy)[0],
            "sampled": llm.generate("The capital of France is", sampled)[0],
        }


def test_completions(client, answers):
    asked = {"model": MODEL, "prompt": "The capital of France is", **GREEDY}
    answer = client.completions.create(**asked, logprobs=2)
    want = answers["completion"].outputs[0]
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (want.text, want.finish_reason)
    assert "Paris" in choice.text
    assert answer.usage.completion_tokens == len(want.token_ids)
    got = [entry[token].logprob for token, entry in zip(want.token_ids, want.logprobs, strict=True)]
    assert choice.logprobs.token_logprobs == pytest.approx(got, abs=1e-6)
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == want.text
    asked |= {"temperature": 0.8, "top_p": 0.9, "seed": 5, "n": 2}
    assert [choice.text for choice in client.completions.create(**asked).choices] == [
        output.text for output in answers["sampled"].outputs
    ]


def test_chat_completions(client, answers):
    asked = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_completion_tokens": 12}
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    want = answers["chat"].outputs[0]
    assert answer.choices[0].message.content == want.text
    assert [entry.token for entry in answer.choices[0].logprobs.content] == [
        entry[token].decoded_token for token, entry in zip(want.token_ids, want.logprobs, strict=True)
    ]
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want.text
    assert chunks[-1].choices[0].finish_reason == want.finish_reason
    assert last.usage.completion_tokens == len(want.token_ids)
    with client.chat.completions.stream(**asked) as events:
        assert events.get_final_completion().choices[0].message.content == want.text


def test_the_engines_own_parameters(client):
    asked = {"model": MODEL, "prompt": "One two three", "max_tokens": 4, "temperature": 0}
    answer = client.completions.create(**asked, extra_body={"ignore_eos": True, "allowed_token_ids": [260], "top_k": 5})
    assert answer.usage.completion_tokens == 4
    echoed = client.completions.create(**{**asked, "max_tokens": 0}, echo=True, logprobs=1)
    assert echoed.choices[0].text == "One two three"
    assert echoed.choices[0].logprobs.token_logprobs[0] is None


def test_models_and_tokens(client, server):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = server.client.post("/tokenize", json={"messages": FRANCE}, headers=headers).json()
    text = server.client.post("/detokenize", json={"tokens": answer["tokens"]}, headers=headers).json()["prompt"]
    assert FRANCE[0]["content"] in text
    assert text.endswith("<|im_start|>assistant\n")
    for path in ("/health", "/ready", "/version", "/metrics", "/openapi.json"):
        assert server.client.get(path).status_code == 200


def test_errors_are_the_clients_own_exceptions(client, server):
    asked = {"model": MODEL, "prompt": "x"}
    with pytest.raises(openai.BadRequestError, match="temperature") as error:
        client.completions.create(**asked, temperature=-1)
    assert (error.value.param, error.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="unknown field"):
        client.completions.create(**asked, extra_body={"nonsense": 1})
    with pytest.raises(openai.BadRequestError, match="tokens"):
        client.completions.create(model=MODEL, prompt="x " * 2000, stream=True)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_many_streams_at_once_through_the_asynchronous_client(server, answers):
    async def one(client, index):
        stream = await client.chat.completions.create(
            model=MODEL, messages=FRANCE, temperature=0, max_tokens=12 - index, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
            return await asyncio.gather(*(one(client, index) for index in range(12)))

    text = answers["chat"].outputs[0].text
    found = asyncio.run(main())
    assert found[0] == text
    assert all(text.startswith(part) for part in found)


def test_a_stream_through_curl(server, answers):
    body = json.dumps({"prompt": "The capital of France is", **GREEDY, "stream": True})
    command = ["curl", "-sN", f"{server.url}/v1/completions", "-H", "Content-Type: application/json"]
    command += ["-H", f"Authorization: Bearer {KEY}", "-d", body]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    *lines, done, _ = out.split("\n\n")
    assert done == "data: [DONE]"
    text = "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines)
    assert text == answers["completion"].outputs[0].text


def test_a_stream_through_httpx_comes_piece_by_piece(server, answers):
    body = {"prompt": "The capital of France is", **GREEDY, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=60) as response:
        pieces = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    chunks = [json.loads(piece) for piece in pieces[:-1]]
    assert len(chunks) > 3
    assert joined(chunks)[0]["text"] == answers["completion"].outputs[0].text
