"""Who runs in the next step. Pure Python over requests and the block pool; knows no JAX.

There is no prefill phase and no decode phase: a plan says how many tokens of which request are computed.
Running requests get their next token first, then prompts fill the token budget in chunks, in the order of
the policy. When pages run out, the running request that is last in that order gives back its pages and is
recomputed later; so does one that is outranked by a request which lacks room.

The scheduler works one step ahead of the tokens: `schedule` counts the token that is still in flight as
existing, and `complete` is told one step later what it was. Four rules keep that safe:

1. A plan's entries hold the request objects themselves, never slots to look requests up by.
2. A preempted request is queued again only when its step in flight has arrived.
3. A page is hashed only when its token ids are on the host and its step has arrived without an error.
4. Every input row takes its token from the slot's history on the device, which `admit` fills with what the
   host knows and the head extends with what it samples.

With speculation a step yields one token or more, and how many the host learns one step later, too. Until then it
plans with both bounds: pages are reserved as if every draft were accepted, the rest counts as if none were.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from time import monotonic
from typing import Protocol, runtime_checkable

from jaxserve.cache.block_pool import BlockPool
from jaxserve.request import Request, RequestState
from jaxserve.scheduler.buckets import Buckets
from jaxserve.scheduler.held_pages import HeldPages
from jaxserve.scheduler.plan import Admission, PlanEntry, StepPlan
from jaxserve.scheduler.policies import FirstComeFirstServed, WaitingQueue


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start, in requests or tokens."""

    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


@runtime_checkable
class DraftLengths(Protocol):
    """Chooses how many draft tokens the decoding requests of a step get; see `speculative.length_control`."""

    def choose(self, decoding: Sequence[Request], room: int) -> Sequence[int]:
        """A length for each request, in sum at most `room`."""


class Scheduler:
    """Plans steps under a token budget, `max_num_seqs` slots and the pages of a block pool."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        page_size: int,
        buckets: Buckets,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        enable_chunked_prefill: bool = True,
        policy: FirstComeFirstServed | None = None,
        draft_lengths: DraftLengths | None = None,
        recomputes_last: bool = False,
    ):
        self.pool = pool
        self.policy = policy or FirstComeFirstServed()
        self.page_size = page_size
        self.buckets = buckets
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.enable_chunked_prefill = enable_chunked_prefill
        self.draft_lengths = draft_lengths
        self.recomputes_last = recomputes_last  # of the cached tokens: what follows needs its hidden state
        self.waiting = WaitingQueue(self.policy)
        self.running: list[Request] = []  # in the policy's order
        self.preempted: list[Request] = []  # waiting for their step in flight
        self.held = HeldPages(pool)
        self.stats = SchedulerStats()
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    # ---- requests come and go -------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self.held.expect(request)
        self.policy.joined(request)
        self.waiting.add(request)

    def has_unfinished(self) -> bool:
        return bool(self.running or self.preempted or len(self.waiting))

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it stands, and give back what it owns. Its step in flight is ignored."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self._give_back(request)
        elif request.state is RequestState.PREEMPTED:
            self.preempted.remove(request)
        elif request.state is RequestState.WAITING:
            self.waiting.remove(request)
            self.held.forked(request)
        if request.state is not RequestState.FINISHED:
            self.policy.left(request)
        request.state = RequestState.FINISHED

    def complete(self, entry: PlanEntry, tokens: Sequence[int], finite: bool) -> int:
        """The step of this entry has arrived. Returns how many of its tokens the request took.

        `tokens` are what was sampled, accepted drafts first: empty if the entry does not sample, -1 if no token was
        left to sample. A request that ended or was aborted in the meantime takes none, and nobody takes what follows
        a stop. A result that is not finite ends the request with an error: its pages are forgotten, so nobody reuses
        them.
        """
        request, _, _, count, sample, drafts, _ = entry
        request.steps_in_flight -= 1
        request.num_in_flight -= sample
        request.drafts_in_flight -= drafts
        state = request.state
        if state is RequestState.FINISHED:
            return 0
        if not finite or (tokens and tokens[0] < 0):
            self._fail(request, entry, finite)
            return 0
        taken = request.take_tokens(tokens)
        if request.only_scores and entry.start + count == request.num_prompt_tokens:
            request.finish_reason = "length"
        if state is RequestState.RUNNING:  # in the same admission: a preempted request waits for this step
            request.num_confirmed += count
            if drafts and len(tokens) > 1:
                accepted = len(tokens) - 1
                request.num_computed += accepted
                request.num_confirmed += accepted
                if self.policy.counts:
                    self.policy.computed(request, request.num_computed - accepted, request.num_computed)
            if request.num_confirmed >= (request.num_registered + 1) * self.page_size:
                self._register_pages(request)
        if request.finish_reason is not None:
            if request.num_following and state is RequestState.RUNNING:
                pages, request.pages = request.pages, []
                self.finish(request)
                self.held.hold(request, pages)
            else:
                self.finish(request)
        elif state is RequestState.PREEMPTED and request.steps_in_flight == 0:
            self.preempted.remove(request)
            request.state = RequestState.WAITING
            self.waiting.add(request)
        return taken

    def _fail(self, request: Request, entry: PlanEntry, finite: bool) -> None:
        """End a request with an error that says what was wrong with its step."""
        if finite:
            request.fail_without_token()
        else:
            request.fail_with_overflow(entry.start, entry.count)
            self.pool.forget(request.pages[entry.start // self.page_size :])
        self.finish(request)

    def weights_changed(self, *, recompute: bool) -> None:
        """No cached page is right any longer. To be called while no step is planned or in flight.

        Running requests give back their pages and are recomputed; without `recompute` those that have sampled a
        token go on over the keys and values that they have, which nobody else may share.
        """
        self.pool.drop_cache()
        while self.held.give_up():
            pass
        for request in (*self.running, *self.waiting):
            if request.needs_hidden_from is not None:  # one version scores or pools the whole prompt
                request.restart_prompt()
        for request in reversed(list(self.running)):
            if recompute or not request.output_token_ids:
                self._preempt(request)
            else:
                request.stale = True

    def _register_pages(self, request: Request) -> None:
        """Make the full pages findable that have become confirmed; registering twice changes nothing."""
        if not self.pool.enable_prefix_caching or request.stale:
            return
        full = min(request.num_confirmed, len(request.token_ids)) // self.page_size
        names = request.hashes(full, self.page_size)
        for page in range(request.num_registered, full):
            self.pool.register(request.pages[page], names[page])
        request.num_registered = full

    # ---- one step -------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step; empty if nothing can run before the step in flight has arrived."""
        plan = StepPlan()
        if self.policy.displaces:
            self._admit_who_outranks(plan)
        prefilling = self._plan_decodes(plan)
        self._plan_prefills(plan, prefilling)
        return plan

    def _plan_decodes(self, plan: StepPlan) -> list[Request]:
        """A token, and drafts, for every running request that has its prompt behind it. Returns those that have not."""
        decoding, prefilling = [], []
        for request in self.running:
            count = request.num_to_compute
            if count:
                (decoding if count == 1 else prefilling).append(request)
        drafts = self._choose_drafts(decoding, bool(prefilling)) if self.draft_lengths is not None else repeat(0)
        for request, length in zip(decoding, drafts, strict=False):
            # One of them may have had to give its pages to one before it.
            if request.state is RequestState.RUNNING and plan.num_tokens + length < self.max_num_batched_tokens:
                self._plan_tokens(plan, request, 1, 1, length)
        return prefilling

    def _choose_drafts(self, decoding: list[Request], prefilling: bool) -> list[int]:
        """Lengths that leave a row to every decoding request, and half of the others to prompts, if there are some."""
        room = self.max_num_batched_tokens - len(decoding)
        if prefilling or len(self.waiting):
            room //= 2
        lengths = []
        for request, length in zip(decoding, self.draft_lengths.choose(decoding, max(room, 0)), strict=True):
            lengths.append(min(length, request.most_drafts))
        return lengths

    def _plan_prefills(self, plan: StepPlan, prefilling: list[Request]) -> None:
        """Fill the budget with chunks of prompts, running ones first, then newly admitted ones."""
        prefilling = [request for request in prefilling if request.state is RequestState.RUNNING]
        demand = sum(request.num_to_compute for request in prefilling)
        decoding = plan.num_tokens
        budget = self.max_num_batched_tokens - decoding
        waiting = iter(self._admissible() if demand < budget and self._free_slots else ())
        while demand < budget and (request := self._next_waiting(waiting, plan, budget - demand)) is not None:
            demand += request.num_to_compute
            insort(prefilling, request, key=self.policy.order)
        if self.enable_chunked_prefill and decoding:  # a next step is due anyway: what is cut off rides along
            budget = min(budget, self.buckets.exact_fit(min(demand, budget) + decoding, decoding + 1) - decoding)
        for request in prefilling:
            if budget and request.state is RequestState.RUNNING:
                count = min(self.chunk_limit(request), budget)
                budget -= self._plan_tokens(plan, request, count, request.num_to_compute)

    def chunk_limit(self, request: Request) -> int:
        """The most tokens of a request in one step."""
        return request.num_to_compute

    def _plan_tokens(self, plan: StepPlan, request: Request, count: int, remaining: int, drafts: int = 0) -> int:
        """Plan `count` of a running request's `remaining` tokens, preempting others if it needs a page.

        Returns how many were planned: all or, where there is no page, none.
        """
        start = request.num_computed
        latest = start + request.drafts_in_flight
        end = latest + count + drafts
        if drafts and -(-end // self.page_size) - len(request.pages) > self.pool.num_free:
            end, drafts = end - drafts, 0  # nobody is preempted for drafts
        if end > request.writable and not self._own_pages(plan, request, end):
            return 0
        sample = count == remaining and not request.only_scores
        # Half the time of PlanEntry(...), which is a Python function; there is one a request and step.
        plan.add(tuple.__new__(PlanEntry, (request, request.slot, start, count, sample, drafts, latest)))
        request.num_computed = start + count
        request.num_in_flight += sample
        request.drafts_in_flight += drafts
        request.steps_in_flight += 1
        if self.policy.counts:
            self.policy.computed(request, start, start + count)
        return count

    # ---- pages ----------------------------------------------------------------------------------------

    def _own_pages(self, plan: StepPlan, request: Request, num_tokens: int) -> bool:
        """Make the pages of positions num_computed..num_tokens-1 exist and be writable by this request alone.

        Preempts from the end of the running order; False if the request itself had to go.
        """
        first_write = max(request.num_computed, request.write_start)
        needed = -(-num_tokens // self.page_size)
        written = range(
            first_write // self.page_size, min(needed, len(request.pages)) if first_write < num_tokens else 0
        )
        shared = [i for i in written if self.pool.references(request.pages[i]) > 1]
        while (pages := self.pool.allocate(len(shared) + max(needed - len(request.pages), 0))) is None:
            if self.held.give_up():
                shared = [i for i in shared if self.pool.references(request.pages[i]) > 1]
                continue
            victim = self.running[-1]
            if any(entry.request is victim for entry in plan.entries):
                return False  # nobody later is left: wait for a page
            self._preempt(victim)
            if victim is request:
                return False
            shared = [i for i in shared if self.pool.references(request.pages[i]) > 1]
        for index in shared:  # copy on write: branches share the prompt's last page until one of them writes to it
            page = pages.pop()
            plan.copies.append((request.pages[index], page))
            plan.new_pages.append((request.slot, index, page))
            self.pool.release([request.pages[index]])
            request.pages[index] = page
        # A branch that is left alone with a page may find it hashed with the tokens of a branch that is gone.
        self.pool.forget(request.pages[i] for i in written)
        for page in pages:
            plan.new_pages.append((request.slot, len(request.pages), page))
            request.pages.append(page)
        if first_write < num_tokens:  # the last page was written to, so it is this request's alone
            request.writable = needed * self.page_size
        return True

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages, request.writable = [], 0
        self._free_slots.append(request.slot)
        request.slot = -1

    def _preempt(self, request: Request) -> None:
        self.stats.num_preemptions += 1
        self.running.remove(request)
        self._give_back(request)
        request.num_computed = request.num_confirmed = request.write_start = 0
        if request.steps_in_flight:
            request.state = RequestState.PREEMPTED
            self.preempted.append(request)
        else:
            request.state = RequestState.WAITING
            self.waiting.add(request)

    # ---- admission ------------------------------------------------------------------------------------

    def _admissible(self) -> list[Request]:
        return list(self.policy.admissible(self.waiting))

    def _admit_who_outranks(self, plan: StepPlan) -> None:
        """Admit those who outrank a running request, in whose place if need be; before the step's first entry."""
        for request in self._admissible() if self.running else ():
            outranked = [other for other in self.running if self.policy.outranks(request, other)]
            if not outranked:
                return
            if request.fork_of is not None and self._still_prefilling(request.fork_of):
                continue
            order = self.policy.order(request)
            ahead = sum(r.num_to_compute for r in self.running if r.num_to_compute > 1 and self.policy.order(r) < order)
            if not self._admit_over(request, outranked, plan, ahead):
                return

    def _admit_over(self, request: Request, outranked: list[Request], plan: StepPlan, ahead: int) -> bool:
        """Admit a request, preempting `outranked` ones from the last on; nobody where that would not suffice.

        `ahead` tokens are to be computed before its own: where those fill the step, nobody is preempted for tokens.
        """
        while True:
            budget = self.max_num_batched_tokens - sum(r.num_to_compute == 1 for r in self.running) - ahead
            if budget > 0 and self._free_slots and self._admit(request, plan, budget):
                return True
            if not outranked or (budget <= 0 and ahead) or not self._would_fit(request, outranked):
                return False
            self._preempt(outranked.pop())

    def _would_fit(self, request: Request, victims: list[Request]) -> bool:
        """Whether the pages would suffice for a request if all these running ones gave back theirs."""
        held = Counter(page for victim in victims for page in victim.pages)
        freed = {page for page, readers in held.items() if readers == self.pool.references(page)}
        shared, _, _ = self._known_prefix(request)
        reused = self.pool.num_unowned(shared) + len(freed.intersection(shared))
        room = self.pool.num_free + len(freed) - reused - self._num_pages(request) + len(shared)
        return room >= self._reserve(len(self.running) - len(victims))

    def _num_pages(self, request: Request) -> int:
        """The pages of all known tokens."""
        return -(-len(request.token_ids) // self.page_size)

    @staticmethod
    def _reserve(running: int) -> int:
        """Pages left free by an admission beside so many others: each may need its next one at once.

        Itself included: it may need a copy of a shared page, or the page of its first new token.
        """
        return running + 1 if running else 0

    def _next_waiting(self, waiting: Iterator[Request], plan: StepPlan, budget: int) -> Request | None:
        """Admit the next waiting request that may start now, or None. Nobody overtakes one that lacks room."""
        for request in waiting:
            source = request.fork_of
            if source is not None and self._still_prefilling(source):
                continue  # its prompt is being computed: whoever comes next may use the budget
            if not self._free_slots or not self._admit(request, plan, budget):
                return None
            return request
        return None

    @staticmethod
    def _still_prefilling(source: Request) -> bool:
        if source.state is RequestState.RUNNING:
            return source.num_computed < source.num_prompt_tokens
        return source.state in (RequestState.WAITING, RequestState.PREEMPTED) and source.num_admissions == 0

    def _admit(self, request: Request, plan: StepPlan, budget: int) -> bool:
        """Reserve the pages of all known tokens and fill a slot, if there is room to go on for a while.

        Room means: after this admission every other running request can still get its next page, so a
        request is not resumed only to be preempted in the next step.
        """
        shared, num_computed, write_start = self._known_prefix(request)
        if not self.enable_chunked_prefill and len(request.token_ids) - num_computed > budget:
            return False
        needed = self._num_pages(request) - len(shared)
        room = self.pool.num_free - self.pool.num_unowned(shared) - needed
        if room < self._reserve(len(self.running)):
            return self.held.give_up() and self._admit(request, plan, budget)
        self.pool.share(shared)
        if request.fork_of is not None:
            request.fork_of.writable = 0  # it may share its last page now
            self.held.forked(request)
        self._start(request, plan, [*shared, *self.pool.allocate(needed)], num_computed, write_start)
        return True

    def _known_prefix(self, request: Request) -> tuple[list[int], int, int]:
        """(pages to share, tokens computed, first position to write). The last token is always computed."""
        num_tokens = len(request.token_ids)
        source = request.fork_of
        if source is not None and source.pages and not (request.num_admissions or source.stale):
            cached = source.num_prompt_tokens
            pages = source.pages[: -(-cached // self.page_size)]
        elif not self.pool.enable_prefix_caching:
            return [], 0, 0
        else:
            pages = self.pool.lookup(request.hashes(num_tokens // self.page_size, self.page_size))
            cached = len(pages) * self.page_size
        # Cached keys and values are shared, but hidden states are not kept.
        needed = request.needs_hidden_from
        known = max(cached - 1, 0) if self.recomputes_last else cached
        return pages, min(known, num_tokens - 1, num_tokens if needed is None else needed), cached

    def _start(self, request: Request, plan: StepPlan, pages: list[int], num_computed: int, write_start: int) -> None:
        self.waiting.remove(request)
        request.state = RequestState.RUNNING
        request.slot = self._free_slots.pop()
        request.pages = pages
        request.num_computed = request.num_confirmed = num_computed
        request.num_registered = 0
        request.stale = False
        request.write_start = write_start
        request.num_admissions += 1
        if request.num_admissions == 1:
            request.num_cached_tokens = num_computed
            request.scheduled_time = monotonic()
            if request.fork_of is None:
                self.stats.prefix_cache_queries += len(request.token_ids)
                self.stats.prefix_cache_hits += num_computed
        self.policy.admitted(request)
        insort(self.running, request, key=self.policy.order)
        plan.admissions.append(
            Admission(request, request.slot, list(request.token_ids), list(pages), num_computed, write_start)
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError unless pages and slots are accounted for."""
        self.pool.check_integrity([request.pages for request in (*self.running, *self.held.beams)])
        slots = sorted([*self._free_slots, *(request.slot for request in self.running)])
        if slots != list(range(self.max_num_seqs)):
            raise RuntimeError(f"slots are lost or doubled: {slots}")
