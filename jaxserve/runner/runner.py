"""Runs steps on the device: owns weights, pages, slots and executables. Knows no requests, only slots and arrays."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.cache import kv_cache
from jaxserve.cache.kv_cache import KVLayout
from jaxserve.kernels_pallas.paged_attention import AttentionBackend
from jaxserve.models.decoder import Decoder
from jaxserve.runner import inputs, slots, step
from jaxserve.runner.compilation import Compiler, Program
from jaxserve.runner.inputs import Run
from jaxserve.runner.step import StepDefinition
from jaxserve.runner.weights import flatten
from jaxserve.scheduler.buckets import Buckets

MAX_LOGPROBS = 20
_COPIES = 8  # page copies in one call; more take several calls


class StepResult(NamedTuple):
    """A step's results on the host. `finite` is per query row, the rest per sampled row."""

    finite: np.ndarray
    tokens: np.ndarray
    logprobs: step.Logprobs


class StepHandle(NamedTuple):
    """A dispatched step: its arrays are on their way to the host."""

    finite: jax.Array
    sampled: step.Sampled | None

    def result(self) -> StepResult:
        """Wait for the step."""
        if self.sampled is None:
            return StepResult(np.asarray(self.finite), np.empty(0, np.int32), None)
        tokens, chosen = self.sampled
        return StepResult(np.asarray(self.finite), np.asarray(tokens), type(chosen)(*map(np.asarray, chosen)))


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
        mesh: jax.sharding.Mesh | None = None,
        cache_dir: Path | None = None,
    ):
        definition, self.weights = flatten(model)
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.max_len = max_len
        self.max_pages = -(-max_len // layout.page_size)
        self.buckets = buckets
        self.step = StepDefinition(definition, attention, buckets.rows[-1], MAX_LOGPROBS, mesh)
        devices = list(mesh.devices.flat) if mesh is not None else jax.local_devices()[:1]
        self.compiler = Compiler(cache_dir, devices)
        self.slots = slots.allocate(num_slots, max_len, self.max_pages)
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
        self._weights_like, self._slots_like = jax.tree.map(like, (self.weights, self.slots))
        self._kv_like = kv_cache.abstract(layout, num_pages, mesh)
        # Nearly every workload has a prompt that fills a step; loading that program takes seconds.
        self.compiler.prefetch(self._body_program(buckets.tokens[-1]))
        self.kv = kv_cache.allocate(layout, num_pages, mesh)

    # ---- one step ---------------------------------------------------------------------------------------

    def admit(self, packed: np.ndarray) -> None:
        """Fill a slot with what `slots.pack_admission` packed."""
        self.slots = self.compiler.get(self._admit_program())(self.slots, packed)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (from, to); a call reads all its sources before it writes."""
        for first in range(0, len(copies), _COPIES):
            sources, targets = inputs.pack_copies(copies[first : first + _COPIES], _COPIES, self.num_pages)
            self.kv = self.compiler.get(self._copy_program())(self.kv, sources, targets)

    def is_compiled(self, num_tokens: int, num_rows: int) -> bool:
        """Whether a step of this size runs at once."""
        body = "body", self.buckets.token_bucket(num_tokens)
        head = ("head", self.buckets.row_bucket(num_rows)) if num_rows else body
        return {body, head} <= self.compiler.executables().keys()

    def run(self, runs: Sequence[Run], new_pages: Sequence[tuple[int, int, int]]) -> StepHandle:
        """Dispatch body and head for these runs; the results are read later with `StepHandle.result`."""
        tokens = self.buckets.token_bucket(sum(run.count for run in runs))
        sampled_slots = [run.slot for run in runs if run.sample]
        rows = self.buckets.row_bucket(max(len(sampled_slots), 1))
        programs = [self._body_program(tokens), *([self._head_program(rows)] if sampled_slots else [])]
        body, *head = self.compiler.get_all(programs)
        packed = inputs.pack_body(runs, new_pages, tokens, self.step.max_rows, self.num_slots)
        self.kv, self.slots, hidden, finite = body(self.weights, self.kv, self.slots, packed)
        sampled = None
        if head:
            row_slots = inputs.pack_head(sampled_slots, rows, self.num_slots)
            self.slots, sampled = head[0](self.weights, self.slots, hidden, row_slots)
        for array in jax.tree.leaves((finite, sampled)):
            array.copy_to_host_async()
        self._dispatched[:] = [StepHandle(finite, sampled)]
        return self._dispatched[0]

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
        bodies = [self._body_program(tokens) for tokens in reversed(self.buckets.tokens)]
        heads = [self._head_program(rows) for rows in reversed(self.buckets.rows)]
        return [*bodies, *heads, self._admit_program(), self._copy_program()]

    def warm_up(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Compile every program; nothing compiles afterwards."""
        self.compiler.warm_up(self.programs(), progress)

    def _body_program(self, tokens: int) -> Program:
        packed = jax.ShapeDtypeStruct((inputs.body_inputs_size(tokens, self.step.max_rows),), jnp.int32)
        function = partial(step.body, self.step, tokens=tokens)
        return Program(
            "body", tokens, function, (self._weights_like, self._kv_like, self._slots_like, packed), donate=(1, 2)
        )

    def _head_program(self, rows: int) -> Program:
        config = self.step.model.config
        hidden = jax.ShapeDtypeStruct((self.step.max_rows, config.hidden_size), self._weights_like.embed.dtype)
        row_slots = jax.ShapeDtypeStruct((rows,), jnp.int32)
        function = partial(step.head, self.step)
        return Program("head", rows, function, (self._weights_like, self._slots_like, hidden, row_slots), donate=(1,))

    def _admit_program(self) -> Program:
        size = slots.packed_admission_size(self.max_len, self.max_pages)
        return Program(
            "admit", 1, slots.admit, (self._slots_like, jax.ShapeDtypeStruct((size,), jnp.int32)), donate=(0,)
        )

    def _copy_program(self) -> Program:
        pages = jax.ShapeDtypeStruct((_COPIES,), jnp.int32)
        return Program("copy_pages", _COPIES, kv_cache.copy_pages, (self._kv_like, pages, pages), donate=(0,))


def _wait_for(dispatched: list[StepHandle]) -> None:
    """Let the last step end; a process that exits while XLA computes is aborted with a message of the C++ runtime."""
    jax.block_until_ready(dispatched)
