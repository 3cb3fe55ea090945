"""How long steps took, as far as the host can tell. Knows no JAX."""

from time import perf_counter


class StepTimer:
    """Times steps of an engine that dispatches one before it takes in the one before it.

    A step runs from its dispatch, or the end of the one before it, until its results arrive. The host sees that only if
    it waits for them: the last step of some work lies there until there is more, and then tells nothing.
    """

    def __init__(self):
        self._last_arrival = self._entered_at = self._left_at = 0.0

    def enter(self) -> None:
        """The engine is asked for a step."""
        self._entered_at = perf_counter()

    def leave(self) -> None:
        """It has answered."""
        self._left_at = perf_counter()

    def arrived(self, dispatched_at: float) -> float | None:
        """Seconds of the step that has just arrived; None if for most of them nobody asked for it."""
        started = max(dispatched_at, self._last_arrival)
        self._last_arrival = perf_counter()
        seconds, alone = self._last_arrival - started, self._entered_at - max(self._left_at, started)
        return seconds if alone < seconds / 2 else None
