"""Stop strings in a text that arrives in pieces: what may still become one is held back."""

from collections.abc import Sequence
from typing import NamedTuple


class Certain(NamedTuple):
    """Text that no later piece can take back, and the stop string that ended it (None: it goes on)."""

    text: str
    stop: str | None


def held_back(text: str, markers: Sequence[str]) -> int:
    """The length of the longest end of a text that begins one of the markers, and is not all of it."""
    longest = max((len(marker) - 1 for marker in markers), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        end = text[len(text) - length :]
        if any(marker.startswith(end) for marker in markers):
            return length
    return 0


class StopStrings:
    """Finds the stop string that is complete first, the longest of those that end together.

    The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        """`include`: the text ends with the stop string instead of before it."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> Certain:
        """Take the next piece. `may_stop=False`: no stop string that ends within it counts (min_tokens)."""
        barrier = 0 if may_stop else len(self._held) + len(text)
        return self._take(self._held + text, max(barrier, len(self._held)))

    def flush(self) -> str:
        """The text that was held back, if none of it became a stop string."""
        held, self._held = self._held, ""
        return held

    def _take(self, text: str, seen: int) -> Certain:
        """`seen`: stop strings that end at or before this place do not count."""
        ends = []
        for stop in self._stops:
            start = text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                ends.append((start + len(stop), start, stop))
        if ends:
            end, start, stop = min(ends)
            self._held = ""
            return Certain(text[: end if self._include else start], stop)
        keep = held_back(text, self._stops)
        self._held = text[len(text) - keep :]
        return Certain(text[: len(text) - keep], None)
