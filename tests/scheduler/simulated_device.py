"""A device made of Python lists: the pages hold the history that their keys and values stand for.

Position j of a request reads right if the page place holds `mark(history[:j + 1])`, the hash of exactly the
tokens that the real keys and values would depend on, and the version of the weights. So every wrong page, lost copy,
stale hash or race shows as a wrong mark, whatever the schedule. The sampled token is a function of the whole
history: a request's output must be `expected_output`, however it was scheduled.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.cache.block_pool import BlockPool
from jaxserve.request import Request, RequestState
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.buckets import Buckets
from jaxserve.scheduler.policies import FirstComeFirstServed
from jaxserve.scheduler.scheduler import Scheduler, StepPlan

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


class SimulatedDevice:
    def __init__(self, num_pages: int, page_size: int, num_slots: int, max_len: int):
        self.page_size = page_size
        self.pages = [[0] * page_size for _ in range(num_pages)]
        self.slots: list[Slot | None] = [None] * num_slots
        self.max_len = max_len
        self.version = 0  # of the weights

    def run(self, plan: StepPlan) -> list[int | None]:
        """The sampled token of each entry, None where it does not sample. Checks everything that is read."""
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
        # Like the device: all writes of a step come before its reads.
        for entry in plan.entries:
            self._write(self.slots[entry.slot], entry.start, entry.count)
        return [self._read(self.slots[entry.slot], entry.sample, entry.request.stale) for entry in plan.entries]

    def _write(self, slot: Slot, start: int, count: int) -> None:
        assert slot.num_computed == start, "the host and the device disagree about a length"
        for position in range(start, start + count):
            assert slot.history[position] >= 0, "a token is computed before it exists"
            if position >= slot.write_start:
                page, offset = divmod(position, self.page_size)
                self.pages[slot.table[page]][offset] = mark(tuple(slot.history[: position + 1]), self.version)
        slot.num_computed += count

    def _read(self, slot: Slot, sample: bool, stale: bool) -> int | None:
        versions = range(self.version + 1) if stale else [self.version]
        for position in range(slot.num_computed):
            page, offset = divmod(position, self.page_size)
            found = self.pages[slot.table[page]][offset]
            right = {mark(tuple(slot.history[: position + 1]), version) for version in versions}
            assert found in right, f"wrong keys and values at position {position}"
        if not sample:
            return None
        token = next_token(tuple(slot.history[: slot.num_computed]), slot.seed)
        slot.history[slot.num_computed] = token
        return token


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
    ):
        self.max_len = num_pages * page_size
        self.scheduler = scheduler_class(
            BlockPool(num_pages, enable_prefix_caching=caching),
            page_size=page_size,
            buckets=Buckets.make(budget, num_slots),
            max_num_batched_tokens=budget,
            max_num_seqs=num_slots,
            policy=policy,
        )
        self.clock = clock
        self.device = SimulatedDevice(num_pages, page_size, num_slots, self.max_len)
        self.overlap = overlap
        self.in_flight: tuple[StepPlan, list[int | None]] | None = None
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

    def _complete(self, arrived: tuple[StepPlan, list[int | None]] | None) -> None:
        if arrived is not None:
            for entry, token in zip(arrived[0].entries, arrived[1], strict=True):
                self.scheduler.complete(entry, token, finite=True)
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
