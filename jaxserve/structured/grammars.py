"""From the form that a user asks for to the grammar that llguidance compiles."""

import json
import re
from collections.abc import Mapping
from typing import Any

import llguidance

from jaxserve.structured.params import StructuredOutputsParams
from jaxserve.validation import require

# Bounded: a model that has lost its way must not fill the context with spaces.
WHITESPACE = r"[ \n\r\t]{1,32}"
ANY_OBJECT = {"type": "object"}


def grammar_of(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
    """The grammar in one of llguidance's formats. `special_tokens` are those that no text can spell, by their names."""
    if params.json is not None or params.json_object:
        return json_grammar(schema_of(params), params)
    if params.regex is not None:
        return llguidance.LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return "start: CHOICE\nCHOICE: " + " | ".join(map(text_literal, params.choice))  # one word of the lexer
    if params.grammar is not None:
        try:
            return llguidance.grammar_from("grammar", params.grammar)
        except ValueError as error:
            raise ValueError(f"structured_outputs.grammar: {error}") from None
    return _tags_grammar(params, special_tokens)


def json_grammar(schema: Any, params: StructuredOutputsParams) -> str:
    schema = _prepared(schema, params)
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=json_options(params))
    except ValueError as error:
        raise ValueError(f"structured_outputs.json: {error}") from None


def json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    """How llguidance writes JSON's optional whitespace. Nothing is lenient, whatever a schema says."""
    options: dict[str, Any] = {"lenient": False, "coerce_one_of": False}
    if params.disable_any_whitespace:
        return options | {"whitespace_flexible": False}
    return options | {"whitespace_flexible": True, "whitespace_pattern": params.whitespace_pattern or WHITESPACE}


def inline_json(schema: Any, params: StructuredOutputsParams) -> str:
    """A schema as a term of a Lark grammar."""
    schema = _prepared(schema, params)
    # A schema may be a bool; options live in an object.
    schema = schema if isinstance(schema, dict) else {"allOf": [schema]}
    return "%json " + json.dumps({**schema, "x-guidance": json_options(params)})


def text_literal(text: str) -> str:
    """A text as a term of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def marker(text: str, special_tokens: Mapping[str, int]) -> str:
    """A marker as a term of a Lark grammar: the special token of this name where there is one, else its characters."""
    return f"<[{special_tokens[text]}]>" if text in special_tokens else text_literal(text)


def schema_of(params: StructuredOutputsParams) -> dict:
    """The JSON schema that is asked for."""
    return ANY_OBJECT if params.json is None else _parsed(params.json, "structured_outputs.json")


def _parsed(text: str, field: str) -> dict:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{field}: it must be JSON: {error}") from None
    require(isinstance(value, dict), field, value, "a JSON object")
    return value


def _prepared(schema: Any, params: StructuredOutputsParams) -> Any:
    """The schema as llguidance gets it."""
    try:
        schema = _repaired(schema)
        schema = _closed(schema) if params.disable_additional_properties else schema
    except RecursionError:
        raise ValueError("structured_outputs.json: it is nested too deeply") from None
    if isinstance(schema, dict):  # llguidance's options are not for clients: they could make it write what is no JSON
        schema.pop("x-guidance", None)
    return schema


_BY_NAME = ("properties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples")
_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_BEGINS_WITH_DATE = f"^({_YEAR}-(0[13-9]|1[0-2]|02-([01][0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_OF_FORMAT = {"date": [_BEGINS_WITH_DATE], "time": ["^.{6}[0-5]"], "date-time": [_BEGINS_WITH_DATE, "^.{17}[0-5]"]}


def _repaired(schema: Any) -> Any:
    """The schema with what llguidance (1.9) gets wrong said in another way.

    Where a negated class of a pattern has many control characters but no quote or no backslash, a quote or a backslash
    gets through when the text is escaped for JSON: such classes leave out control characters, too. Dates have a
    February 29 in every year, and a year 0. Every minute has a second 60: now none has, although some minutes did.
    """
    if isinstance(schema, list):
        return [_repaired(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            changed[key] = _narrowed(value)
        elif key == "patternProperties" and isinstance(value, dict):
            changed[key] = {_narrowed(pattern): _repaired(part) for pattern, part in value.items()}
        elif key in _BY_NAME and isinstance(value, dict):  # a property may be called like a keyword
            changed[key] = {name: _repaired(part) for name, part in value.items()}
        else:
            changed[key] = value if key in _VALUES else _repaired(value)
    kind = schema.get("format")
    if isinstance(kind, str) and kind in _OF_FORMAT and isinstance(changed.get("allOf", []), list):
        changed["allOf"] = [*changed.get("allOf", []), *({"pattern": pattern} for pattern in _OF_FORMAT[kind])]
    return changed


_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)


def _narrowed(pattern: str) -> str:
    def narrowed(part: str) -> str:
        if not part.startswith("[^"):
            return part
        begin = 3 if part.startswith("[^]") and len(part) > 3 else 2  # a bracket that comes first is a character
        return f"{part[:begin]}\\x00-\\x1f{part[begin:]}"

    return "".join(narrowed(found.group()) for found in _CLASS.finditer(pattern))


def _closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in every object that does not say anything about them."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    is_object = schema.get("type") == "object" or isinstance(schema.get("properties"), dict)
    if is_object and not {"additionalProperties", "patternProperties"} & schema.keys():
        closed["additionalProperties"] = False
    return closed


def _tags_grammar(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
    """Free text in which each trigger must begin one of the structures that begin with it."""
    field = "structured_outputs.structural_tag"
    tag = _parsed(params.structural_tag, field)
    structures, triggers = tag.get("structures"), tag.get("triggers")
    filled = lambda values, kind: (
        isinstance(values, list) and values != [] and all(isinstance(v, kind) and bool(v) for v in values)
    )
    require(filled(structures, dict), f"{field}.structures", structures, "a list of objects with begin, schema and end")
    require(filled(triggers, str), f"{field}.triggers", triggers, "a list of texts that are not empty")
    groups: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for index, structure in enumerate(structures):
        begin, end, schema = (structure.get(key) for key in ("begin", "end", "schema"))
        where = f"{field}.structures[{index}]"
        require(
            isinstance(begin, str) and isinstance(end, str), where, structure, "an object with begin and end, texts"
        )
        require(isinstance(schema, dict), f"{where}.schema", schema, "a JSON schema")
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        require(trigger is not None, f"{where}.begin", begin, f"a text that begins with one of the triggers {triggers}")
        rest = [text_literal(part) for part in (begin[len(trigger) :], end) if part]
        rest.insert(1 if begin != trigger else 0, inline_json(schema, params))
        groups[trigger].append(" ".join(rest))
    unused = [trigger for trigger, bodies in groups.items() if not bodies]
    require(not unused, f"{field}.triggers", unused, "texts with which some structure begins")
    return "\n".join(["%llguidance {}", "start: free", triggered(groups, special_tokens)])


def triggered(groups: Mapping[str, list[str]], special_tokens: Mapping[str, int]) -> str:
    """The rule `free` of a Lark grammar, and those that it needs: free text in which each trigger is followed by one
    of its bodies (terms of the grammar)."""
    rules = [f"free: ({' | '.join(f'part_{index}' for index in range(len(groups)))})* TEXT", "TEXT: /(.|\\n)*/"]
    for index, (trigger, bodies) in enumerate(groups.items()):
        rules.append(up_to(f"begin_{index}", "TEXT", trigger, special_tokens))
        rules.append(f"part_{index}: begin_{index} body_{index}")
        rules.append(f"body_{index}: {' | '.join(bodies)}")
    return "\n".join(rules)


def up_to(name: str, before: str, text: str, special_tokens: Mapping[str, int]) -> str:
    """The rule `name` of a Lark grammar: a marker, and before it the shortest text that the terminal `before` takes."""
    lazy = "" if text in special_tokens else "[lazy]"
    return f"{name}{lazy}: {before} {marker(text, special_tokens)}"
