"""Who does a job's work: an engine in this process, or actors of a Ray cluster that each have one."""

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from jaxserve.config import EngineConfig
from jaxserve.evaluation.work import Result, Work
from jaxserve.extras import optional

MAX_LOSSES = 8  # actors that may be lost, in all, before a model's run gives up


class Executor(ABC):
    """Where items are computed."""

    @abstractmethod
    def run(self, works: Iterable[Work]) -> Iterator[Result]:
        """Each item's result once, as they finish."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


def items_at_once(config: EngineConfig) -> int:
    """Items that are under way in one engine: enough to fill it while some of them finish."""
    return 2 * config.max_num_seqs


class LocalExecutor(Executor):
    """One engine in this process."""

    def __init__(self, config: EngineConfig):
        from jaxserve.evaluation.worker import Worker  # here and not above: a wrong job is found before JAX is loaded
        from jaxserve.llm import LLM

        self._llm = LLM(config=config)
        self.worker = Worker(self._llm.engine)
        self._most = items_at_once(config)

    def run(self, works: Iterable[Work]) -> Iterator[Result]:
        waiting, open_items = iter(works), 0
        new = list(islice(waiting, self._most))
        while new or open_items:
            done = self.worker.advance(new)
            open_items += len(new) - len(done)
            yield from done
            new = list(islice(waiting, self._most - open_items))

    def close(self) -> None:
        self._llm.close()


class RayExecutor(Executor):
    """Actors with an engine each. Items of an actor that is lost are run again by the others."""

    def __init__(self, config: EngineConfig, num_actors: int, address: str | None = None):
        self._ray = optional("ray", "ray", "executor='ray'")
        self._own_cluster = not self._ray.is_initialized()
        if self._own_cluster:
            options = {"address": address} if address else {"include_dashboard": False, "num_cpus": num_actors}
            self._ray.init(log_to_driver=False, **options)
        self._config, self._most = config, items_at_once(config)
        self._actor_class = self._ray.remote(max_restarts=0, num_cpus=1)(_Actor)
        self.actors = [self._actor_class.remote(config) for _ in range(num_actors)]
        self.num_lost = 0

    def run(self, works: Iterable[Work]) -> Iterator[Result]:
        waiting: deque[Work] = deque(works)
        open_works: list[dict] = [{} for _ in self.actors]
        calls: dict = {}
        for index in range(len(self.actors)):
            self._advance(index, waiting, open_works[index], calls)
        while calls:
            [call], _ = self._ray.wait(list(calls))
            index = calls.pop(call)
            try:
                done = self._ray.get(call)
            except self._ray.exceptions.RayActorError as error:
                waiting.extendleft(reversed(open_works[index].values()))
                open_works[index].clear()
                self._replace(index, error)
                done = []
            for result in done:
                del open_works[index][result.key]
            self._advance(index, waiting, open_works[index], calls)
            for other, mine in enumerate(open_works):  # those that had nothing to do when the lost items came back
                if not mine and other not in calls.values():
                    self._advance(other, waiting, mine, calls)
            yield from done

    def _advance(self, index: int, waiting: deque[Work], mine: dict, calls: dict) -> None:
        """Give an actor as many items as it has room for, but leave the others their share, and let it run."""
        share = -(-len(waiting) // len(self.actors))
        new = [waiting.popleft() for _ in range(min(self._most - len(mine), share))]
        mine.update((work.key, work) for work in new)
        if mine:
            calls[self.actors[index].advance.remote(new)] = index

    def _replace(self, index: int, error: Exception) -> None:
        self.num_lost += 1
        if self.num_lost > MAX_LOSSES:
            raise RuntimeError(f"executor='ray': {self.num_lost} actors were lost: {error}") from error
        self.actors[index] = self._actor_class.remote(self._config)

    def close(self) -> None:
        for actor in self.actors:
            self._ray.kill(actor)
        if self._own_cluster:
            self._ray.shutdown()


class _Actor:
    """One engine in a process of its own; made into a Ray actor."""

    def __init__(self, config: EngineConfig):
        self._local = LocalExecutor(config)

    def advance(self, works: list[Work]) -> list[Result]:
        return self._local.worker.advance(works)

    def pid(self) -> int:
        return os.getpid()
