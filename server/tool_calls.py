"""Tool calls in the formats that models write: the grammar that enforces them, and how they are read. Knows no HTTP.

A format reads a text from its beginning, piece by piece: what is no complete call of a known tool is text. So an answer
holds valid JSON only, and a joined stream is the whole answer.
"""

import json
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxserve.structured.grammars import inline_json, marker, text_literal, triggered, up_to
from jaxserve.structured.params import StructuredOutputsParams
from jaxserve.text.stop_strings import held_back
from jaxserve.validation import lone_surrogate

_COMPACT = StructuredOutputsParams(json_object=True)  # how the arguments' whitespace is written
_LETTERS = string.ascii_letters + string.digits

Before = Literal["nothing", "text", "call"]


class _Number(NamedTuple):
    """A number of JSON as it was written: Python's may not be able to hold it."""

    text: str


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


_DECODER = json.JSONDecoder(parse_float=_Number, parse_int=_Number, parse_constant=_no_number)


class Tool(NamedTuple):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    parameters: Mapping[str, Any]


class ToolCall(NamedTuple):
    """`arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


class Taken(NamedTuple):
    """What a format makes of the beginning of a text; `rest` is to be given again, with what follows it."""

    content: str
    calls: list[tuple[str, str]]  # name, arguments
    rest: str


class ToolFormat(ABC):
    """How a family of models writes calls. `special_tokens` are those of the tokenizer that no text can spell."""

    name: str  # vLLM's
    arguments_key = "arguments"
    id_length = 24

    def __init__(self, special_tokens: Mapping[str, int]):
        self.special_tokens = special_tokens

    @property
    @abstractmethod
    def markers(self) -> tuple[str, ...]:
        """The texts around calls that may be special tokens."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> str:
        """The rule `calls` of a Lark grammar, and those that it needs: one call, or one or more."""

    @abstractmethod
    def free_grammar(self, tools: Sequence[Tool]) -> str:
        """The rule `free` of a Lark grammar, and those that it needs: texts in which what begins like a call is one of
        a tool, with arguments that fit."""

    @abstractmethod
    def take(self, text: str, names: Collection[str], *, before: Before, final: bool) -> Taken:
        """Read what is certain at the beginning of `text`; all of it if it is `final`. `before`: what it follows."""

    @property
    def shows_special_tokens(self) -> bool:
        """Whether a text must hold the special tokens for the calls to be seen."""
        return any(marker in self.special_tokens for marker in self.markers)

    def new_id(self) -> str:
        return "".join(secrets.choice(_LETTERS) for _ in range(self.id_length))

    def _objects(self, tools: Sequence[Tool]) -> list[str]:
        """The rule `call` of a Lark grammar: a JSON object with the name and the arguments of one of the tools."""
        bodies = []
        for tool in tools:
            begin = f'{{"name": {json.dumps(tool.name)}, "{self.arguments_key}": '
            bodies.append(f'{text_literal(begin)} {inline_json(dict(tool.parameters), _COMPACT)} "}}"')
        return [f"call: {' | '.join(bodies)}"]

    def _read_object(self, value: Any, names: Collection[str]) -> tuple[str, str] | None:
        """Name and arguments of a call, or None if it is none."""
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
            return None
        given = [value[key] for key in ("arguments", "parameters") if key in value]
        arguments = given[0] if given else {}
        try:
            return (value["name"], _dump(arguments)) if isinstance(arguments, dict) else None
        except RecursionError:
            return None


class Hermes(ToolFormat):
    """`<tool_call>` and a JSON object and `</tool_call>`, anywhere in a text: Hermes, Qwen 2.5 and 3, SmolLM3."""

    name = "hermes"
    markers = ("<tool_call>", "</tool_call>")

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> str:
        begin, end = (marker(text, self.special_tokens) for text in self.markers)
        wrapped = f'wrapped: {begin} "\\n" call "\\n" {end}'
        return "\n".join(["calls: wrapped" + (' ("\\n" wrapped)*' if parallel else ""), wrapped, *self._objects(tools)])

    def free_grammar(self, tools: Sequence[Tool]) -> str:
        begin, end = self.markers
        body = f'"\\n" call "\\n" {marker(end, self.special_tokens)}'
        return "\n".join([triggered({begin: [body]}, self.special_tokens), *self._objects(tools)])

    def take(self, text: str, names: Collection[str], *, before: Before, final: bool) -> Taken:
        begin, end = self.markers
        at = text.find(begin)
        if at < 0:
            return _text_before(text, begin, final=final)
        search = at + len(begin)
        while (stop := text.find(end, search)) >= 0:
            call = self._read_object(_parse(text[at + len(begin) : stop]), names)
            if call is not None:
                return Taken(text[:at], [call], text[stop + len(end) :])
            search = stop + len(end)
        if not final:
            return Taken(text[:at], [], text[at:])
        call = self._read_object(_parse(text[at + len(begin) :]), names)  # it may leave out the last end
        if call is not None:
            return Taken(text[:at], [call], "")
        return Taken(text[: at + len(begin)], [], text[at + len(begin) :])


class Llama3Json(ToolFormat):
    """A text that is JSON objects and nothing else, with `; ` between them, maybe behind `<|python_tag|>`: Llama 3."""

    name = "llama3_json"
    arguments_key = "parameters"
    tag = "<|python_tag|>"
    markers = ()  # the tag is not needed, and without it in the text there is nothing to take away

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> str:
        return "\n".join(["calls: call" + (' ("; " call)*' if parallel else ""), *self._objects(tools)])

    def free_grammar(self, tools: Sequence[Tool]) -> str:
        # What may begin alike takes its white space with it: the lexer does not go back.
        tag = up_to("tag", "SPACES?", self.tag, self.special_tokens)
        spaces = r"SPACES: /[ \n\r\t]+/"
        text = r"TEXT: /[ \n\r\t]*([^ \n\r\t{<](.|\n)*|<([^|](.|\n)*)?)?/"  # neither a brace first nor the tag
        return "\n".join(["free: tag? calls | TEXT", tag, spaces, text, self.grammar(tools, parallel=True)])

    def take(self, text: str, names: Collection[str], *, before: Before, final: bool) -> Taken:
        as_text = Taken(text, [], "")
        if before == "text":
            return as_text
        tag, body = self.tag, text.lstrip(" \n\r\t" if before == "nothing" else "; \n\r\t")
        if before == "nothing" and body.startswith(tag):
            body = body.removeprefix(tag).lstrip()
        if not final and (not body or (before == "nothing" and tag.startswith(body))):
            return Taken("", [], text)
        if not body.startswith("{"):
            return as_text if body or before == "nothing" else Taken("", [], "")
        try:
            value, end = _DECODER.raw_decode(body)
        except (ValueError, RecursionError):
            return as_text if final else Taken("", [], text)
        call = self._read_object(value, names)
        return Taken("", [call], body[end:]) if call is not None else as_text


class Mistral(ToolFormat):
    """`[TOOL_CALLS]` and a JSON list of objects, or `[TOOL_CALLS]name[ARGS]{...}` for each call: Mistral."""

    name = "mistral"
    id_length = 9  # its templates insist on it
    markers = ("[TOOL_CALLS]",)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> str:
        begin = marker(self.markers[0], self.special_tokens)
        calls = 'call (", " call)*' if parallel else "call"
        return "\n".join([f'calls: {begin} "[" {calls} "]"', *self._objects(tools)])

    def free_grammar(self, tools: Sequence[Tool]) -> str:
        body = '"[" call (", " call)* "]"'
        return "\n".join([triggered({self.markers[0]: [body]}, self.special_tokens), *self._objects(tools)])

    def take(self, text: str, names: Collection[str], *, before: Before, final: bool) -> Taken:
        [begin] = self.markers
        at = text.find(begin)
        if at < 0:
            return _text_before(text, begin, final=final)
        calls, end = self._calls(text, at + len(begin), names)
        if calls is not None:
            return Taken(text[:at], calls, text[end:])
        if not final:
            return Taken(text[:at], [], text[at:])
        return Taken(text[: at + len(begin)], [], text[at + len(begin) :])

    def _calls(self, text: str, at: int, names: Collection[str]) -> tuple[list[tuple[str, str]] | None, int]:
        """The calls that stand there and where they end; None if none do (yet)."""
        body = text[at:].lstrip()
        start = len(text) - len(body)
        try:
            if body.startswith("["):
                values, end = _DECODER.raw_decode(body)
                calls = [self._read_object(value, names) for value in values]
                return (calls, start + end) if calls and None not in calls else (None, 0)
            name, brace, _ = body.partition("{")
            called = name.strip().partition("[")[0]
            if not brace or called not in names:
                return None, 0
            value, end = _DECODER.raw_decode(body[len(name) :])
            return [(called, _dump(value))], start + len(name) + end
        except (ValueError, RecursionError):
            return None, 0


FORMATS: dict[str, type[ToolFormat]] = {cls.name: cls for cls in (Hermes, Llama3Json, Mistral)}


def format_of_template(template: str) -> str:
    """The name of the format that a chat template teaches; `hermes`, the most common one, if it does not say."""
    if "[TOOL_CALLS]" in template:
        return Mistral.name
    if "<tool_call>" not in template and ("<|python_tag|>" in template or "Environment: ipython" in template):
        return Llama3Json.name
    return Hermes.name


class ToolCallReader:
    """Reads one choice's text as it grows. White space beside calls is no content."""

    def __init__(self, tool_format: ToolFormat, names: Collection[str], *, parallel: bool):
        self._format, self._names, self._parallel = tool_format, frozenset(names), parallel
        self._text, self._space, self._called = "", "", False
        self._before: Before = "nothing"

    def push(self, text: str, *, final: bool) -> tuple[str, list[ToolCall]]:
        """The content and the calls that have become certain."""
        self._text += text
        content, calls = [], []
        while self._text:
            taken = self._format.take(self._text, self._names, before=self._before, final=final)
            content.append(self._content(taken.content, before_call=bool(taken.calls)))
            for name, arguments in taken.calls:
                if self._parallel or not self._called:
                    calls.append(ToolCall(self._format.new_id(), name, arguments))
                self._called = True
            self._before = "call" if taken.calls else "text" if taken.content else self._before
            if taken.rest == self._text:
                break
            self._text = taken.rest
        if final:
            content.append("" if self._called else self._space)
            self._space = ""
        return "".join(content), calls

    def _content(self, text: str, *, before_call: bool) -> str:
        """What is to be seen of a text; the white space at its end is held until it is known what follows."""
        text = self._space + text
        shown = text.rstrip()
        self._space = "" if before_call else text[len(shown) :]
        return shown


def _text_before(text: str, begin: str, *, final: bool) -> Taken:
    """Text without a marker, but for its end if that may become one."""
    held = 0 if final else held_back(text, [begin])
    return Taken(text[: len(text) - held], [], text[len(text) - held :])


def _parse(text: str) -> Any:
    try:
        return _DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        return None


def _dump(value: Any) -> str:
    """JSON on one line."""
    if isinstance(value, _Number):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_dump(name)}: {_dump(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_dump, value)) + "]"
    return json.dumps(value, ensure_ascii=isinstance(value, str) and lone_surrogate(value) is not None)
