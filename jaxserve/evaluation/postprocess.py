"""What finds the answer in a generated text: a regular expression, a number, a choice's letter, a field of JSON."""

import json
import re
from dataclasses import dataclass
from typing import Any, no_type_check

from jaxserve.validation import require

KINDS = ("none", "regex", "number", "choice", "json")
TAKES = ("first", "last")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\$?\d[\d,]*(?:\.\d+)?|(?<![\w.])[-+]?\$?\.\d+")


@no_type_check
@dataclass(frozen=True)
class Postprocess:
    """One way to find an answer. `apply` returns None where there is none.

    kind: `regex` takes what `pattern`'s first group (or all of it) matches; `number` a number, written plainly
        ("$1,200.50" becomes "1200.5"); `choice` a letter among `letters` that stands alone; `json` the value at
        `path` of the first JSON object in the text; `none` the text without white space around it.
    take: the `first` or the `last` match; None takes the last number, the last letter after "answer", and else the
        first.
    """

    kind: str = "none"
    pattern: str = ""
    letters: str = "ABCD"
    path: str = ""
    take: str | None = None

    def __post_init__(self):
        require(self.kind in KINDS, "postprocess", self.kind, f"one of {', '.join(KINDS)}")
        require(self.take in (None, *TAKES), "postprocess.take", self.take, "first or last")
        if self.kind == "regex":
            valid = isinstance(self.pattern, str) and self.pattern != ""
            require(valid, "postprocess.regex", self.pattern, "a pattern")
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(f"postprocess: regex={self.pattern!r}: {error}") from None
        valid = isinstance(self.letters, str) and self.letters.isalpha()
        require(valid, "postprocess.choice", self.letters, "the letters of the choices, like ABCD")
        require(isinstance(self.path, str), "postprocess.json", self.path, "a path like answer.value")

    @classmethod
    def parse(cls, given: Any) -> "Postprocess":
        """From a job: None, a kind, or {kind: its pattern, letters or path, take: first or last}."""
        if given is None or isinstance(given, str):
            return cls(given or "none")
        valid = isinstance(given, dict) and len(given.keys() - {"take"}) == 1
        require(valid, "postprocess", given, "a kind, or {kind: what belongs to it}")
        [kind] = given.keys() - {"take"}
        names = {"regex": "pattern", "choice": "letters", "json": "path"}
        require(kind in KINDS, "postprocess", kind, f"one of {', '.join(KINDS)}")
        more = {names[kind]: given[kind]} if kind in names and given[kind] is not None else {}
        return cls(kind, **more, take=given.get("take"))

    def apply(self, text: str) -> str | None:
        match self.kind:
            case "regex":
                return self._taken([m[1] if m.re.groups else m[0] for m in re.finditer(self.pattern, text)], "first")
            case "number":
                return plain_number(self._taken(_NUMBER.findall(text), "last"))
            case "choice":
                return self._choice(text)
            case "json":
                return _json_value(text, self.path)
        return text.strip()

    def _taken(self, matches: list[str | None], default: str) -> str | None:
        matches = [found for found in matches if found is not None]
        if not matches:
            return None
        return matches[0] if (self.take or default) == "first" else matches[-1]

    def _choice(self, text: str) -> str | None:
        """A letter in parentheses or after "answer" counts before one that merely stands alone."""
        letters = f"[{re.escape(self.letters)}]"
        for pattern in (rf"(?i:answer)\W+(?:(?i:is)\W+)?\(?({letters})\b", rf"\(({letters})\)", rf"\b({letters})\b"):
            found = re.findall(pattern, text)
            if found:
                return self._taken(found, "last" if pattern.startswith("(?i") else "first")
        return None


def plain_number(text: str | None) -> str | None:
    """A number without currency, thousands' commas, a plus or zeros at the end; None for what is none."""
    if text is None:
        return None
    text = text.replace(",", "").replace("$", "").lstrip("+")
    if not re.fullmatch(r"-?(\d+\.?\d*|\.\d+)", text):
        return None
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
    digits = digits.lstrip("0") or "0"
    digits = f"0{digits}" if digits.startswith(".") else digits
    return digits if digits == "0" else sign + digits


def _json_value(text: str, path: str) -> str | None:
    """The value at a dotted path of the first JSON object (or list) in the text, as text."""
    decoder = json.JSONDecoder()
    for start in (place for place, character in enumerate(text) if character in "{["):
        try:
            value, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        for part in path.split(".") if path else ():
            if isinstance(value, list) and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
            elif isinstance(value, dict) and part in value:
                value = value[part]
            else:
                return None
        return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
    return None
