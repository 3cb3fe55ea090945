"""Runs steps on the device: owns weights, pages, slots and executables. Knows no requests, only slots and arrays."""

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.cache import kv_cache
from jaxserve.cache.kv_cache import KVLayout
from jaxserve.kernels_pallas.cpu.linear import NativeLinear, choose_norm
from jaxserve.kernels_pallas.matmul import LinearKernel
from jaxserve.kernels_pallas.paged_attention import AttentionBackend
from jaxserve.models.decoder import Decoder
from jaxserve.runner import inputs, slots, step
from jaxserve.runner.compilation import Compiler, Program
from jaxserve.runner.inputs import Runs, ScoreRow
from jaxserve.runner.programs import COPIES, Programs, head_name
from jaxserve.runner.step import StepDefinition
from jaxserve.runner.weights import Weights, flatten
from jaxserve.sampling.logprobs import Logprobs
from jaxserve.sampling.tables import LogitsTables
from jaxserve.sampling_params import MAX_LOGPROBS
from jaxserve.scheduler.buckets import Buckets


class StepResult(NamedTuple):
    """A step's results on the host: `finite` per query row; `tokens` and `logprobs` (None after a greedy head) per
    sampled row; `scores` and `whole` per row asked for, junk behind."""

    finite: np.ndarray
    tokens: np.ndarray
    logprobs: Logprobs | None
    scores: Logprobs | None
    whole: np.ndarray | None  # [rows, vocab]


class StepHandle(NamedTuple):
    """A dispatched step: its arrays are on their way to the host. Scores come in parts of `step.SCORE_ROWS`."""

    finite: jax.Array
    sampled: step.Sampled | None
    scores: list[Logprobs]
    whole: list[jax.Array]

    def result(self) -> StepResult:
        """Wait for the step."""
        finite, sampled, scores, whole = jax.tree.map(np.asarray, self)
        return StepResult(
            finite,
            np.empty(0, np.int32) if sampled is None else sampled.tokens,
            None if sampled is None else sampled.logprobs,
            Logprobs(*map(np.concatenate, zip(*scores, strict=True))) if scores else None,
            np.concatenate(whole) if whole else None,
        )


class Runner:
    """`num_slots` requests of at most `max_len` tokens over a pool of `num_pages` pages."""

    def __init__(
        self,
        model: Decoder,
        *,
        layout: KVLayout,
        num_pages: int,
        num_slots: int,
        max_len: int,
        buckets: Buckets,
        attention: AttentionBackend,
        linear_kernel: LinearKernel | None = None,
        mesh: jax.sharding.Mesh | None = None,
        cache_dir: Path | None = None,
    ):
        definition, self.weights = flatten(model)
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.max_len = max_len
        self.max_pages = -(-max_len // layout.page_size)
        self.buckets = buckets
        norm = choose_norm(native=isinstance(linear_kernel, NativeLinear) or attention.name == "native")
        self.step = StepDefinition(definition, attention, buckets.tokens[-1], MAX_LOGPROBS, mesh, linear_kernel, norm)
        devices = list(mesh.devices.flat) if mesh is not None else jax.local_devices()[:1]
        self.compiler = Compiler(cache_dir, devices)
        self.slots = slots.allocate(num_slots, max_len, self.max_pages, model.config.vocab_size)
        self._dispatched: list[StepHandle] = []  # the last step
        self._wait = weakref.finalize(self, _wait_for, self._dispatched)
        if mesh is not None:
            everywhere = NamedSharding(mesh, PartitionSpec())
            self.slots = jax.device_put(self.slots, everywhere)
            # What the loader left on one device (a derived head, say) goes to all of them.
            self.weights = jax.tree.map(
                lambda leaf: (
                    leaf if leaf.sharding.device_set == everywhere.device_set else jax.device_put(leaf, everywhere)
                ),
                self.weights,
            )
        # Programs are described by shapes: the arrays themselves are donated while another thread may be tracing.
        like = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if mesh else None)
        weights_like, slots_like = jax.tree.map(like, (self.weights, self.slots))
        kv_like = kv_cache.abstract(layout, num_pages, mesh)
        self.described = Programs(self.step, weights_like, kv_like, slots_like, buckets)
        # Made once: describing a program costs as much as packing a step.
        self._bodies = {tokens: self.described.body(tokens) for tokens in buckets.tokens}
        self._heads = {
            (rows, greedy): self.described.head(rows, greedy) for rows in buckets.rows for greedy in (False, True)
        }
        # Nearly every workload has a prompt that fills a step; loading that program takes seconds.
        self.compiler.prefetch(self._bodies[buckets.tokens[-1]])
        self.kv = kv_cache.allocate(layout, num_pages, mesh)

    # ---- one step ---------------------------------------------------------------------------------------

    def admit(self, packed: np.ndarray) -> None:
        """Fill a slot with what `slots.pack_admission` packed."""
        self.slots = self.compiler.get(self.described.admit())(self.slots, packed)

    def set_tables(self, slot: int, tables: LogitsTables) -> None:
        """Give a slot its masks, biases and bad words."""
        packed = tables.pack(slot, self.step.model.config.vocab_size)
        self.slots = self.compiler.get(self.described.set_tables())(self.slots, packed)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (from, to); a call reads all its sources before it writes."""
        for first in range(0, len(copies), COPIES):
            sources, targets = inputs.pack_copies(copies[first : first + COPIES], COPIES, self.num_pages)
            self.kv = self.compiler.get(self.described.copy_pages())(self.kv, sources, targets)

    def is_compiled(self, num_tokens: int, num_rows: int, greedy: bool) -> bool:
        """Whether a step of this size runs at once."""
        body = "body", self.buckets.token_bucket(num_tokens)
        head = (head_name(greedy), self.buckets.row_bucket(num_rows)) if num_rows else body
        return {body, head} <= self.compiler.executables().keys()

    def run(
        self,
        runs: Runs,
        new_pages: Sequence[tuple[int, int, int]],
        *,
        greedy: bool = False,
        scores: Sequence[ScoreRow] = (),
        whole: Sequence[int] = (),
    ) -> StepHandle:
        """Dispatch body and head for these runs; the results are read later with `StepHandle.result`.

        `greedy`: no run wants more than the largest logit. `scores` are rows to score given tokens after, `whole`
        are query rows after which the whole vocabulary's log-probabilities are wanted.
        """
        tokens, sampled_rows = self.buckets.token_bucket(int(runs.counts.sum())), int(runs.samples.sum())
        rows = self.buckets.row_bucket(max(sampled_rows, 1))
        programs = [self._bodies[tokens], *([self._heads[rows, greedy]] if sampled_rows else [])]
        body, *head = self.compiler.get_all(programs)
        packed = inputs.pack_body(runs, new_pages, tokens, self.num_slots, self.step.attention.work)
        self.kv, self.slots, hidden, finite = body(self.weights, self.kv, self.slots, packed)
        sampled = None
        if head:
            self.slots, sampled = head[0](
                self.weights, self.slots, hidden, inputs.pack_head(runs, rows, self.num_slots)
            )
        handle = StepHandle(finite, sampled, self._score(hidden, scores), self._score_all(hidden, whole))
        for array in jax.tree.leaves(handle):
            array.copy_to_host_async()
        self._dispatched[:] = [handle]
        return handle

    def _score(self, hidden: jax.Array, scores: Sequence[ScoreRow]) -> list[Logprobs]:
        size, parts = step.SCORE_ROWS, []
        for first in range(0, len(scores), size):
            packed = inputs.pack_score(scores[first : first + size], size)
            parts.append(self.compiler.get(self.described.score())(self.weights, hidden, packed))
        return parts

    def _score_all(self, hidden: jax.Array, rows: Sequence[int]) -> list[jax.Array]:
        size, parts = step.SCORE_ROWS, []
        for first in range(0, len(rows), size):
            packed = np.zeros(size, np.int32)
            some = rows[first : first + size]
            packed[: len(some)] = some
            parts.append(self.compiler.get(self.described.score_all())(self.weights, hidden, packed))
        return parts

    def replace_weights(self, replace: Callable[[list[Weights]], Weights]) -> None:
        """Go on with what `replace` makes of the weights; it gets the only reference, so that it can free them.

        Shapes, dtypes and shardings must stay. If it fails there are no weights, as after `close`.
        """
        held, self.weights = [self.weights], None
        self.weights = replace(held)

    def close(self) -> None:
        """Wait for the step in flight, give back the pages and the slots, and forget weights and executables."""
        self._wait()
        for array in jax.tree.leaves((self.kv, self.slots)):
            array.delete()
        self.kv = self.slots = self.weights = None
        self.compiler.clear()

    # ---- programs ---------------------------------------------------------------------------------------

    def programs(self) -> list[Program]:
        """Every program that the engine can ever run, the largest first."""
        return self.described.all()

    def warm_up(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Compile every program; nothing compiles afterwards."""
        self.compiler.warm_up(self.programs(), progress)


def _wait_for(dispatched: list[StepHandle]) -> None:
    """Let the last step end; a process that exits while XLA computes is aborted with a message of the C++ runtime."""
    jax.block_until_ready(dispatched)
