"""A device made of Python lists: the pages hold the history that their keys and values stand for.

Position j of a request reads right if the page place holds `mark(history[:j + 1])`, the hash of exactly the
tokens that the real keys and values would depend on, and the version of the weights. So every wrong page, lost copy,
stale hash or race shows as a wrong mark, whatever the schedule. The sampled token is a function of the whole
history: a request's output must be `expected_output`, however it was scheduled.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.cache.block_pool import BlockPool
from jaxserve.request import Request, RequestState
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.buckets import Buckets
from jaxserve.scheduler.plan import PlanEntry, StepPlan
from jaxserve.scheduler.policies import FirstComeFirstServed
from jaxserve.scheduler.scheduler import Scheduler

VOCAB = 7  # small, so that prompts share prefixes
EOS = 6


def mark(history: tuple[int, ...], version: int) -> int:
    return hash(("kv", history, version))


def next_token(history: tuple[int, ...], seed: int) -> int:
    return hash((seed, history)) % VOCAB


def expected_output(prompt: list[int], seed: int, max_total_tokens: int, eos: bool = True) -> list[int]:
    history = list(prompt)
    while len(history) < max_total_tokens:
        history.append(next_token(tuple(history), seed))
        if eos and history[-1] == EOS:
            break
    return history[len(prompt) :]


@dataclass
class Slot:
    history: list[int]
    num_computed: int
    write_start: int
    table: list[int]
    seed: int
    drafts: int = 0


class RandomDrafts:
    """Chooses lengths at random, and proposes tokens of which some are right, from a seed."""

    def __init__(self, seed: int, longest: int):
        self._source = random.Random(seed)
        self._longest = longest

    def choose(self, decoding: Sequence[Request], room: int) -> list[int]:
        lengths = []
        for _ in decoding:
            lengths.append(min(self._source.randint(0, self._longest), room))
            room -= lengths[-1]
        return lengths

    def propose(self, history: tuple[int, ...], seed: int, length: int) -> list[int]:
        """At most `length` tokens after a history."""
        proposed: list[int] = []
        for _ in range(self._source.choice([0, length, length])):
            right = next_token((*history, *proposed), seed)
            proposed.append(right if self._source.random() < 0.7 else self._source.randrange(VOCAB))
        return proposed


class SimulatedDevice:
    def __init__(
        self, num_pages: int, page_size: int, num_slots: int, max_len: int, drafts: RandomDrafts | None = None
    ):
        self.page_size = page_size
        self.drafts = drafts
        self.pages = [[0] * page_size for _ in range(num_pages)]
        self.slots: list[Slot | None] = [None] * num_slots
        self.max_len = max_len
        self.version = 0  # of the weights

    def run(self, plan: StepPlan) -> list[list[int]]:
        """The sampled tokens of each entry, none where it does not sample. Checks everything that is read."""
        for admission in plan.admissions:
            room = self.max_len + 1 - len(admission.token_ids)
            self.slots[admission.slot] = Slot(
                [*admission.token_ids, *[-1] * room],
                admission.num_computed,
                admission.write_start,
                [*admission.pages, *[-1] * (self.max_len // self.page_size + 1 - len(admission.pages))],
                admission.request.seed,
            )
        for source, target in plan.copies:
            self.pages[target] = list(self.pages[source])
        for slot, index, page in plan.new_pages:
            self.slots[slot].table[index] = page
        for entry in plan.entries:
            self._propose(self.slots[entry.slot], entry)
        # Like the device: all writes of a step come before its reads.
        for entry in plan.entries:
            self._write(self.slots[entry.slot], entry)
        return [self._read(self.slots[entry.slot], entry) for entry in plan.entries]

    def _propose(self, slot: Slot, entry: PlanEntry) -> None:
        slot.drafts = 0
        if entry.drafts:
            known = slot.num_computed + 1
            proposed = self.drafts.propose(tuple(slot.history[:known]), slot.seed, entry.drafts)
            slot.history[known : known + len(proposed)] = proposed
            slot.drafts = len(proposed)

    def _write(self, slot: Slot, entry: PlanEntry) -> None:
        start = slot.num_computed
        if self.drafts is None or entry.count > 1:
            assert start == entry.start, "the host and the device disagree about a length"
        assert start >= entry.start, "the device knows less than the host"
        for position in range(start, start + entry.count + slot.drafts):
            assert slot.history[position] >= 0, "a token is computed before it exists"
            if position >= slot.write_start:
                page, offset = divmod(position, self.page_size)
                assert slot.table[page] >= 0, "a position is written before it has a page"
                self.pages[slot.table[page]][offset] = mark(tuple(slot.history[: position + 1]), self.version)
        slot.num_computed += entry.count

    def _read(self, slot: Slot, entry: PlanEntry) -> list[int]:
        self._check(slot, entry.request.stale)
        sampled: list[int] = []
        if entry.sample:
            sampled.append(next_token(tuple(slot.history[: slot.num_computed]), slot.seed))
            for _ in range(slot.drafts):
                if slot.history[slot.num_computed] != sampled[-1]:
                    break
                slot.num_computed += 1
                sampled.append(next_token(tuple(slot.history[: slot.num_computed]), slot.seed))
            self._check(slot, entry.request.stale)
            slot.history[slot.num_computed] = sampled[-1]
        return sampled

    def _check(self, slot: Slot, stale: bool) -> None:
        """The keys and values before `num_computed` are those of its tokens."""
        versions = range(self.version + 1) if stale else [self.version]
        for position in range(slot.num_computed):
            page, offset = divmod(position, self.page_size)
            found = self.pages[slot.table[page]][offset]
            right = {mark(tuple(slot.history[: position + 1]), version) for version in versions}
            assert found in right, f"wrong keys and values at position {position}"


class Simulation:
    """A scheduler over a simulated device, with or without a step in flight."""

    def __init__(
        self,
        *,
        num_pages: int = 16,
        page_size: int = 4,
        num_slots: int = 4,
        budget: int = 8,
        overlap: bool = True,
        caching: bool = True,
        policy: FirstComeFirstServed | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        scheduler_class: type[Scheduler] = Scheduler,
        drafts: RandomDrafts | None = None,
    ):
        self.max_len = num_pages * page_size
        self.scheduler = scheduler_class(
            BlockPool(num_pages, enable_prefix_caching=caching),
            page_size=page_size,
            buckets=Buckets.make(budget, num_slots),
            max_num_batched_tokens=budget,
            max_num_seqs=num_slots,
            policy=policy,
            draft_lengths=drafts,
        )
        self.clock = clock
        self.device = SimulatedDevice(num_pages, page_size, num_slots, self.max_len, drafts)
        self.overlap = overlap
        self.in_flight: tuple[StepPlan, list[list[int]]] | None = None
        self.requests: list[Request] = []
        self.steps = 0

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        n: int = 1,
        priority: int = 0,
        tenant: str = "",
        eos: bool = True,
    ) -> list[Request]:
        source = None
        for index in range(n):
            request = Request(
                request_id=str(len(self.requests)),
                index=index,
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=max_tokens),
                seed=len(self.requests),
                arrival=len(self.requests),
                max_total_tokens=min(len(prompt) + max_tokens, self.max_len),
                stop_token_ids=frozenset({EOS} if eos else ()),
                priority=priority,
                tenant=tenant,
                fork_of=source,
                arrival_time=self.clock(),
            )
            source = source or request
            self.requests.append(request)
            self.scheduler.add(request)
        return self.requests[-n:]

    def step(self) -> StepPlan:
        self.scheduler.now = self.clock()
        plan = self.scheduler.schedule()
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len({entry.request for entry in plan.entries}) == len(plan.entries)
        dispatched = (plan, self.device.run(plan)) if plan else None
        arrived, self.in_flight = (self.in_flight, dispatched) if self.overlap else (dispatched, None)
        assert plan or arrived or not self.scheduler.has_unfinished(), "nothing runs and nothing is in flight"
        self._complete(arrived)
        self.steps += 1
        return plan

    def _complete(self, arrived: tuple[StepPlan, list[list[int]]] | None) -> None:
        if arrived is not None:
            for entry, tokens in zip(arrived[0].entries, arrived[1], strict=True):
                self.scheduler.complete(entry, tokens, finite=True)
        self.scheduler.check_integrity()

    def replace_weights(self, *, recompute: bool) -> None:
        """As the engine does: the step in flight comes first."""
        arrived, self.in_flight = self.in_flight, None
        self._complete(arrived)
        self.device.version += 1
        running = list(self.scheduler.running)
        self.scheduler.weights_changed(recompute=recompute)
        self.scheduler.check_integrity()
        kept = [request for request in running if request.state is RequestState.RUNNING]
        assert kept == ([] if recompute else [request for request in running if request.output_token_ids])

    def run(self, limit: int = 5000) -> None:
        while self.scheduler.has_unfinished():
            assert self.steps < limit, "requests do not finish"
            self.step()

    def check_outputs(self, aborted: set[Request] = frozenset()) -> None:
        """Every request that ran to its end gave what its history demands; nobody owns a page."""
        for request in self.requests:
            eos = bool(request.stop_token_ids)
            expected = expected_output(request.prompt_token_ids, request.seed, request.max_total_tokens, eos)
            if request in aborted:
                assert request.output_token_ids == expected[: len(request.output_token_ids)]
            else:
                assert request.state is RequestState.FINISHED
                assert request.output_token_ids == expected
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_pages
