"""In which order requests are served. One policy today; knows no JAX."""

from bisect import insort
from collections.abc import Iterator

from jaxserve.request import Request


class WaitingQueue:
    """Requests waiting to be admitted: first come first served within a priority.

    A preempted request keeps its arrival number, so it returns in front of everybody who came after it.
    """

    def __init__(self):
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=lambda r: r.order)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
