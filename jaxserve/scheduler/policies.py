"""In which order requests are served, and who may start. Knows no JAX.

fcfs       by arrival; a preempted request returns in front of everybody who came after it
priority   a lower number goes first, by arrival within one; who waits may take the place of who ranks lower
static     by arrival in batches: the next batch starts when the last request of this one has ended
"""

from bisect import insort
from collections.abc import Iterable, Iterator
from itertools import islice

from jaxserve.request import Request, RequestState


class FirstComeFirstServed:
    """By arrival. The base of the other policies. `displaces`: whether anybody ever outranks a running request."""

    displaces = False

    def order(self, request: Request) -> tuple[float, int]:
        """Who goes first: lower is earlier. Never changes, so queues stay sorted. The last is preempted first."""
        return 0.0, request.arrival

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Whether `waiting` must not wait for a slot, pages or tokens that `running` holds."""
        return False

    def admissible(self, waiting: "WaitingQueue") -> Iterable[Request]:
        """Who may be admitted now, in order."""
        return waiting


class Priority(FirstComeFirstServed):
    """Strict between priorities, by arrival within one.

    With `aging_s` a request gains one priority per so many seconds since it arrived (by a clock that all requests'
    `arrival_time` share). All age alike, so the order of any two never changes: a request goes before those of a
    priority better by k that arrive more than k * aging_s later. Nobody loses a place to a request that age has
    put behind, and age alone takes no running request's place: two requests cannot displace each other in turn.
    """

    displaces = True

    def __init__(self, aging_s: float | None = None):
        self.aging_s = aging_s

    def order(self, request: Request) -> tuple[float, int]:
        aged = request.arrival_time / self.aging_s if self.aging_s else 0.0
        return request.priority + aged, request.arrival

    def outranks(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority and self.order(waiting) < self.order(running)


class StaticBatches(FirstComeFirstServed):
    """Batches of `size` requests, for comparison: nobody joins before the whole batch has ended."""

    def __init__(self, size: int):
        self._size = size
        self._batch: set[Request] = set()

    def admissible(self, waiting: "WaitingQueue") -> Iterable[Request]:
        if all(request.state is RequestState.FINISHED for request in self._batch):
            self._batch = set(islice(waiting, self._size))
        return [request for request in waiting if request in self._batch]


def make_policy(name: str, *, max_num_seqs: int, priority_aging_s: float | None = None) -> FirstComeFirstServed:
    """The policy of an engine's options."""
    if name == "priority":
        return Priority(priority_aging_s)
    return StaticBatches(max_num_seqs) if name == "static" else FirstComeFirstServed()


class WaitingQueue:
    """Requests waiting to be admitted, in the policy's order."""

    def __init__(self, policy: FirstComeFirstServed):
        self._order = policy.order
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=self._order)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
