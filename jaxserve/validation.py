"""How a user's wrong name or value is refused: the field, the value and the rule, in one sentence."""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any


def require(condition: bool, field: str, value: object, rule: str) -> None:
    """Raises ValueError naming `field`, `value` and `rule` unless the condition holds."""
    if not condition:
        raise ValueError(f"{field}={value!r}: {field} must be {rule}")


def nearest_name(wrong: str, names: Iterable[str]) -> str | None:
    """The name most like `wrong`, or None where nothing comes near."""
    by_letters = {name.lower().replace("_", ""): name for name in names}
    letters = wrong.lower().replace("-", "").replace("_", "")
    matches = difflib.get_close_matches(letters, by_letters, n=1, cutoff=0.6)
    return by_letters[matches[0]] if matches else None


def check_names(cls: type, given: Mapping[str, Any]) -> None:
    """Raises TypeError for the first key of `given` that is no field of the dataclass `cls`."""
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    for wrong in given:
        if wrong not in names:
            nearest = nearest_name(str(wrong), names)
            hint = f"did you mean {nearest!r}?" if nearest else f"it has {', '.join(names)}"
            raise TypeError(f"{cls.__name__} has no field {wrong!r}: {hint}")


def is_integer(value: object) -> bool:
    """Whether the value is an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether the value is a finite int or float that is not a bool."""
    return is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def lone_surrogate(text: str) -> int | None:
    """Where the text holds half of a surrogate pair, which no encoding can write; None for valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
