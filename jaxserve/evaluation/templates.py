"""Jinja templates over the names of a data line: prompts, choices, targets. An unknown name is an error."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, no_type_check

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import SandboxedEnvironment


@cache
def _environment() -> SandboxedEnvironment:
    return SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


@no_type_check
def compiled_template(text: str, field: str) -> Template:
    """The template; ValueError, naming `field`, for what is none."""
    if not isinstance(text, str):
        raise ValueError(f"{field}={text!r}: {field} must be a template (a text)")
    return _compile(text, field)


@cache
def _compile(text: str, field: str) -> Template:
    try:
        return _environment().from_string(text)
    except TemplateError as error:
        raise ValueError(f"{field}: line {getattr(error, 'lineno', 1)} of the template: {error}") from None


@no_type_check
def compiled_choices(choices: str | Sequence[str]) -> None:
    """Raises ValueError unless `choices` are templates or an expression."""
    if isinstance(choices, str):
        _expression(choices)
        return
    if not isinstance(choices, list | tuple) or len(choices) < 2:
        raise ValueError(f"choices={choices!r}: choices must be two templates or more, or an expression for a list")
    for choice in choices:
        compiled_template(choice, "choices")


@cache
def _expression(text: str):
    try:
        return _environment().compile_expression(text, undefined_to_none=False)
    except TemplateError as error:
        raise ValueError(f"choices: {error}") from None


@no_type_check
def render(text: str, field: str, values: Mapping[str, Any]) -> str:
    """The template filled in. ValueError, naming `field` and the names that there are, where it fails."""
    with _named(field, values):
        return compiled_template(text, field).render(values)


@no_type_check
def render_choices(choices: str | Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """The texts of the choices: at least two, none of them empty."""
    with _named("choices", values):
        if isinstance(choices, str):
            found = _expression(choices)(**values)
            found = list(found) if isinstance(found, list | tuple) else found
            str(found)  # an undefined name raises here
        else:
            found = [compiled_template(choice, "choices").render(values) for choice in choices]
    if not isinstance(found, list) or len(found) < 2 or not all(isinstance(text, str) and text for text in found):
        raise ValueError(f"choices={found!r}: choices must be two texts or more, none of them empty")
    return found


class _named:
    """Makes a ValueError that names the field of whatever a template raises: it is a program."""

    def __init__(self, field: str, values: Mapping[str, Any]):
        self._field, self._values = field, values

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, Exception):
            names = ", ".join(map(str, self._values))
            raise ValueError(f"{self._field}: {error} (the line has {names})") from None
