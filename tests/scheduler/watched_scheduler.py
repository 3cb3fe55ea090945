"""A scheduler that checks its own order at every step against the policies' definitions, written down again here."""

from jaxserve.request import Request, RequestState
from jaxserve.scheduler.policies import Fair, FirstComeFirstServed, Priority, StaticBatches
from jaxserve.scheduler.scheduler import Scheduler


class WatchedScheduler(Scheduler):
    """`now` is the simulation's clock, for ageing."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.now = 0.0
        self.updating = False  # of the weights
        self.batch: set[Request] = set()  # of the static policy: who was admitted since the last batch ended
        self.invited: set[Request] = set()  # who waited first in line then

    def effective(self, request: Request) -> tuple[float, int]:
        """(priority after ageing, arrival): who is lower must be served first; under `fair` within a tenant."""
        if isinstance(self.policy, Fair):
            return request.priority, request.arrival
        if not isinstance(self.policy, Priority):
            return 0.0, request.arrival
        waited = self.now - request.arrival_time
        return request.priority - (waited / self.policy.aging_s if self.policy.aging_s else 0.0), request.arrival

    def schedule(self):
        due = self._must_start_now() if isinstance(self.policy, Priority) else None
        admissions = due.num_admissions if due else 0
        plan = super().schedule()
        if due is not None:
            assert due.num_admissions == admissions + 1, f"{due.request_id} waits behind running ones that it outranks"
        return plan

    def weights_changed(self, *, recompute):
        """Who has begun to answer may go on over old keys and values, whatever its place; all others start anew."""
        kept = [] if recompute else [request for request in self.running if request.output_token_ids]
        self.updating = True
        super().weights_changed(recompute=recompute)
        self.updating = False
        assert self.running == kept

    def _preempt(self, victim):
        """The last of all goes, or the last of those whom somebody who waits outranks."""
        if not self.updating:
            assert victim in self._last(), "not the last was preempted"
        super()._preempt(victim)

    def _last(self) -> list[Request]:
        if isinstance(self.policy, Fair):
            return [max(self.running, key=lambda request: (request.rank, request.arrival))]
        groups = [[r for r in self.running if self._outranks(waiting, r)] for waiting in self.waiting]
        return [max(group, key=self.effective) for group in (self.running, *groups) if group]

    def _must_start_now(self) -> Request | None:
        """Who waits first, if it outranks a running request and the room of all those it outranks would do for it."""
        waiting = [r for r in self.waiting if not (r.fork_of is not None and self._still_prefilling(r.fork_of))]
        first = min(waiting, key=self.effective, default=None)
        if first is None:
            return None
        outranked = {r for r in self.running if self._outranks(first, r)}
        kept = [r for r in self.running if r not in outranked]
        ahead = [r for r in kept if r.num_to_compute > 1 and self.effective(r) < self.effective(first)]
        tokens = sum(r.num_to_compute == 1 for r in kept)
        pages = {page for r in kept for page in r.pages}
        needed = -(-len(first.token_ids) // self.page_size) + (len(kept) + 1 if kept else 0)
        has_room = self.pool.num_pages - len(pages) >= needed and len(kept) < self.max_num_seqs
        return first if outranked and not ahead and tokens < self.max_num_batched_tokens and has_room else None

    def _outranks(self, waiting: Request, running: Request) -> bool:
        if not isinstance(self.policy, Priority):
            return False
        return waiting.priority < running.priority and self.effective(waiting) < self.effective(running)

    def _start(self, request, *arguments):
        self._check_turn(request)
        super()._start(request, *arguments)

    def _check_turn(self, request: Request) -> None:
        """Nobody who could start has a better place than the one who starts."""
        if isinstance(self.policy, StaticBatches):
            self._check_batch(request)
        for other in self.waiting:
            if isinstance(self.policy, StaticBatches) and other not in self.invited:
                continue
            if isinstance(self.policy, Fair) and other.tenant != request.tenant:
                continue  # whose turn it is among tenants: test_fair.py
            blocked = other.fork_of is not None and self._still_prefilling(other.fork_of)
            assert blocked or self.effective(other) >= self.effective(request), "somebody was overtaken"

    def _check_batch(self, request: Request) -> None:
        if all(member.state is RequestState.FINISHED for member in self.batch):
            self.batch = set()
            self.invited = set(sorted(self.waiting, key=lambda r: r.arrival)[: self.max_num_seqs])
        self.batch.add(request)
        assert request in self.invited, "somebody joined a batch that had begun"


def policies(num_slots: int) -> list[FirstComeFirstServed]:
    """One of each kind."""
    return [FirstComeFirstServed(), Priority(), Priority(aging_s=4.0), StaticBatches(num_slots), Fair()]
