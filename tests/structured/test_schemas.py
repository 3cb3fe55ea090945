"""Outputs by JSON schemas against another implementation of JSON Schema: all are valid, what is valid can be said."""

import functools
import json
import random
import re
from pathlib import Path

import hypothesis
import hypothesis_jsonschema
import jsonschema
import pytest
from checkpoint_tools import byte_tokenizer
from engine_tools import run, tiny_engine
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from jaxserve import LLM, SamplingParams
from jaxserve.structured.compiler import GrammarCompiler
from jaxserve.structured.masks import ConstrainedRow, MaskBuilder
from jaxserve.structured.params import StructuredOutputsParams

VOCAB, END = 300, 2
TEXT = byte_tokenizer(VOCAB)
LINES = (Path(__file__).parent / "schemas.jsonl").read_text(encoding="utf-8").splitlines()
SCHEMAS = [json.loads(line) for line in LINES]
# A random model does not know when to stop: what closes things is made likelier.
CLOSING = {token: 2.0 for char in '"}]' for token in TEXT.encode(char)}


FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
FORMAT_NAMES = ("date", "date-time", "duration", "email", "ipv4", "time", "uuid")


def validate(text: str, schema) -> None:
    value = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(value)


def share_that_ended(schemas, results) -> float:
    """Validates the outputs. Those that are cut by their length cannot be."""
    pairs = [(schema, each) for schema, result in zip(schemas, results, strict=True) for each in result.outputs]
    assert {output.finish_reason for _, output in pairs} <= {"stop", "length"}
    ended = [(schema, output.text) for schema, output in pairs if output.finish_reason == "stop"]
    for schema, text in ended:
        validate(text, schema)
    return len(ended) / len(pairs)


def outputs_are_valid(engine, schemas, *, seed=0, branches=2, max_tokens=200) -> None:
    """At temperature 1. An output may be cut by its length; nine in ten are not."""
    params = [
        SamplingParams(
            n=branches,
            seed=seed + index,
            max_tokens=max_tokens,
            logit_bias=CLOSING,
            structured_outputs={"json": schema, "disable_any_whitespace": index % 2 == 0},
        )
        for index, schema in enumerate(schemas)
    ]
    assert share_that_ended(schemas, run(engine, [([20, 30, 40], each) for each in params])) >= 0.9


@pytest.fixture(scope="module")
def engine():
    with tiny_engine(text=TEXT, max_num_seqs=8, max_num_batched_tokens=32) as engine:
        yield engine


@st.composite
def schemas(draw, depth=3):
    small = st.integers(0, 3)
    texts = st.text('abé"\\ \n', max_size=4)
    kinds = ["boolean", "null", "integer", "number", "string", "enum", "const", "format"]
    kind = draw(st.sampled_from(kinds + (["array", "object", "anyOf", "tuple"] * 2 if depth else [])))
    child = schemas(depth - 1)
    match kind:
        case "integer" | "number":
            low = draw(st.integers(-1000, 1000))
            bounds = {"minimum": low, "maximum": low + draw(st.integers(0, 500))}
            return {"type": kind} | draw(st.sampled_from([{}, bounds]))
        case "string":
            low = draw(small)
            return {"type": kind, "minLength": low, "maxLength": low + draw(small)}
        case "enum":
            values = st.one_of(texts, st.integers(-99, 99), st.booleans(), st.none())
            return {"enum": draw(st.lists(values, min_size=1, max_size=4, unique_by=json.dumps))}
        case "const":
            return {"const": draw(st.recursive(texts | st.integers(-9, 9), st.lists, max_leaves=3))}
        case "format":
            return {"type": "string", "format": draw(st.sampled_from(FORMAT_NAMES))}
        case "array":
            low = draw(st.integers(0, 1))
            return {"type": kind, "items": draw(child), "minItems": low, "maxItems": low + draw(st.integers(0, 2))}
        case "tuple":
            items = draw(st.lists(child, min_size=1, max_size=3))
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        case "object":
            properties = draw(st.dictionaries(texts, child, max_size=3))
            required = [name for name in properties if draw(st.booleans())]
            return {"type": kind, "properties": properties, "required": required, "additionalProperties": False}
        case "anyOf":
            return {"anyOf": draw(st.lists(child, min_size=1, max_size=3))}
    return {"type": kind}


def test_outputs_are_valid(engine):
    outputs_are_valid(engine, SCHEMAS[::3])


@settings(max_examples=3, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(drawn=st.lists(schemas(), min_size=20, max_size=20), seed=st.integers(0, 1000))
def test_outputs_of_drawn_schemas_are_valid(engine, drawn, seed):
    outputs_are_valid(engine, drawn, seed=seed, branches=1)


def two_hundred() -> list:
    """The written schemas, and drawn ones that are always the same."""
    found = {}

    @hypothesis.seed(0)
    @settings(max_examples=400, deadline=None, database=None, phases=[hypothesis.Phase.generate])
    @given(schemas())
    def collect(schema):
        found[json.dumps(schema)] = schema

    collect()
    drawn = [found[text] for text in sorted(found) if found[text] not in SCHEMAS]
    return SCHEMAS + random.Random(0).sample(drawn, 200 - len(SCHEMAS))  # neighbours are alike


@pytest.mark.slow
def test_outputs_of_a_random_model_are_valid(engine):
    outputs_are_valid(engine, two_hundred(), branches=4, max_tokens=400)


# What `hypothesis_jsonschema` does not know.
MORE_FORMATS = {
    "uuid": st.uuids().map(str),
    "duration": st.from_regex(r"\AP([0-9]W|[0-9]D(T[0-9]H([0-9]M)?)?|T[0-9]S)\Z"),
}


def both(schema, other):
    """Two schemas in one, as far as those of this file need it."""
    if isinstance(schema, bool) or isinstance(other, bool):
        return other if schema is True else schema
    names = {**schema.get("properties", {}), **other.get("properties", {})}
    named = {
        n: both(schema.get("properties", {}).get(n, True), other.get("properties", {}).get(n, True)) for n in names
    }
    needed = {"required": [*schema.get("required", ()), *other.get("required", ())]}
    return {**schema, **other, **({"properties": named} if named else {}), **needed}


@st.composite
def values(draw, schema, root, depth=0):
    """Most of what a schema allows, properties in the order in which it names them."""
    deep, child = depth > 5, lambda part: draw(values(part, root, depth + 1))
    if schema is True:
        return draw(st.none() | st.integers(-9, 9) | st.text(max_size=2))
    if "$ref" in schema:
        target = root
        for name in schema["$ref"].split("/")[1:]:
            target = target[name]
        return child(target)
    for keyword in ("allOf", "anyOf", "oneOf"):
        if keyword in schema:
            rest, parts = {key: part for key, part in schema.items() if key != keyword}, schema[keyword]
            if keyword != "allOf":
                parts = parts[:1] if deep else [draw(st.sampled_from(parts))]
            return child(functools.reduce(both, parts, rest))
    kinds = schema.get("type", "object" if "properties" in schema else None)
    kind = draw(st.sampled_from(kinds)) if isinstance(kinds, list) else kinds
    if kind == "object":
        return draw(objects(schema, root, depth))
    if kind == "array":
        first = [child(part) for part in schema.get("prefixItems", ())]
        low = max(0, schema.get("minItems", 0) - len(first))
        most = schema.get("maxItems", len(first) + 2 * (schema.get("items") is not False)) - len(first)
        return first + [child(schema.get("items", True)) for _ in range(low if deep else draw(st.integers(low, most)))]
    own = {key: part for key, part in schema.items() if key not in ("$defs", "required", "type")}
    own |= {"type": kind} if kind else {}
    if "pattern" in own:  # digits as JSON Schema means them; classes without what docs/SERVER.md leaves out
        own["pattern"] = own["pattern"].replace(r"\d", "[0-9]").replace("[^", r"[^\x00-\x1f")
    value = draw(hypothesis_jsonschema.from_schema(own, custom_formats=MORE_FORMATS))
    return int(value) if isinstance(value, float) and value.is_integer() else value  # between bounds 2.0 is written 2


@st.composite
def objects(draw, schema, root, depth):
    child = lambda part: draw(values(part, root, depth + 1))
    named, required = schema.get("properties", {}), schema.get("required", ())
    others = schema.get("additionalProperties", True)
    value = {
        name: child(part) for name, part in named.items() if name in required or (depth < 6 and draw(st.booleans()))
    }
    value |= {name: child(others) for name in required if name not in named}
    names = st.text(max_size=3).filter(lambda name: name not in {**named, **value})
    return value | {name: child(others) for name in (draw(st.sets(names, max_size=2)) if others is not False else ())}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.sampled_from(SCHEMAS) | schemas(), st.sampled_from([(",", ":"), (", ", ": ")]))
def test_what_is_valid_can_be_said(compiler, data, schema, separators):
    value = data.draw(values(schema, schema))
    assume(jsonschema.Draft202012Validator(schema, format_checker=FORMATS).is_valid(value))
    text = json.dumps(value, ensure_ascii=False, separators=separators)
    assume("inimum" not in json.dumps(schema) or re.search("[0-9]e[-+]?[0-9]", text) is None)  # has another spelling
    assert accepts(compiler, schema, text), text


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TEXT, VOCAB)


def accepts(compiler, schema, text) -> bool:
    constraint, builder = compiler.start(StructuredOutputsParams(json=schema), [END]), MaskBuilder(VOCAB)
    for token in TEXT.encode(text):
        [mask] = builder.build([ConstrainedRow(0, constraint, [])], 1)
        if not mask[token // 32] >> (token % 32) & 1:
            return False
        constraint.advance(token)
    return constraint.matcher.is_accepting()


@pytest.mark.parametrize(
    "pattern", [r'^[^"]$', r'^[^"\\]$', r"^[^\\\n]$", r'^[^]"]$', r"^[^x]$", r'^\[\^"]$', r"^a[^a-]$"]
)
@pytest.mark.parametrize("inside", [False, True])
def test_patterns_with_negated_classes(compiler, pattern, inside):
    """What a negated class takes is said in JSON, with escapes; the pattern's own definition decides."""
    text_of = (lambda text: {"a": text}) if inside else (lambda text: text)
    schema = {"type": "string", "pattern": pattern}
    if inside:
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    for text in ('"', "\\", "x", "]", "-", "[^", "a", '[^"', "[^x", 'a"', "ab", "a-", "aa", "\n"):
        said = accepts(compiler, schema, json.dumps(text_of(text)))
        assert said == (re.search(pattern, text) is not None and text != "\n"), text


def test_properties_may_be_called_like_keywords(compiler):
    schema = {"type": "object", "required": ["default"], "additionalProperties": False}
    schema["properties"] = {"default": {"type": "string", "pattern": '^[^"]$'}}
    assert accepts(compiler, schema, '{"default":"x"}')
    assert not accepts(compiler, schema, '{"default":"\\""}')


@pytest.mark.parametrize("more", [{}, {"pattern": "^[^x]*$"}, {"allOf": [{"maxLength": 20}]}], ids=str)
def test_dates_exist(compiler, more):
    days = [f"{year}-{day}" for year in ("0001", "1900", "2000", "2023", "2024") for day in ("02-28", "02-29", "04-30")]
    for day in [
        *days,
        "0000-01-01",
        "2024-02-30",
        "2023-04-31",
        "2024-13-01",
        "2024-00-10",
        "2024-10-00",
        "2024-12-31",
    ]:
        assert accepts(compiler, {"format": "date", **more}, json.dumps(day)) == FORMATS.conforms(day, "date"), day
        moment = f"{day}T09:00:00Z"
        said = accepts(compiler, {"type": ["null", "string"], "format": "date-time", **more}, json.dumps(moment))
        assert said == FORMATS.conforms(moment, "date-time") == FORMATS.conforms(day, "date"), moment


def test_times_exist(compiler):
    times = [
        "00:00:00Z",
        "23:59:59+01:00",
        "12:00:60Z",
        "23:59:60Z",
        "12:60:00Z",
        "24:00:00Z",
        "12:00:00",
        "12:00:59.9z",
    ]
    for time in times:
        assert accepts(compiler, {"format": "time"}, json.dumps(time)) == FORMATS.conforms(time, "time"), time
        moment = f"2024-02-29T{time}"
        said = accepts(compiler, {"format": "date-time"}, json.dumps(moment))
        assert said == FORMATS.conforms(moment, "date-time"), moment


@pytest.mark.parametrize("kind", FORMAT_NAMES)
def test_formats_are_checked(kind):
    """So that an output of another form would be found."""
    assert not FORMATS.conforms("x", kind)


def test_the_compilers_own_options_are_not_for_clients(compiler):
    schema = {"type": "array", "x-guidance": {"item_separator": ";", "lenient": True}}
    assert accepts(compiler, schema, "[1,2]")
    assert not accepts(compiler, schema, "[1;2]")


@pytest.mark.parametrize("depth", [300, 950, 5000])
def test_schemas_that_are_too_deep_or_fit_nothing(compiler, depth):
    with pytest.raises(ValueError, match=r"structured_outputs\.json: "):
        compiler.compile(StructuredOutputsParams(json='{"items":' * depth + "{}" + "}" * depth))
    with pytest.raises(ValueError, match="no output fits it"):
        compiler.compile(StructuredOutputsParams(json={"$ref": "#"}))


def test_constants_are_no_patterns(compiler):
    schema = {"const": {"pattern": '^[^"]$'}}
    assert accepts(compiler, schema, json.dumps(schema["const"]))


@pytest.mark.slow
def test_outputs_of_the_demo_model_are_valid():
    """At temperature 1."""
    with LLM(max_model_len=512, max_num_seqs=32, max_num_batched_tokens=64) as llm:
        schemas = two_hundred()
        prompts = [f"Write JSON for the schema {json.dumps(schema)[:300]}:\n" for schema in schemas]
        params = [
            SamplingParams(n=2, seed=index, max_tokens=200, structured_outputs={"json": schema})
            for index, schema in enumerate(schemas)
        ]
        results = llm.generate(prompts, params, use_tqdm=False)
    assert share_that_ended(schemas, results) > 0.8  # the others are cut: a small model at temperature 1 rambles
