"""A long run of clients that come as in a trace, of which some hang up: nothing may be wrong, lost or left.

`jaxserve bench soak`.
"""

import asyncio
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.bench.client import Client, Outcome
from jaxserve.bench.workload import Item

PROBE = {"prompt": [11, 12, 13, 14, 15], "temperature": 0, "ignore_eos": True, "max_tokens": 24, "stream": True}
WARM_SHARE = 0.25  # of the time: what is held after it is what may be held
MEMORY_GROWTH = 0.02
SPARE_FILES = 4


@dataclass
class Soak:
    """What happened. `memory` (bytes) and `files` are the server's: when it was warm and at the end, both idle."""

    requests: int = 0
    left: int = 0
    output_tokens: int = 0
    probes: int = 0
    seconds: float = 0.0
    preemptions: int = 0
    memory: tuple[float, float] = (0.0, 0.0)
    files: tuple[float, float] = (0.0, 0.0)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        megabytes = [value / 2**20 for value in self.memory]
        lines = [
            f"{self.requests} requests in {self.seconds:.0f} s, {self.left} of them left by their clients; "
            f"{self.output_tokens / self.seconds:.1f} output tokens/s seen; {self.preemptions} preemptions; "
            f"{self.probes} probes",
            f"memory {megabytes[0]:.1f} MiB when warm, {megabytes[1]:.1f} MiB at the end; "
            f"files {self.files[0]:.0f} and {self.files[1]:.0f}",
        ]
        counted = Counter(self.problems).items()
        problems = [f"PROBLEM, {count} times: {problem}" for problem, count in counted] or ["no problem"]
        return "\n".join(lines + problems)


async def soak(
    base_url: str,
    work: Sequence[tuple[float, Item]],
    *,
    seconds: float,
    clients: int = 64,
    leaving: float = 0.1,
    probe_every: float = 5.0,
    seed: int = 0,
    api_key: str | None = None,
) -> Soak:
    """Run for so long; `work` are (seconds after the start, request), begun again when it is through.

    `clients` are under way at most; a share of `leaving` hangs up at a random moment. Every `probe_every` seconds a
    probe must get the answer that it got in the beginning. Then the server must be idle and hold no more than it did
    when it was warm.
    """
    run = _Run(Client(base_url, "/v1/completions", api_key=api_key), base_url, random.Random(seed), Soak(), probe_every)
    await run.probe()
    started = time.perf_counter()
    for part in (WARM_SHARE, 1 - WARM_SHARE):
        await run.load(work, seconds * part, clients, leaving)
        await run.settle(warm=part == WARM_SHARE)
    run.report.seconds = time.perf_counter() - started
    run.judge()
    return run.report


@dataclass
class _Run:
    client: Client
    base_url: str
    source: random.Random
    report: Soak
    probe_every: float
    expected: str | None = None
    cursor: int = 0
    typical: float = 1.0  # seconds that a request takes

    async def load(self, work: Sequence[tuple[float, Item]], seconds: float, clients: int, leaving: float) -> None:
        places, began, offset = asyncio.Semaphore(clients), time.perf_counter(), work[self.cursor % len(work)][0]
        tasks: set[asyncio.Task] = set()
        probing = asyncio.create_task(self._keep_probing())
        while (now := time.perf_counter() - began) < seconds:
            at, item = work[self.cursor % len(work)]
            if self.cursor and self.cursor % len(work) == 0:
                began, seconds, offset, now = time.perf_counter(), seconds - now, at, 0.0
            self.cursor += 1
            await asyncio.sleep(min(max(at - offset - now, 0), seconds - now))
            await places.acquire()
            task = asyncio.create_task(self._request(item, self.source.random() < leaving))
            tasks.add(task)
            task.add_done_callback(lambda done: (tasks.discard(done), places.release()))
        probing.cancel()
        await asyncio.gather(*tasks, probing, return_exceptions=True)

    async def _request(self, item: Item, leaves: bool) -> None:
        body = {"prompt": item.prompt, "max_tokens": item.output, "temperature": 0.8, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        origin = time.perf_counter()
        sending = asyncio.create_task(self.client.stream(body, origin))
        if leaves:  # before the first token, or in the middle
            await asyncio.wait({sending}, timeout=self.source.uniform(0, self.typical))
            if not sending.done():
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                self.report.left += 1
                self.report.requests += 1
                return
        self._count(await sending, item.output)

    def _count(self, outcome: Outcome, wanted: int) -> None:
        self.report.requests += 1
        self.typical += (outcome.e2e - self.typical) / 10
        self.report.output_tokens += outcome.output_tokens
        if outcome.error is not None:
            self.report.problems.append(outcome.error)
        elif outcome.output_tokens != wanted:
            self.report.problems.append(f"{outcome.output_tokens} tokens came, {wanted} were asked for")

    async def _keep_probing(self) -> None:
        while True:
            await asyncio.sleep(self.probe_every)
            await self.probe()

    async def probe(self) -> None:
        """The same request again: its answer must be the same."""
        outcome = await self.client.stream(PROBE, time.perf_counter())
        self.report.probes += 1
        if outcome.error is not None:
            self.report.problems.append(f"probe: {outcome.error}")
        elif self.expected is None:
            self.expected = outcome.text
        elif outcome.text != self.expected:
            self.report.problems.append(f"the probe's answer has changed: {outcome.text!r}, not {self.expected!r}")

    async def settle(self, *, warm: bool) -> None:
        """Wait until the server is idle, and note what it holds."""
        found: dict[str, float] = {}
        for _ in range(100):
            found = await asyncio.to_thread(read_metrics, self.base_url)
            held = found["jaxserve:num_requests_running"] + found["jaxserve:num_requests_waiting"]
            if not held and not found["jaxserve:kv_cache_usage_perc"]:
                break
            await asyncio.sleep(0.1)
        else:
            self.report.problems.append("requests or pages are left when all clients are gone")
        memory, files = found["process_resident_memory_bytes"], found["process_open_fds"]
        self.report.preemptions = int(found["jaxserve:num_preemptions_total"])
        if warm:
            self.report.memory, self.report.files = (memory, memory), (files, files)
        self.report.memory, self.report.files = (self.report.memory[0], memory), (self.report.files[0], files)

    def judge(self) -> None:
        report = self.report
        if report.memory[1] > (1 + MEMORY_GROWTH) * report.memory[0]:
            report.problems.append(f"memory has grown by more than {MEMORY_GROWTH:.0%}")
        if report.files[1] > report.files[0] + SPARE_FILES:
            report.problems.append("files are left open")
        if not report.preemptions:
            report.problems.append("nothing was preempted: the pool is too large for this load")


def read_metrics(base_url: str) -> dict[str, float]:
    """/metrics by name, labels left out; what has several values is their sum."""
    with urllib.request.urlopen(f"{base_url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, Any] = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found
