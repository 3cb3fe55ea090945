"""Answers of a given form, and tool calls, through the official client on a server with a model that knows nothing."""

import asyncio
import json
import re
from typing import Literal

import jsonschema
import openai
import pytest
from checkpoint_tools import CHAT_TEMPLATE
from pydantic import BaseModel
from server_tools import NAME, byte_engine, local_server

TEMPLATES = {
    "hermes": CHAT_TEMPLATE + "{% if tools %}{{ tools | length }} tools{% endif %}",
    "llama3_json": CHAT_TEMPLATE + "{% if tools %}Environment: ipython{% endif %}",
    "mistral": CHAT_TEMPLATE + "{% if tools %}[TOOL_CALLS]{% endif %}",
}
HELLO = [{"role": "user", "content": "Hello"}]
PAINT = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "dots": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "dots"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Does.", "parameters": schema, "strict": True}}
    for name, schema in (("paint", PAINT), ("stop", {"type": "object", "additionalProperties": False}))
]


CLOSING = {"4": 3, "95": 5}  # a quote and a brace: a random model does not know when to stop


class Paint(BaseModel):
    colour: Literal["red", "blue"]
    thick: bool
    dots: Literal[1, 2, 3]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama3_json", "mistral")]


@pytest.fixture(scope="module", params=["hermes", *SLOW])
def server(request):
    with local_server(byte_engine(), chat_template=TEMPLATES[request.param]) as server:
        yield server
        server.idle()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(seed=0, **fields):
    return {"model": NAME, "messages": HELLO, "temperature": 1, "seed": seed, "max_tokens": 200, **fields}


def check_calls(message, choice, parallel=True):
    assert message.content is None
    names = [call.function.name for call in message.tool_calls]
    assert len({call.id for call in message.tool_calls}) == len(names)
    for call in message.tool_calls:
        schema = next(tool["function"] for tool in TOOLS if tool["function"]["name"] == call.function.name)
        jsonschema.validate(json.loads(call.function.arguments), schema["parameters"])
    if choice != "required":
        assert names == [choice["function"]["name"]]
    assert parallel or len(names) == 1
    return names


PAINT_IT = {"type": "function", "function": {"name": "paint"}}


@pytest.mark.parametrize("choice", ["required", PAINT_IT], ids=["required", "named"])
def test_calls_that_are_enforced(server, client, choice):
    found = set()
    for seed in range(2):
        fields = asked(seed, tools=TOOLS, tool_choice=choice, parallel_tool_calls=seed % 2 == 0)
        answer = client.chat.completions.create(**fields)
        [got] = answer.choices
        if got.finish_reason == "length":  # random models go on for long
            continue
        assert got.finish_reason == "tool_calls"
        found |= set(check_calls(got.message, choice, parallel=seed % 2 == 0))
        with client.chat.completions.stream(**fields) as events:
            whole = events.get_final_completion().choices[0]
        assert whole.finish_reason == "tool_calls"
        calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
        assert calls == [(call.function.name, call.function.arguments) for call in got.message.tool_calls]
    assert found


def test_arguments_that_are_cut(client):
    [got] = client.chat.completions.create(**asked(max_tokens=32), tools=TOOLS, tool_choice=PAINT_IT).choices
    assert (got.finish_reason, got.message.tool_calls) == ("length", None)
    assert '"name": "pa' in got.message.content
    stream = client.chat.completions.create(**asked(max_tokens=32), tools=TOOLS, tool_choice=PAINT_IT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == got.message.content


def test_tools_that_need_not_be_called(client):
    plain = client.chat.completions.create(**asked(max_tokens=20)).choices[0]
    without = client.chat.completions.create(**asked(max_tokens=20), tools=TOOLS, tool_choice="none").choices[0]
    assert without.message == plain.message
    empty = client.chat.completions.create(**asked(max_tokens=20), tools=[]).choices[0]
    assert empty.message == plain.message
    free = client.chat.completions.create(**asked(max_tokens=20), tools=TOOLS, logit_bias={"7": -100}).choices[0]
    assert (free.finish_reason, free.message.tool_calls) == ("length", None)
    kind = {"type": "json_schema", "json_schema": {"name": "a", "schema": PAINT}}
    for seed in range(2):
        [got] = client.chat.completions.create(**asked(seed), tools=TOOLS, response_format=kind).choices
        if got.finish_reason == "tool_calls":
            check_calls(got.message, "required")
        elif got.finish_reason == "stop":
            jsonschema.validate(json.loads(got.message.content), PAINT)


def test_the_clients_parse(client):
    for seed in range(2):
        answer = client.chat.completions.parse(**asked(seed), response_format=Paint)
        assert isinstance(answer.choices[0].message.parsed, Paint)
        assert answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**asked(1), response_format=Paint) as events:
        streamed = events.get_final_completion()
    assert (
        streamed.choices[0].message.parsed
        == client.chat.completions.parse(**asked(1), response_format=Paint).choices[0].message.parsed
    )
    tool = openai.pydantic_function_tool(Paint)
    choice = {"type": "function", "function": {"name": "Paint"}}
    answer = client.chat.completions.parse(**asked(2), tools=[tool], tool_choice=choice)
    [call] = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Paint)


def test_forms(client):
    for seed, form in enumerate([{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "any"}}]):
        [got] = client.chat.completions.create(**asked(seed, logit_bias=CLOSING), response_format=form).choices
        assert got.message.content.startswith("{")
        if got.finish_reason == "stop":
            assert isinstance(json.loads(got.message.content), dict)
    body = {"structured_outputs": {"regex": "[ab]{3}-[0-9]{2}"}}
    answer = client.completions.create(model=NAME, prompt="x", max_tokens=20, n=3, extra_body=body)
    assert all(re.fullmatch("[ab]{3}-[0-9]{2}", choice.text) for choice in answer.choices)
    body = {"structured_outputs": {"choice": ["yes", "no"]}}
    stream = client.chat.completions.create(**asked(), stream=True, extra_body=body)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) in ("yes", "no")


def test_grammars(client):
    body = {"structured_outputs": {"grammar": 'start: "(" (start | word) ")"\nword: /[ab]{3,9}/'}}
    fields = {"model": NAME, "prompt": "x", "temperature": 1, "seed": 1, "max_tokens": 200, "logit_bias": {"10": -3}}
    choices = client.completions.create(**fields, n=3, extra_body=body).choices
    choice = client.chat.completions.create(**asked(2, logit_bias={"10": -3}), extra_body=body).choices[0]
    texts = [choice.message.content, *(choice.text for choice in choices)]
    for text in texts:
        depth, word = text.count("("), text.strip("()")
        assert text == "(" * depth + word + ")" * depth
        assert re.fullmatch("[ab]{3,9}", word), text
        assert depth >= 1
    assert len(set(texts)) > 1


def test_structural_tags(client):
    """Free text, but for what stands between the tags."""
    tag = {"structures": [{"begin": "<f>", "schema": PAINT, "end": "</f>"}], "triggers": ["<"]}
    body = {"structured_outputs": {"structural_tag": tag}}
    opening = {"30": 4}  # the trigger
    chat = client.chat.completions.create(**asked(2, logit_bias=opening), extra_body=body).choices[0].message.content
    prompt = {"model": NAME, "prompt": "x", "temperature": 1, "seed": 1, "max_tokens": 200, "logit_bias": opening}
    for text in (chat, client.completions.create(**prompt, extra_body=body).choices[0].text):
        parts = re.findall("<f>(.*?)</f>", text, re.DOTALL)
        assert parts
        for part in parts:
            jsonschema.validate(json.loads(part), PAINT)
        free, trigger, cut = re.sub("<f>.*?</f>", "", text, flags=re.DOTALL).partition("<")
        assert free
        assert not trigger or cut.startswith("f>"[: len(cut)])


def test_many_at_once_and_one_that_leaves(server):
    async def one(client, seed):
        answer = await client.chat.completions.create(**asked(seed), response_format={"type": "json_object"})
        return answer.choices[0].message.content

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            alone = [await one(client, seed) for seed in range(3)]
            leaving = await client.chat.completions.create(
                **asked(9), stream=True, extra_body={"structured_outputs": {"regex": "[ab]{150}"}}
            )
            others = [asyncio.create_task(one(client, seed)) for seed in range(3)]
            await anext(aiter(leaving))
            await leaving.close()
            return alone, list(await asyncio.gather(*others))

    alone, together = asyncio.run(main())
    assert together == alone
    server.idle()


def test_thoughts_are_apart():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    think = {"structured_outputs": None, "logit_bias": {}, "max_tokens": 12}
    with local_server(byte_engine(), chat_template=template, reasoning_parser="qwen3") as server:
        body = {"messages": HELLO, "temperature": 1, "seed": 1, **think}
        message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        assert message["content"] is None
        assert message["reasoning_content"]
        hidden = server.post("/v1/chat/completions", {**body, "include_reasoning": False}).json()
        assert "reasoning_content" not in hidden["choices"][0]["message"]
        form = {"structured_outputs": {"choice": ["yes", "no"]}}
        message = server.post("/v1/chat/completions", {**body, **form}).json()["choices"][0]["message"]
        assert message["content"] in ("yes", "no")
        server.idle()


@pytest.mark.parametrize("schema", ["nope", "[1]", "[" * 50_000], ids=["no JSON", "a list", "deep"])
def test_a_form_beside_tools_is_checked_like_any_other(client, schema):
    with pytest.raises(openai.BadRequestError, match=r"structured_outputs\.json"):
        client.chat.completions.create(**asked(), tools=TOOLS, extra_body={"structured_outputs": {"json": schema}})


ARGUMENTS = [("[" * 100_000, True), ("{", True), ('{"a": 1e999}', False)]


@pytest.mark.parametrize(("arguments", "wrong"), ARGUMENTS, ids=["deep", "cut", "large"])
def test_calls_of_before(client, arguments, wrong):
    call = {"id": "a", "type": "function", "function": {"name": "paint", "arguments": arguments}}
    messages = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "b", "content": "1"},
    ]
    fields = {**asked(max_tokens=4), "messages": messages, "tools": TOOLS}
    if wrong:
        with pytest.raises(openai.BadRequestError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments"):
            client.chat.completions.create(**fields)
    else:
        assert client.chat.completions.create(**fields).choices


def test_arguments_are_objects(client):
    tools = lambda kind: [{"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}]
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]\.function\.parameters\.type"):
        client.chat.completions.create(**asked(), tools=tools("array"))
    either = {"tools": tools(["null", "object"]), "tool_choice": "required", "logit_bias": CLOSING, "n": 2}
    for got in client.chat.completions.create(**asked(**either)).choices:
        assert got.finish_reason == "length" or isinstance(
            json.loads(got.message.tool_calls[0].function.arguments), dict
        )


def test_a_form_is_refused_by_the_clients_name(client):
    for schema, field in (
        ({"const": "x" * 200_001}, "response_format.json_schema.schema"),
        ({"not": {}}, "response_format"),
    ):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**asked(), response_format=form)
        assert refused.value.param == field


def test_parameters_without_a_type_are_objects(client):
    loose = {"name": "paint", "parameters": {"properties": {"n": {"enum": [1, 2]}}, "additionalProperties": False}}
    tools = [{"type": "function", "function": loose}]
    for seed in range(3):
        [got] = client.chat.completions.create(**asked(seed), tools=tools, tool_choice="required").choices
        if got.finish_reason != "length":
            assert got.finish_reason == "tool_calls"
            assert all(isinstance(json.loads(c.function.arguments), dict) for c in got.message.tool_calls)
