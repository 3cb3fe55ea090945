"""OpenAI's API: what comes back is what the engine says, streamed and not, and what is wrong is refused by name."""

import itertools
import json
import re
from dataclasses import fields

import pytest
from engine_tools import run
from server_tools import NAME, events, joined, whole

from jaxserve import SamplingParams
from jaxserve.server.protocol import SAMPLING_NAMES, WITHOUT_EFFECT, ChatCompletionRequest, CompletionRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
RENDERED = "<user>Hello\n<assistant>"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def params(**changes):
    return SamplingParams(**{**GREEDY, **changes})


def asked(oracle, prompt, **changes):
    return run(oracle, [(prompt, params(**changes))])[0]


# ---- completions ----------------------------------------------------------------------------------------


def test_a_completion_is_what_the_engine_says(server, oracle):
    answer = server.post(COMPLETIONS, {"model": NAME, "prompt": "Hello there", **GREEDY}).json()
    want = asked(oracle, "Hello there")
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", NAME)
    assert whole(answer)[0] == {
        "text": want.outputs[0].text,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    usage = {"prompt_tokens": 11, "completion_tokens": 12, "total_tokens": 23}
    assert {name: answer["usage"][name] for name in usage} == usage


def test_several_prompts_of_both_kinds_and_several_answers(server, oracle):
    texts = ["one", "and two", "three"]
    body = {"prompt": texts, "n": 2, "seed": 3, "temperature": 0.9, "max_tokens": 6, "ignore_eos": True}
    answer = server.post(COMPLETIONS, body).json()
    ids = [oracle.tokenizer.encode(text) for text in texts]
    assert whole(server.post(COMPLETIONS, {**body, "prompt": ids}).json()) == whole(answer)
    results = run(oracle, [(text, params(n=2, seed=3, temperature=0.9, max_tokens=6)) for text in texts])
    want = [output.text for result in results for output in result.outputs]
    assert [choice["text"] for choice in answer["choices"]] == want
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert answer["usage"]["completion_tokens"] == 36


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_is_16_unless_said_and_a_chat_goes_on_to_the_end_of_the_context(server, oracle, stream):
    asking = {"temperature": 0, "ignore_eos": True, "stream": stream}
    read = lambda response: joined(events(response)) if stream else whole(response.json())
    text = read(server.post(COMPLETIONS, {"prompt": "Hello", **asking}))[0]["text"]
    assert text == asked(oracle, "Hello", max_tokens=16).outputs[0].text
    choice = read(server.post(CHAT, {"messages": HELLO, **asking}))[0]
    assert choice["text"] == asked(oracle, RENDERED, max_tokens=None).outputs[0].text


# ---- streamed is whole ----------------------------------------------------------------------------------

BODIES = [
    {"prompt": "Hello", "temperature": 0},
    {"prompt": ["a", "bcd", "Hello there"], "n": 2, "seed": 5, "temperature": 1.0},
    {"prompt": "Hello", "echo": True, "temperature": 0},
    {"prompt": ["Hello\n you", "x"], "echo": True, "logprobs": 3, "n": 2, "seed": 1, "temperature": 0.7},
    {"prompt": "Hello", "logprobs": 0, "stop": ["a", "<\\", "x1"], "temperature": 1.5, "seed": 2, "max_tokens": 60},
    {"prompt": "Hello", "logprobs": 2, "stop": "e", "include_stop_str_in_output": True, "seed": 4, "temperature": 1.5},
    {"prompt": "Hello", "stop_token_ids": list(range(60, 90)), "temperature": 1.5, "seed": 9, "logprobs": 1},
    {"prompt": "Hello", "skip_special_tokens": False, "temperature": 2.0, "seed": 3, "max_tokens": 80, "logprobs": 1},
    {"prompt": "Hello", "echo": True, "max_tokens": 0, "logprobs": 2},
    {"messages": HELLO, "n": 2, "seed": 7, "temperature": 1.0, "max_tokens": 9},
    {"messages": HELLO, "logprobs": True, "top_logprobs": 3, "stop": "c", "temperature": 1.5, "seed": 1},
    {"messages": HELLO, "logprobs": True, "seed": 11, "temperature": 2.0, "max_tokens": 30, "ignore_eos": False},
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("interval", [1, 3])
def test_a_joined_stream_is_the_whole_answer(server, body, interval):
    path = CHAT if "messages" in body else COMPLETIONS
    body = {"max_tokens": 20, "ignore_eos": True, **body}
    answer = server.post(path, body).json()
    extras = {"stream": True, "stream_interval": interval, "stream_options": {"include_usage": True}}
    *chunks, last = events(server.post(path, {**body, **extras}))
    assert joined(chunks) == whole(answer)
    assert last["choices"] == []
    assert all("usage" not in chunk for chunk in chunks)
    plain = lambda usage: {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert plain(last["usage"]) == plain(answer["usage"])
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    kind = "chat.completion.chunk" if path == CHAT else "text_completion"
    assert {chunk["object"] for chunk in [*chunks, last]} == {kind}


def test_a_stream_interval_joins_tokens_after_the_first(server):
    """By what has been generated: log-probabilities wait for the characters that their tokens are parts of."""
    body = {"prompt": "Hello", **GREEDY, "max_tokens": 40, "stream": True, "stream_interval": 10, "logprobs": 0}
    chunks = events(server.post(COMPLETIONS, {**body, "stream_options": {"continuous_usage_stats": True}}))
    generated = [0, *(chunk["usage"]["completion_tokens"] for chunk in chunks)]
    sizes = [after - before for before, after in itertools.pairwise(generated)]
    assert sum(sizes) == sum(len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in chunks) == 40
    assert all(size >= 10 for size in sizes[1:-1])
    assert len(sizes) <= 6


def test_usage_in_every_event(server):
    body = {"prompt": "Hello", **GREEDY, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    chunks = events(server.post(COMPLETIONS, body))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {5}


def test_cached_tokens_are_told(server):
    prompt = "The same long prefix of several pages, said twice: " + "abc " * 10
    first, second = (server.post(COMPLETIONS, {"prompt": prompt, **GREEDY}).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == len(prompt) // 16 * 16
    salted = server.post(COMPLETIONS, {"prompt": prompt, "cache_salt": "mine", **GREEDY}).json()["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


# ---- log-probabilities ----------------------------------------------------------------------------------


def test_logprobs_of_a_completion(server, oracle):
    answer = server.post(COMPLETIONS, {"prompt": "Hello", "logprobs": 3, **GREEDY}).json()
    lists = answer["choices"][0]["logprobs"]
    output = asked(oracle, "Hello", logprobs=3).outputs[0]
    want = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
    assert lists["token_logprobs"] == pytest.approx(want)
    for tops, entry in zip(lists["top_logprobs"], output.logprobs, strict=True):
        assert sorted(tops.values()) == pytest.approx(sorted(found.logprob for found in entry.values()))
    assert "".join(lists["tokens"]) == answer["choices"][0]["text"]


def test_logprobs_of_a_chat(server, oracle):
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, **GREEDY}
    choice = server.post(CHAT, body).json()["choices"][0]
    output = asked(oracle, RENDERED, logprobs=2).outputs[0]
    for got, token, entry in zip(choice["logprobs"]["content"], output.token_ids, output.logprobs, strict=True):
        assert got["logprob"] == pytest.approx(entry[token].logprob)
        tops = sorted((found for found in entry.values() if found.rank <= 2), key=lambda found: found.rank)
        assert [top["logprob"] for top in got["top_logprobs"]] == pytest.approx([found.logprob for found in tops])
    raw = bytes(itertools.chain.from_iterable(got["bytes"] for got in choice["logprobs"]["content"]))
    assert raw.decode(errors="replace") == choice["message"]["content"]


def test_prompt_logprobs(server, oracle):
    want = asked(oracle, "Hello", prompt_logprobs=2).prompt_logprobs
    for path, body in ((COMPLETIONS, {"prompt": "Hello"}), (CHAT, {"messages": HELLO})):
        got = server.post(path, {**body, "prompt_logprobs": 2, **GREEDY}).json()["choices"][0]["prompt_logprobs"]
        assert got[0] is None
        if path == COMPLETIONS:
            expected = [{str(i): found.logprob for i, found in entry.items()} for entry in want[1:]]
            assert [{i: found["logprob"] for i, found in entry.items()} for entry in got[1:]] == expected


# ---- chats ----------------------------------------------------------------------------------------------


def test_a_chat_goes_through_the_template(server, oracle):
    answer = server.post(CHAT, {"messages": HELLO, **GREEDY}).json()
    assert answer["id"].startswith("chatcmpl-")
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": asked(oracle, RENDERED).outputs[0].text, "refusal": None}
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert whole(server.post(CHAT, {"messages": parts, **GREEDY}).json()) == whole(answer)


def test_the_first_event_of_a_chat_names_the_role(server):
    chunks = events(server.post(CHAT, {"messages": HELLO, "n": 2, "seed": 1, **GREEDY, "stream": True}))
    for index in range(2):
        deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]


def test_max_completion_tokens(server):
    for limits in ({"max_completion_tokens": 3}, {"max_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 3}):
        answer = server.post(CHAT, {"messages": HELLO, "temperature": 0, "ignore_eos": True, **limits}).json()
        assert answer["usage"]["completion_tokens"] == 3


# ---- what is refused ------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "tell", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "other"}}


def wanted(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


WRONG = [
    (COMPLETIONS, {"prompt": "x", "temperatur": 1}, "temperatur", "did you mean 'temperature'"),
    (COMPLETIONS, {"prompt": "x", "temperature": "hot"}, "temperature", "valid number"),
    (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature", "at least 0"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 1.5}, "max_tokens", "integer"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": True}, "max_tokens", "integer"),
    (COMPLETIONS, {"prompt": "x", "n": 0}, "n", "from 1 to"),
    (COMPLETIONS, {"prompt": "x", "seed": 2**63}, "seed", "64 bits"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs", "20"),
    (COMPLETIONS, {"prompt": "x", "logprobs": -1}, "logprobs", "0"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
    (COMPLETIONS, {"prompt": "x", "best_of": 3}, "best_of", "not supported"),
    (COMPLETIONS, {"prompt": "x", "priority": 1}, "priority", "scheduling_policy"),
    (COMPLETIONS, {"prompt": "x", "stop": ["a"] * 17}, "stop", "16"),
    (COMPLETIONS, {"prompt": "x", "stop": ""}, "stop", "at least 1"),
    (COMPLETIONS, {"prompt": "x", "stream_options": {}}, "stream_options", "stream is true"),
    (COMPLETIONS, {"prompt": "x", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "streams"),
    (COMPLETIONS, {"prompt": [1, 2, 300]}, "prompt", "[300]"),
    (COMPLETIONS, {"prompt": [[1], [-1]]}, "prompt", "[-1]"),
    (COMPLETIONS, {"prompt": ["x", 3]}, "prompt", "valid"),
    (COMPLETIONS, {"prompt": ["x"] * 300}, "prompt", "300 prompts"),
    (COMPLETIONS, {"prompt": "x" * 600}, "prompt", "600 tokens"),
    (COMPLETIONS, {"prompt": "x" * 600, "stream": True}, "prompt", "600 tokens"),
    (COMPLETIONS, {}, "prompt", "required"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "logprobs is true"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    (CHAT, {"messages": HELLO, "logprobs": 2}, "logprobs", "boolean"),
    (CHAT, {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "max_tokens"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function", "required"),
    (CHAT, {"messages": HELLO, "tools": [TOOL]}, "tools", "takes none"),
    (CHAT, {"messages": HELLO, "tools": [TOOL, TOOL]}, "tools", "different names"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice", "no tools"),
    (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": OTHER}, "tool_choice.function.name", "'other'"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json"}}, "response_format.type", "json_schema"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format.json_schema", "given"),
    (CHAT, {"messages": HELLO, "response_format": wanted({"type": "x"})}, "response_format", "Invalid type: x"),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regx": "a"}}, "structured_outputs", "regex"),
    (CHAT, {"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template", "takes no templates"),
    (CHAT, {"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role", "one of"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "text"),
    (CHAT, {"messages": "Hello"}, "messages", "valid array"),
    ("/tokenize", {}, "prompt", "not both"),
    ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt", "not both"),
    ("/detokenize", {"tokens": [300]}, "tokens", "300"),
    ("/detokenize", {"tokens": [-1]}, "tokens", "-1"),
]


@pytest.mark.parametrize(("path", "body", "param", "part"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_named(server, path, body, param, part):
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert part in error["message"]
    assert param.split("[")[0] in error["message"]


def test_a_body_that_is_no_json(server):
    for content in (b"", b"{", b"[1]", b"null", b'"text"', b"\xff\xfe", b'{"prompt": "x"} x'):
        response = server.client.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, content
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert server.client.post(COMPLETIONS, content=b"{}").status_code == 415


def test_other_paths_and_methods(server):
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", COMPLETIONS, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
    ):
        response = server.client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["message"]
    response = server.post(COMPLETIONS, {"prompt": "x", "model": "other"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_null_is_not_given(server):
    names = {*CompletionRequest.model_fields} - {"prompt"}
    body = {"prompt": "Hello", "temperature": 0}
    nulls = {**dict.fromkeys(names), **body}
    assert whole(server.post(COMPLETIONS, nulls).json()) == whole(server.post(COMPLETIONS, body).json())


def test_fields_without_effect_are_accepted(server):
    ineffective = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
    }
    assert set(ineffective) == set(WITHOUT_EFFECT)
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    neutral |= {"parallel_tool_calls": False, "include_reasoning": False}
    body = {"messages": HELLO, **GREEDY}
    got = whole(server.post(CHAT, {**body, **ineffective, **neutral}).json())
    assert got == whole(server.post(CHAT, body).json())


def test_every_sampling_parameter_has_its_field():
    """Those that are missing are set by other fields, or by the server."""
    elsewhere = {"logprobs", "prompt_logprobs_start", "tenant"}
    assert set(SAMPLING_NAMES) == {field.name for field in fields(SamplingParams)} - elsewhere
    assert set(SAMPLING_NAMES) <= set(ChatCompletionRequest.model_fields)


# ---- the others -----------------------------------------------------------------------------------------


def test_models(server):
    models = server.client.get("/v1/models").json()
    assert models["object"] == "list"
    [card] = models["data"]
    assert (card["id"], card["max_model_len"]) == (NAME, 512)
    assert server.client.get(f"/v1/models/{NAME}").json() == card


def test_tokens_and_back(server, oracle):
    answer = server.post("/tokenize", {"prompt": "Hé!", "return_token_strs": True}).json()
    assert answer == {
        "count": 4,
        "max_model_len": 512,
        "tokens": oracle.tokenizer.encode("Hé!"),
        "token_strs": ["H", "�", "�", "!"],
    }
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "Hé!"}
    chat = server.post("/tokenize", {"messages": HELLO}).json()
    assert chat["tokens"] == oracle.tokenizer.encode(RENDERED)
    short = server.post("/tokenize", {"messages": HELLO, "add_generation_prompt": False}).json()
    assert short["tokens"] == oracle.tokenizer.encode(RENDERED.removesuffix("<assistant>"))


def test_health_ready_and_version(server):
    from importlib.metadata import version

    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/ready").json() == {"status": "ready"}
    assert server.client.get("/version").json() == {"version": version("jaxserve")}


def test_the_description_has_every_path_and_type(server):
    document = server.client.get("/openapi.json").json()
    taken = {path for path, methods in document["paths"].items() if "post" in methods}
    assert taken == {COMPLETIONS, CHAT, "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"}
    assert {"/v1/models", "/v1/models/{model}", "/health", "/ready", "/version", "/metrics"} <= set(document["paths"])
    text = json.dumps(document)
    schemas = document["components"]["schemas"]
    assert set(re.findall(r"#/components/schemas/(\w+)", text)) <= set(schemas)
    assert set(schemas["CompletionRequest"]["properties"]) == set(CompletionRequest.model_fields)


def test_request_ids_are_carried_through(server):
    body = {"prompt": "Hello", **GREEDY}
    response = server.post(COMPLETIONS, body, headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"] == "cmpl-mine-1"
    assert server.post(COMPLETIONS, {}, headers={"X-Request-Id": "bad"}).headers["x-request-id"] == "bad"
    for odd in ("", "a b", "x" * 200, "line\tfeed"):
        given = server.post(COMPLETIONS, body, headers={"X-Request-Id": odd}).headers["x-request-id"]
        assert given != odd
        assert len(given) == 32
