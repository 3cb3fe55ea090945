"""What form an output must have, as a user says it. A leaf: knows neither a tokenizer nor the compiler of grammars."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, no_type_check

from jaxserve.validation import check_names, lone_surrogate, require

MAX_LENGTH = 200_000  # characters of a schema, a grammar, or all choices together
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@no_type_check  # it checks itself: the tests' type checker would come first with another error
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an output, with vLLM's names; exactly one of the first six is given.

    What cannot be honoured (a keyword of JSON Schema that the compiler does not know, say) is a ValueError with the
    compiler's words where the request is checked, never an output of another form.

    Attributes:
        json: a JSON schema, as a dict or as JSON text.
        regex: what the whole output must match; syntax of Rust's `regex` crate, without look-around.
        choice: the texts of which the output is one.
        grammar: a context-free grammar in Lark's syntax or in llama.cpp's GBNF.
        json_object: True for any JSON object.
        structural_tag: free text in which a trigger begins a part of a fixed form: `{"structures": [{"begin", "schema",
            "end"}, ...], "triggers": [...]}`, as a dict or as JSON text.
        disable_any_whitespace: JSON is written without optional whitespace.
        disable_additional_properties: objects have no properties but those that their schemas name.
        whitespace_pattern: a regular expression for the optional whitespace of JSON; by default at most 32 characters.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None  # lists are taken too
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self):
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        require(len(given) == 1, "structured_outputs", given, f"given exactly one of {', '.join(CONSTRAINTS)}")
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                try:
                    value = json.dumps(value, ensure_ascii=False)
                except (TypeError, ValueError, RecursionError) as error:
                    raise ValueError(f"structured_outputs.{name}: it must be what JSON can hold: {error}") from None
                object.__setattr__(self, name, value)
            self._check_text(name, "a dict or JSON text")
        for name in ("regex", "grammar", "whitespace_pattern"):
            self._check_text(name, "a text that is not empty")
        self._check_choice()
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            require(isinstance(getattr(self, name), bool), f"structured_outputs.{name}", getattr(self, name), "a bool")
        valid = self.json_object in (None, True, False)
        require(valid, "structured_outputs.json_object", self.json_object, "True or left out")

    @classmethod
    @no_type_check
    def of(cls, value: "StructuredOutputsParams | Mapping[str, Any] | None") -> "StructuredOutputsParams | None":
        """From what a user gave; a dict may come from JSON."""
        if value is None or isinstance(value, cls):
            return value
        require(isinstance(value, Mapping), "structured_outputs", value, "a StructuredOutputsParams or a dict")
        try:
            check_names(cls, value)
        except TypeError as error:
            raise ValueError(f"structured_outputs: {error}") from None
        return cls(**value)

    def _check_text(self, name: str, kind: str) -> None:
        value, field = getattr(self, name), f"structured_outputs.{name}"
        if value is not None:
            require(isinstance(value, str) and value != "" and lone_surrogate(value) is None, field, value, kind)
            if len(value) > MAX_LENGTH:
                raise ValueError(f"{field}: {len(value)} characters: must be at most {MAX_LENGTH}")

    def _check_choice(self) -> None:
        if self.choice is None:
            return
        field, choice = "structured_outputs.choice", self.choice
        valid = isinstance(choice, list | tuple) and len(choice) > 0 and all(isinstance(t, str) and t for t in choice)
        valid = valid and all(lone_surrogate(text) is None for text in choice)
        require(valid, field, choice, "a list or tuple of texts that are not empty")
        length = sum(map(len, choice))
        if length > MAX_LENGTH:
            raise ValueError(f"{field}: {length} characters: must be at most {MAX_LENGTH} together")
        object.__setattr__(self, "choice", tuple(choice))
