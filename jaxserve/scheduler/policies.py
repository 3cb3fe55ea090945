"""In which order requests are served, and who may start. Knows no JAX.

fcfs       by arrival; a preempted request returns in front of everybody who came after it
priority   a lower number goes first, by arrival within one; who waits may take the place of who ranks lower
fair       each tenant its share of the tokens; within a tenant as priority, without taking places
static     by arrival in batches: the next batch starts when the last request of this one has ended
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from itertools import islice

from jaxserve.request import Request, RequestState


class FirstComeFirstServed:
    """By arrival. The base of the other policies.

    `displaces`: whether anybody ever outranks a running request. `counts`: whether it wants to hear of what is
    `computed`, for every token.
    """

    displaces = False
    counts = False

    def order(self, request: Request) -> tuple[float, int]:
        """Who goes first: lower is earlier. Never changes while a request waits or runs, so queues stay sorted.

        Of those who run the last is preempted first.
        """
        return 0.0, request.arrival

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Whether `waiting` must not wait for a slot, pages or tokens that `running` holds."""
        return False

    def admissible(self, waiting: "WaitingQueue") -> Iterable[Request]:
        """Who may be admitted now, in order."""
        return waiting

    def joined(self, request: Request) -> None:
        """A request has come."""

    def admitted(self, request: Request) -> None:
        """A request gets a slot; called before `order` sorts it among those who run."""

    def computed(self, request: Request, start: int, end: int) -> None:
        """Positions `start` to `end - 1` of a request are planned."""

    def left(self, request: Request) -> None:
        """A request has ended, for whatever reason."""


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


class Fair(FirstComeFirstServed):
    """Each tenant its share of the tokens, by a virtual token counter (Sheng et al., OSDI 2024, arXiv 2401.00588).

    A tenant's counter grows by 1 for each position of its prompts and by 2 for each of its outputs, when they are
    computed for the first time; what the prefix cache knows costs nothing. Who has the lowest counter is admitted
    next. A tenant that comes (back) starts no lower than those who are being served, so nobody saves up. Among those
    who run, the one whose tenant had the highest counter when it was admitted is preempted first. Within a tenant
    lower priorities go first.
    """

    counts = True
    PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0

    def __init__(self):
        self._counters: dict[str, float] = {}
        self._unfinished: Counter[str] = Counter()

    def order(self, request: Request) -> tuple[float, int]:
        return request.rank, request.arrival

    def joined(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self._unfinished:
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._lowest())
        self._unfinished[tenant] += 1

    def admitted(self, request: Request) -> None:
        request.rank = self._counters[request.tenant]

    def computed(self, request: Request, start: int, end: int) -> None:
        start = max(start, request.num_charged)
        if start < end:
            prompt = max(min(end, request.num_prompt_tokens) - start, 0)
            cost = self.PROMPT_WEIGHT * prompt + self.OUTPUT_WEIGHT * (end - start - prompt)
            self._counters[request.tenant] += cost
            request.num_charged = end

    def left(self, request: Request) -> None:
        tenant = request.tenant
        self._unfinished[tenant] -= 1
        if not self._unfinished[tenant]:
            del self._unfinished[tenant]
            # Whoever is not served and has no more than they have would start there in any case.
            lowest = self._lowest() if self._unfinished else float("inf")
            kept = {name: count for name, count in self._counters.items() if name in self._unfinished or count > lowest}
            self._counters = kept

    def admissible(self, waiting: "WaitingQueue") -> Iterable[Request]:
        """By turns, as if each prompt were computed at once."""
        queues: dict[str, list[Request]] = {}
        for request in waiting:
            queues.setdefault(request.tenant, []).append(request)
        turns = []
        for tenant, requests in queues.items():
            requests.sort(key=lambda request: (request.priority, request.arrival), reverse=True)
            turns.append((self._counters[tenant], requests[-1].arrival, tenant))
        heapify(turns)
        while turns:
            counter, _, tenant = turns[0]
            request = queues[tenant].pop()
            yield request
            if queues[tenant]:
                counter += self.PROMPT_WEIGHT * max(request.num_prompt_tokens - request.num_charged, 0)
                heapreplace(turns, (counter, queues[tenant][-1].arrival, tenant))
            else:
                heappop(turns)

    def _lowest(self) -> float:
        return min((self._counters[tenant] for tenant in self._unfinished), default=0.0)


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
    if name == "fair":
        return Fair()
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
