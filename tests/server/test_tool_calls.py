"""Tool calls and thoughts in texts: what is read, however the text is cut."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.server.message import MessageReader
from jaxserve.server.reasoning import ReasoningReader
from jaxserve.server.tool_calls import FORMATS, ToolCallReader, format_of_template

NAMES = ["f", "get_weather"]
F = ("f", '{"a": 1}')
W = ("get_weather", '{"city": "Lyon </tool_call> [x] é"}')
H_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
H_W = '<tool_call>{"name": "get_weather", "arguments": {"city": "Lyon </tool_call> [x] \\u00e9"}}</tool_call>'
L_F = '{"name": "f", "parameters": {"a": 1}}'
L_W = '{"name": "get_weather", "arguments": {"city": "Lyon </tool_call> [x] é"}}'

CASES = {
    "hermes": [
        ("", "", []),
        ("plain <tool", "plain <tool", []),
        ("  two words \n", "  two words \n", []),
        (H_F, "", [F]),
        (f" {H_F}\n{H_W}\n", "", [F, W]),
        (f"Let me see.\n\n{H_F} Now\n {H_W} done\n", "Let me see. Now done", [F, W]),
        (H_F.removesuffix("\n</tool_call>"), "", [F]),
        (f"cut {H_F[:30]}", f"cut {H_F[:30]}", []),
        (f"<tool_call>{{no}}</tool_call>{H_F}", "<tool_call>{no}</tool_call>", [F]),
        ('<tool_call>{"name": "g", "arguments": {}}</tool_call>',) * 2 + ([],),
        ('<tool_call>{"name": "f", "arguments": 3}</tool_call>',) * 2 + ([],),
        ('<tool_call>{"name": {}}</tool_call>',) * 2 + ([],),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',) * 2 + ([],),
        (
            '<tool_call>{"name": "f", "arguments": {"a": [1e999,-0.10]}}</tool_call>',
            "",
            [("f", '{"a": [1e999, -0.10]}')],
        ),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "", [("f", '{"a": "\\ud800"}')]),
    ],
    "llama3_json": [
        ("plain {", "plain {", []),
        (L_F, "", [F]),
        (f"\n<|python_tag|>{L_F}; {L_W};", "", [F, W]),
        (f"see {L_F}", f"see {L_F}", []),
        (f"{L_F} and more", " and more", [F]),
        (L_F[:-1], L_F[:-1], []),
        ('{"name": "g", "parameters": {}}',) * 2 + ([],),
        ('{"name": ["f"], "parameters": {}}',) * 2 + ([],),
        ('{"a": 1}',) * 2 + ([],),
        ("<|pyth",) * 2 + ([],),
    ],
    "mistral": [
        ("plain [TOOL", "plain [TOOL", []),
        (f"[TOOL_CALLS] [{L_F}, {L_W}]", "", [F, W]),
        (f"Well: [TOOL_CALLS][{L_F}]\n", "Well:", [F]),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather{"city": "Lyon </tool_call> [x] é"}', "", [F, W]),
        ('[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', "", [F]),
        (f"[TOOL_CALLS][{L_F}",) * 2 + ([],),
        ('[TOOL_CALLS]g{"a": 1}',) * 2 + ([],),
        ("[TOOL_CALLS][]",) * 2 + ([],),
        ("[TOOL_CALLS] x",) * 2 + ([],),
    ],
}
ALL = [(name, *case) for name, cases in CASES.items() for case in cases]


def read(reader, pieces):
    content, thoughts, calls = "", "", []
    for index, piece in enumerate(pieces):
        parts = reader.push(piece, final=index == len(pieces) - 1)
        content, thoughts, calls = content + parts.content, thoughts + parts.reasoning, calls + parts.calls
    assert reader.num_calls == len(calls)
    assert len({call.id for call in calls}) == len(calls)
    return content, thoughts, [(call.name, call.arguments) for call in calls]


def tool_reader(name, parallel=True):
    return MessageReader(tools=ToolCallReader(FORMATS[name]({}), NAMES, parallel=parallel))


def cut(text, places):
    places = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(places)]


@pytest.mark.parametrize(("name", "text", "content", "calls"), ALL, ids=str)
def test_what_is_read_in_whatever_pieces(name, text, content, calls):
    for pieces in ([text], [*list(text), ""], cut(text, [7, 20, 33])):
        assert read(tool_reader(name), pieces) == (content, "", calls)
    for _, arguments in calls:
        json.loads(arguments)


PIECES = [H_F, H_W, L_F, L_W, "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "]", "{", "}", ";", ", ", " ", "\n"]
PIECES += ["word", "f[ARGS]", '{"a": 1}', "<", "<think>", "</think>", "<|python_tag|>", '"', "\\", "\u2003"]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
    st.lists(st.integers(0, 500), max_size=10),
    st.sampled_from([None, True, False]),
    st.booleans(),
)
def test_a_joined_stream_is_the_whole_answer(name, text, places, begun, parallel):
    def reader():
        thoughts = None if begun is None else ReasoningReader(begun=begun)
        return MessageReader(thoughts, ToolCallReader(FORMATS[name]({}), NAMES, parallel=parallel))

    whole = read(reader(), [text])
    assert read(reader(), cut(text, places)) == whole
    assert read(reader(), [*text, ""]) == whole
    assert parallel or len(whole[2]) <= 1


@pytest.mark.parametrize(
    ("text", "begun", "thoughts", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes", False, "Hm.", "Yes"),
        ("Hm.\n</think>\n\nYes", True, "Hm.", "Yes"),
        ("<think>Hm.</think>Yes", True, "Hm.", "Yes"),
        ("<think></think> Yes ", False, "", "Yes "),
        (" Yes", False, "", " Yes"),
        ("<thin", False, "", "<thin"),
        ("<think>cut </thin", False, "cut </thin", ""),
        ("", True, "", ""),
        ("a</think>b</think>c", True, "a", "b</think>c"),
        ("a <think> b", False, "", "a <think> b"),
    ],
)
def test_thoughts(text, begun, thoughts, content):
    for pieces in ([text], [*text, ""], cut(text, [3, 9])):
        assert read(MessageReader(ReasoningReader(begun=begun)), pieces) == (content, thoughts, [])
    hidden = MessageReader(ReasoningReader(begun=begun), shows_reasoning=False)
    assert read(hidden, [text]) == (content, "", [])


@pytest.mark.parametrize("number", ["9" * 5000, "-1" + "0" * 400 + ".50", "1E-99999", "5"], ids=len)
def test_numbers_stay_as_they_are_written(number):
    """Also those that a float or Python's int() cannot hold."""
    arguments = f'{{"a": {number}}}'
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert read(tool_reader("hermes"), [text]) == ("", "", [("f", arguments)])


def test_calls_behind_thoughts():
    reader = MessageReader(ReasoningReader(begun=False), ToolCallReader(FORMATS["hermes"]({}), NAMES, parallel=True))
    assert read(reader, [f"<think>{H_W}</think>\n{H_F}"]) == ("", H_W, [F])


def test_only_one_call():
    assert read(tool_reader("hermes", parallel=False), [H_F + H_W]) == ("", "", [F])
    assert read(tool_reader("mistral", parallel=False), [f"[TOOL_CALLS][{L_F}, {L_W}]"]) == ("", "", [F])


def test_the_format_that_a_template_teaches():
    assert format_of_template("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert format_of_template("[AVAILABLE_TOOLS] [TOOL_CALLS]") == "mistral"
    assert format_of_template("Environment: ipython ... parameters") == "llama3_json"
    assert format_of_template("{{ tools }}") == "hermes"
    assert len(FORMATS["mistral"]({}).new_id()) == 9
