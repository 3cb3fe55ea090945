"""Masks against their definition: a token is allowed where some continuation of the text is in the language."""

import itertools
import json
import pickle
import random
import re

import numpy as np
import pytest
import tokenizers
from checkpoint_tools import byte_backend, byte_tokenizer
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.sampling.processing import mask_words
from jaxserve.structured.compiler import Constraint, GrammarCompiler
from jaxserve.structured.masks import ConstrainedRow, MaskBuilder
from jaxserve.structured.params import MAX_LENGTH, StructuredOutputsParams
from jaxserve.text.tokenizer import Tokenizer

VOCAB = 288  # a multiple of 32: the bit for the end has a word of its own
END = 2


def merged_tokenizer() -> Tokenizer:
    """Bytes, and some longer tokens that the tokenizer prefers."""
    base = json.loads(byte_backend(VOCAB).to_str())["model"]["vocab"]
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ("1", "2"), ("Ġ", "a")]
    vocab = {**base, **{a + b: len(base) + index for index, (a, b) in enumerate(merges)}}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, eos_token="</s>", vocab_size=VOCAB)


@pytest.fixture(scope="module", params=[lambda: byte_tokenizer(VOCAB), merged_tokenizer], ids=["bytes", "merged"])
def compiler(request):
    return GrammarCompiler(request.param(), VOCAB)


def bits(mask: np.ndarray) -> set[int]:
    return {token for token in range(VOCAB) if mask[token // 32] >> (token % 32) & 1}


def allowed(constraint: Constraint, drafts: list[int] | None = None) -> list[set[int]]:
    drafts = drafts or []
    masks = MaskBuilder(VOCAB).build([ConstrainedRow(1, constraint, drafts)], 3 + len(drafts))
    assert masks.shape == (3 + len(drafts), mask_words(VOCAB))
    assert (masks[[0, -1]] == 0xFFFFFFFF).all(), "rows without a constraint"
    return [bits(mask) for mask in masks[1 : 2 + len(drafts)]]


REGEXES = ["(ab|a)c{1,3}", "[ab]{2,4}", "a(bc)?|cab?", "a?b?c?1?", "(a|bb){1,3}c", "1?2{0,2}a"]


def language(regex: str) -> set[str]:
    words = ("".join(letters) for length in range(8) for letters in itertools.product("abc12", repeat=length))
    return {word for word in words if re.fullmatch(regex, word)}


LANGUAGES = [
    *(({"regex": regex}, language(regex)) for regex in REGEXES),
    ({"choice": ["a", "abc", 'b"\\', "ab c", "né\n", "日本"]}, {"a", "abc", 'b"\\', "ab c", "né\n", "日本"}),
    ({"grammar": 'start: "a" inner "c"\ninner: "b" | "b" "b" | ""'}, {"ac", "abc", "abbc"}),
    ({"grammar": 'root ::= "a" inner "c"\ninner ::= "b"? "b"?'}, {"ac", "abc", "abbc"}),
    ({"json": {"enum": ["x", 12, True, None]}}, {'"x"', "12", "true", "null"}),
    ({"json": {"type": "integer", "minimum": 9, "maximum": 13}}, {"9", "10", "11", "12", "13"}),
]


@pytest.mark.parametrize(("form", "words"), LANGUAGES, ids=[str(form)[:40] for form, _ in LANGUAGES])
def test_against_the_definition(compiler, form, words):
    words = {word.encode() for word in words}
    source = random.Random(0)
    params = StructuredOutputsParams(**form)
    tokens = [compiler._text.token_bytes(token) for token in range(VOCAB)]
    for _ in range(12):
        constraint, text, ended = compiler.start(params, [END]), b"", False
        while not ended:
            [mask] = allowed(constraint)
            continuations = {word[len(text) :] for word in words if word.startswith(text)}
            right = {
                token
                for token, piece in enumerate(tokens)
                if piece and token not in compiler._text.special_ids
                if any(word.startswith(piece) for word in continuations)
            }
            right |= {END} if text in words else set()
            forced = b"" not in continuations and len({word[:1] for word in continuations}) == 1
            # Where the next byte is certain, the text is written as the tokenizer would.
            assert mask == right if not forced else mask and mask <= right, text
            token = source.choice(sorted(mask))
            if token == END:
                break
            ended = constraint.advance(token)
            text += tokens[token]
        assert text in words
        assert not ended or not any(word.startswith(text) and word != text for word in words)


def test_rows_behind_drafts(compiler):
    """A row behind drafts is masked as if they had been committed; the matcher stays where it was."""
    params = StructuredOutputsParams(regex="[ab]c[12]+")
    encode = lambda text: [token for char in text for token in compiler._text.encode(char)]
    for drafts in ("ac1", "a1c", "bc2222", "2"):
        constraint = compiler.start(params, [END])
        masks = allowed(constraint, encode(drafts))
        assert allowed(constraint)[0] == masks[0]
        for index, token in enumerate(encode(drafts)):
            assert allowed(constraint)[0] == masks[index]
            if token not in masks[index]:
                break
            constraint.advance(token)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"json": {"type": "text"}}, "Invalid type: text"),
        ({"json": {"not": {"type": "string"}}}, "Unimplemented keys"),
        ({"json": {"type": "string", "format": "colour"}}, "Unknown format: colour"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
        ({"json": {"$ref": "#/$defs/none"}}, "none"),
        ({"json": "{"}, "it must be JSON"),
        ({"json": "[" * 50_000}, "it must be JSON"),
        ({"json": "[1]"}, "a JSON object"),
        ({"grammar": "start: other"}, "other"),
        (
            {"json": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(4)]} for i in range(9)]}},
            "large",
        ),
        ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "structures"),
        ({"structural_tag": {"structures": [{"begin": "a", "end": "", "schema": {}}], "triggers": ["<"]}}, "begins"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(form, words):
    with pytest.raises(ValueError, match="structured_outputs") as error:
        GrammarCompiler(byte_tokenizer(VOCAB), VOCAB).compile(StructuredOutputsParams(**form))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["a"]}, "exactly one"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"choice": ["\ud800"]}, "choice"),
        ({"regex": ""}, "regex"),
        ({"regex": 1}, "regex"),
        ({"json": 1}, "json"),
        ({"json": {"const": {1, 2}}}, "json"),
        ({"regex": "a" * (MAX_LENGTH + 1)}, f"{MAX_LENGTH + 1} characters"),
        ({"regexp": "a"}, "did you mean 'regex'"),
        ({"json_object": "yes"}, "json_object"),
        ({"json_object": True, "disable_any_whitespace": 1}, "disable_any_whitespace"),
    ],
    ids=str,
)
def test_wrong_fields(fields, words):
    with pytest.raises(ValueError, match=r"structured_outputs") as error:
        StructuredOutputsParams.of(fields)
    assert words in str(error.value)


def write(compiler: GrammarCompiler, params: dict, text: str) -> bool | None:
    """Whether the output may end after a text; None if the text cannot be written."""
    constraint = compiler.start(StructuredOutputsParams(**params), [END])
    for token in (compiler._text.encode(char)[0] for char in text):
        if token not in allowed(constraint)[0]:
            return None
        constraint.advance(token)
    return constraint.matcher.is_accepting()


def test_options_of_json():
    compiler = GrammarCompiler(byte_tokenizer(VOCAB), VOCAB)
    schema = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    assert write(compiler, schema, '{"a":\n  1, "b": 2}')
    assert write(compiler, schema | {"disable_any_whitespace": True}, '{"a": 1}') is None
    assert write(compiler, schema | {"disable_any_whitespace": True}, '{"a":1}')
    assert write(compiler, schema | {"whitespace_pattern": "[ ]"}, '{"a": 1}')
    assert write(compiler, schema | {"whitespace_pattern": "[ ]"}, '{"a":  1}') is None
    assert write(compiler, schema, '{"a":' + " " * 33) is None
    assert write(compiler, schema | {"disable_additional_properties": True}, '{"b') is None
    assert write(compiler, {"json_object": True}, '{"a": [1, {"b": null}]}')
    assert write(compiler, {"json_object": True}, "[") is None


def test_structural_tags():
    compiler = GrammarCompiler(byte_tokenizer(VOCAB), VOCAB)
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    structures = [{"begin": f"<f={name}>", "schema": schema, "end": "</f>"} for name in "ab"]
    form = {"structural_tag": {"structures": structures, "triggers": ["<f="]}}
    assert write(compiler, form, "free <text>")
    assert write(compiler, form, 'so <f=a>{"x": 1}</f> and <f=b>{"x": 2}</f>.')
    assert write(compiler, form, "so <f=a") is False
    assert write(compiler, form, "so <f=c") is None
    assert write(compiler, form, "so <f=a>[") is None
    special = {"structures": [{"begin": "<s>", "schema": schema, "end": ""}], "triggers": ["<s>"]}
    constraint = compiler.start(StructuredOutputsParams(structural_tag=special), [END])
    [token] = [compiler._text.special_tokens["<s>"]]
    assert token in allowed(constraint)[0]
    constraint.advance(token)
    assert {compiler._text.token_text(token) for token in allowed(constraint)[0]} <= {"{", " ", "\n", "\r", "\t"}


def test_compiled_grammars_are_kept_and_the_compiler_travels():
    compiler = GrammarCompiler(byte_tokenizer(VOCAB), VOCAB)
    params = StructuredOutputsParams(regex="ab")
    assert compiler.compile(params) is compiler.compile(StructuredOutputsParams(regex="ab"))
    one, other = compiler.start(params, [END]), compiler.start(params, [END])
    one.advance(compiler._text.encode("a")[0])
    assert allowed(one) != allowed(other)
    for index in range(200):
        compiler.compile(StructuredOutputsParams(choice=[f"{index}"]))
    assert len(compiler._compiled) == 128
    with pytest.raises(ValueError, match="structured_outputs"):
        compiler.compile(StructuredOutputsParams(regex="("))
    travelled = pickle.loads(pickle.dumps(compiler))
    assert allowed(travelled.start(params, [END])) == allowed(compiler.start(params, [END]))
