"""`/v1/responses` through the official client, over a tiny random model."""

import json
from typing import Literal

import jsonschema
import openai
import pytest
from checkpoint_tools import CHAT_TEMPLATE
from pydantic import BaseModel
from server_tools import NAME, byte_engine, local_server

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "dots": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "dots"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "paint", "parameters": SCHEMA, "strict": True}


class Paint(BaseModel):
    colour: Literal["red", "blue"]
    thick: bool


@pytest.fixture(scope="module")
def server():
    template = CHAT_TEMPLATE + "{% if tools %}{{ tools | length }} tools{% endif %}"
    with local_server(byte_engine(), chat_template=template) as server:
        yield server
        server.idle()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(**fields):
    return {"model": NAME, "input": "Hello", "temperature": 1, "extra_body": {"seed": 3}, **fields}


def test_text_is_that_of_a_chat(server, client):
    response = client.responses.create(**asked(max_output_tokens=20, instructions="Be brief."))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    body = {"messages": messages, "temperature": 1, "seed": 3, "max_tokens": 20}
    chat = server.post("/v1/chat/completions", body).json()
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert response.usage.output_tokens == chat["usage"]["completion_tokens"]
    cut = chat["choices"][0]["finish_reason"] == "length"
    assert response.status == ("incomplete" if cut else "completed")
    assert (response.incomplete_details is not None) == cut
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    again = client.responses.create(**asked(input=parts, max_output_tokens=20, instructions="Be brief."))
    assert again.output_text == response.output_text


def test_streams(client):
    fields = asked(max_output_tokens=20)
    events = list(client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    whole = client.responses.create(**fields)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == f"response.{whole.status}"
    assert events[-1].response.output_text == whole.output_text


def test_functions_and_forms(client):
    fields = asked(tools=[TOOL], tool_choice={"type": "function", "name": "paint"}, max_output_tokens=200)
    response = client.responses.create(**fields)
    [call] = response.output
    assert (call.type, call.name, response.status) == ("function_call", "paint", "completed")
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    with client.responses.stream(**fields) as events:
        [streamed] = events.get_final_response().output
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    turn = [{"role": "user", "content": "Hello"}, call.model_dump(exclude_none=True)]
    turn.append({"type": "function_call_output", "call_id": call.call_id, "output": "painted"})
    body = {"seed": 3, "ignore_eos": True}
    assert client.responses.create(**asked(input=turn, max_output_tokens=5, extra_body=body)).usage.output_tokens == 5
    parsed = client.responses.parse(**asked(max_output_tokens=200), text_format=Paint)
    assert isinstance(parsed.output_parsed, Paint)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "boss", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "boss", "content": "x"}], "instructions": "Be brief."}, "input[0].role"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"tools": [TOOL | {"parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "draw"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format"),
        ({"extra_body": {"previous_response_id": "resp-1"}}, "previous_response_id"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(client, fields, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**asked(**fields))
    assert error.value.param == param
