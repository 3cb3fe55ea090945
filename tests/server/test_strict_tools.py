"""`strict` tools that need not be called: any text, but what begins like a call is one whose arguments fit. Calls that
are required come behind thoughts, where there may be some."""

import json

import jsonschema
import openai
import pytest
from checkpoint_tools import EOS, byte_backend
from engine_tools import tiny_engine
from server_tools import NAME, local_server
from test_forms import CLOSING, HELLO, PAINT, PAINT_IT, TEMPLATES, TOOLS, check_calls

from jaxserve import SamplingParams
from jaxserve.server.forms import ToolCalling, ToolDefinition
from jaxserve.server.message import MessageReader
from jaxserve.server.reasoning import ReasoningReader
from jaxserve.server.tool_calls import FORMATS
from jaxserve.structured.compiler import GrammarCompiler
from jaxserve.text.tokenizer import Tokenizer

VOCAB = 300
MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>"]
LOOSE = {"type": "function", "function": {"name": "loose", "parameters": PAINT}}
RED, GREEN = '{"colour": "red", "dots": 7}', '{"colour": "green", "dots": 7}'


def tokenizer(special):
    backend = byte_backend(VOCAB)
    if special:
        backend.add_special_tokens(MARKERS)
    return Tokenizer(backend, eos_token=EOS, vocab_size=VOCAB)


def call(kind, name, arguments, key=None):
    body = f'{{"name": "{name}", "{key or FORMATS[kind].arguments_key}": {arguments}}}'
    return {"hermes": f"<tool_call>\n{body}\n</tool_call>", "mistral": f"[TOOL_CALLS][{body}]"}.get(kind, body)


def texts(kind):
    """(text, whether it may be an answer, whether it may begin one)."""
    right, wrong = call(kind, "paint", RED), call(kind, "paint", GREEN)
    yield from [("", True, True), ("just {text}", True, True), ("2 < 3", True, True)]
    yield from [(right, True, True), (wrong, False, False), (right[:40], False, True)]
    yield call(kind, "unknown", "{}"), False, False
    yield call(kind, "loose", GREEN), True, True  # of a tool that is not strict any object is taken
    yield call(kind, "loose", "[1]"), False, False
    if kind == "llama3_json":
        yield from [(f"{right}; {right}", True, True), (f"<|python_tag|>{right}", True, True)]
        yield from [(f"<|python_tag|>{wrong}", False, False), (f"\n{wrong}", False, False), ("<b> {", True, True)]
    else:
        yield from [(f"I do. {right} Done.", True, True), (f"{right}\n{right}", True, True)]
        yield from [(f"I do. {wrong}", False, False), (f"{right} and {wrong}", False, False)]


def required(kind):
    """The same where a call is required."""
    right, wrong = call(kind, "paint", RED), call(kind, "paint", GREEN)
    yield from [("", False, True), ("just text", False, False), ("2 < 3", False, False)]
    yield from [(right, True, True), (wrong, False, False), (right[:40], False, True)]


def behind_thoughts(answers, begun, thought):
    """The same where thoughts may come first, or must be closed."""
    for answer, whole, begins in answers:
        yield f"{'' if begun else '<think>'}{thought}</think>\n\n{answer}", whole, begins
        yield f" <think>{thought}</think>{answer}", whole, begins
        if not begun:
            yield answer, whole, begins
    yield f"<think>{thought}", False, True


@pytest.mark.parametrize("begun", [None, False, True], ids=["no thoughts", "thoughts", "begun thoughts"])
@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("kind", FORMATS)
def test_the_grammar(kind, special, begun):
    tools = [ToolDefinition.model_validate(tool) for tool in [*TOOLS, LOOSE]]
    text = tokenizer(special)
    compiler = GrammarCompiler(text, VOCAB)
    thought = "{ hm" if special else call(kind, "paint", GREEN) + "{ hm"
    for choice, answers in (("auto", texts(kind)), ("required", required(kind))):
        calling = ToolCalling(FORMATS[kind](text.special_tokens), tools, choice, parallel=True)
        matcher = compiler.compile(calling.params(SamplingParams(), begun).structured_outputs)
        for answer, whole, begins in answers if begun is None else behind_thoughts(answers, begun, thought):
            tokens = text.encode(answer, add_special_tokens=False)
            now = matcher.deep_copy()
            accepted = now.validate_tokens(tokens)
            assert (accepted == len(tokens)) == begins, answer
            if begins:
                now.consume_tokens(tokens)
                assert now.is_accepting() == whole, answer
            if whole and choice == "required":
                reader = MessageReader(None if begun is None else ReasoningReader(begun=begun), calling.reader())
                content, _, calls = reader.push(answer, final=True)
                assert (content, [made.name for made in calls]) == ("", ["paint"])


def test_tools_that_are_not_strict_leave_the_answer_alone():
    plain = SamplingParams()
    tool = ToolDefinition.model_validate(LOOSE)
    assert ToolCalling(FORMATS["hermes"]({}), [tool], None, parallel=True).params(plain) == plain


# A random model: where its markers are likely it calls again and again.
OPENING = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": "{"}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama3_json", "mistral")]


@pytest.mark.parametrize("kind", ["hermes", *SLOW])
def test_calls_of_a_model_that_knows_nothing_fit(kind):
    text = tokenizer(special=True)
    [opening] = text.encode(OPENING[kind], add_special_tokens=False)
    fields = {"model": NAME, "messages": HELLO, "temperature": 1, "max_tokens": 200, "tools": TOOLS}
    engine = tiny_engine("float32", text=text)
    found = set()
    with (
        local_server(engine, chat_template=TEMPLATES[kind]) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for seed in range(3):
            asked = {**fields, "seed": seed, "logit_bias": {str(opening): 100}}
            [got] = client.chat.completions.create(**asked).choices
            for made in got.message.tool_calls or ():
                tool = next(tool["function"] for tool in TOOLS if tool["function"]["name"] == made.function.name)
                jsonschema.validate(json.loads(made.function.arguments), tool["parameters"])
                found.add(made.function.name)
            deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
            streamed = [made.function for delta in deltas for made in delta.tool_calls or ()]
            whole = [made.function for made in got.message.tool_calls or ()]
            assert [(f.name, f.arguments) for f in streamed] == [(f.name, f.arguments) for f in whole]
            assert "".join(delta.content or "" for delta in deltas) == (got.message.content or "")
        [free] = client.chat.completions.create(**{**fields, "max_tokens": 20}, seed=1).choices
        assert free.message.content
        server.idle()
    assert "paint" in found


def parts(choice):
    message = choice.message
    calls = [(made.function.name, made.function.arguments) for made in message.tool_calls or ()]
    return choice.finish_reason, getattr(message, "reasoning_content", None), message.content, calls


@pytest.mark.parametrize("parser", ["qwen3", pytest.param("deepseek_r1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["hermes", *SLOW])
def test_calls_are_required_behind_thoughts(kind, parser):
    text = tokenizer(special=True)
    begin, end = (str(text.special_tokens[marker]) for marker in ("<think>", "</think>"))
    fields = {"model": NAME, "messages": HELLO, "temperature": 1, "max_tokens": 200, "n": 2, "tools": TOOLS}
    fields |= {"logit_bias": {begin: 100, end: 4, **CLOSING}, "parallel_tool_calls": False}
    engine, found = tiny_engine("float32", text=text), []
    with (
        local_server(engine, chat_template=TEMPLATES[kind], reasoning_parser=parser) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for seed, choice in enumerate(("required", PAINT_IT)):
            asked = {**fields, "seed": seed, "tool_choice": choice}
            whole = client.chat.completions.create(**asked).choices
            with client.chat.completions.stream(**asked) as events:
                assert [parts(got) for got in events.get_final_completion().choices] == [parts(got) for got in whole]
            found += [got for got in whole if got.finish_reason != "length"]  # random models go on for long
        server.idle()
    assert found
    assert any(getattr(got.message, "reasoning_content", None) for got in found)
    for got in found:
        assert got.finish_reason == "tool_calls"
        check_calls(got.message, "required", parallel=False)
