"""Checked reading of a `config.json`, and the errors that a checkpoint can cause. Knows no JAX."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.validation import nearest_name


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names file, field or tensor, value and rule."""


class UnsupportedModelError(CheckpointError):
    """A checkpoint is well formed and asks for something that this engine does not have."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`" (did you mean X?)"` where one of `known` is close to `name`, otherwise the empty string."""
    match = nearest_name(name, known)
    return f" (did you mean {match!r}?)" if match else ""


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The fields of one JSON object. A field in neither `values` nor `defaults` is required.

    `where` begins every message, e.g. `config.json` or `config.json: rope_scaling`.
    """

    values: Mapping[str, Any]
    where: str
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        if name in self.values:
            return self.values[name]
        if name in self.defaults:
            return self.defaults[name]
        raise CheckpointError(f"{self.where}: the field {name!r} is missing")

    def wrong(self, name: str, rule: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {name}={self.get(name)!r}, but it must be {rule}")

    def integer(self, name: str) -> int:
        """A positive integer."""
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, "a positive integer")
        return value

    def integer_or_none(self, name: str) -> int | None:
        return None if self.get(name) is None else self.integer(name)

    def number(self, name: str) -> float:
        """A positive, finite number."""
        value = self.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.wrong(name, "a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def per_layer(self, name: str, num_layers: int) -> list[Any]:
        """A list with an entry for each layer (more are allowed and dropped, as in transformers)."""
        value = self.get(name)
        if not isinstance(value, list) or len(value) < num_layers:
            raise self.wrong(name, f"a list with an entry for each of {num_layers} layers")
        return value[:num_layers]

    def token_ids(self, name: str) -> tuple[int, ...]:
        """No id (null), one, or a list of them."""
        value = self.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.wrong(name, "a token id, a list of token ids, or null")
        return tuple(ids)
