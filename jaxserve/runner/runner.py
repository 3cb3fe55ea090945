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
from jaxserve.kernels_pallas.verify_draft import choose_verify
from jaxserve.kernels_pallas.verify_draft.logprobs import Logprobs
from jaxserve.models.decoder import Decoder
from jaxserve.models.draft_head import DraftHead
from jaxserve.runner import head, inputs, slots
from jaxserve.runner.compilation import Compiler, Program
from jaxserve.runner.head import Sampled
from jaxserve.runner.inputs import Runs, ScoreRow
from jaxserve.runner.programs import COPIES, Programs
from jaxserve.runner.step import StepDefinition
from jaxserve.runner.weights import EagleDefinition, Weights, flatten, flatten_head, share_head
from jaxserve.sampling.tables import LogitsTables
from jaxserve.sampling_params import MAX_LOGPROBS
from jaxserve.scheduler.buckets import Buckets
from jaxserve.speculative.ngram import NgramProposer


class StepResult(NamedTuple):
    """A step's results on the host: `finite` and `hidden` (None unless asked for) per query row; `tokens` and
    `logprobs` (None after a greedy head) per sampled row; `scores` and `whole` per row asked for, junk behind."""

    finite: np.ndarray
    tokens: np.ndarray
    logprobs: Logprobs | None
    scores: Logprobs | None
    whole: np.ndarray | None  # [rows, vocab]
    hidden: np.ndarray | None  # [max_tokens, hidden]


class StepHandle(NamedTuple):
    """A dispatched step: its arrays are on their way to the host. Scores come in parts of `head.SCORE_ROWS`."""

    finite: jax.Array
    sampled: Sampled | None
    scores: list[Logprobs]
    whole: list[jax.Array]
    hidden: jax.Array | None = None

    def result(self) -> StepResult:
        """Wait for the step."""
        sampled, logprobs = self.sampled, None
        if sampled is not None and sampled.logprobs is not None:
            logprobs = Logprobs(*map(np.asarray, sampled.logprobs))
        return StepResult(
            np.asarray(self.finite),
            np.empty(0, np.int32) if sampled is None else np.asarray(sampled.tokens),
            logprobs,
            Logprobs(*map(np.concatenate, zip(*self.scores, strict=True))) if self.scores else None,
            np.concatenate(self.whole) if self.whole else None,
            None if self.hidden is None else np.asarray(self.hidden),
        )

    def copy_to_host(self) -> None:
        """Begin to copy what `result` will read."""
        for array in jax.tree.leaves(self):
            array.copy_to_host_async()


class StepPrograms(NamedTuple):
    """What a step runs."""

    body: Program
    head: Program | None
    proposal: Program | None


class Computed(NamedTuple):
    """A dispatched body, whose rows have not been sampled: `head` is what samples its rows (None if no row yields a
    token); `drafts` [slots, MAX_DRAFT_TOKENS] are the draft tokens of a step whose head takes masks, -1 for none."""

    runs: Runs
    head: Program | None
    hidden: jax.Array
    finite: jax.Array
    drafts: jax.Array | None

    def draft_tokens(self) -> np.ndarray | None:
        """Wait for the drafts."""
        return None if self.drafts is None else np.asarray(self.drafts)


class Runner:
    """`num_slots` requests of at most `max_len` tokens over a pool of `num_pages` pages; `max_drafts` of a request are
    verified at once by the rule `acceptance`."""

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
        proposer: NgramProposer | None = None,
        draft: Decoder | DraftHead | None = None,
        least_chance: float = 0.0,
        acceptance: str = "agreement",
        max_drafts: int = 0,
        constrains: bool = False,
    ):
        definition, self.weights = flatten(model)
        draft_definition = state = None
        if draft is not None:
            is_head = isinstance(draft, DraftHead)
            draft_definition, draft_weights = flatten_head(draft, self.weights) if is_head else flatten(draft)
            self.weights = self.weights._replace(draft=draft_weights)
            if is_head:
                state = jax.ShapeDtypeStruct((draft.config.state_size,), self.weights.embed.dtype)
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.max_len = max_len
        self.max_pages = -(-max_len // layout.page_size)
        self.buckets = buckets
        norm = choose_norm(native=isinstance(linear_kernel, NativeLinear) or attention.name == "native")
        self.step = StepDefinition(
            model=definition,
            attention=attention,
            max_tokens=buckets.tokens[-1],
            max_logprobs=MAX_LOGPROBS,
            mesh=mesh,
            linear_kernel=linear_kernel,
            native_norm=norm,
            verify=choose_verify(mesh=mesh),
            proposer=proposer,
            draft=draft_definition,
            least_chance=least_chance,
            acceptance=acceptance,
            constrains=constrains,
        )
        if self.step.keeps_draft_logits and max_drafts < 1:
            raise ValueError(f"max_drafts={max_drafts}: with acceptance='rejection' and a draft it must be at least 1")
        devices = list(mesh.devices.flat) if mesh is not None else jax.local_devices()[:1]
        self.compiler = Compiler(cache_dir, devices)
        remembered = max_drafts if self.step.keeps_draft_logits else 0
        sizes = num_slots, max_len, self.max_pages, model.config.vocab_size
        self.slots = slots.allocate(*sizes, draft_logits=remembered, state=state)
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
            (rows, *kind): self.described.head(rows, *kind)
            for rows in buckets.rows
            for kind in self.described.head_kinds
        }
        self._proposals = self.described.proposals()
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

    def is_compiled(
        self, num_tokens: int, num_sampled: int, num_drafting: int, *, greedy: bool, masked: bool = False
    ) -> bool:
        """Whether a step of so many query rows, rows of the head and runs with drafts runs at once."""
        needed = self._needed(num_tokens, num_sampled, num_drafting, greedy=greedy, masked=masked)
        return all(program is None or self.compiler.has(program) for program in needed)

    def _needed(
        self, num_tokens: int, num_sampled: int, num_drafting: int, *, greedy: bool, masked: bool
    ) -> StepPrograms:
        row_bucket = self.buckets.row_bucket
        return StepPrograms(
            self._bodies[self.buckets.token_bucket(num_tokens)],
            self._heads[row_bucket(num_sampled), greedy, masked] if num_sampled else None,
            self._proposals[row_bucket(num_drafting)] if num_drafting else None,
        )

    def compute(
        self, runs: Runs, new_pages: Sequence[tuple[int, int, int]], *, greedy: bool = False, masked: bool = False
    ) -> Computed:
        """Dispatch the body for these runs; `sample` follows, before anything else.

        `greedy`: no run wants more than the largest logit. `masked`: `sample` is given masks.
        """
        sizes = runs.num_rows, runs.num_sampled, runs.num_drafting
        needed = self._needed(*sizes, greedy=greedy, masked=masked)
        self.compiler.get_all([program for program in needed if program is not None])  # those missing in parallel
        drafts = None
        if needed.proposal is not None:
            self._propose(needed.proposal, runs, new_pages)
            if masked:
                drafts = self.compiler.get(self.described.read_drafts())(self.slots)
                drafts.copy_to_host_async()
        packed = inputs.pack_body(runs, new_pages, needed.body.bucket, self.num_slots, self.step.attention.work)
        body = self.compiler.get(needed.body)
        self.kv, self.slots, hidden, finite = body(self.weights, self.kv, self.slots, packed)
        return Computed(runs, needed.head, hidden, finite, drafts)

    def sample(
        self,
        computed: Computed,
        masks: np.ndarray | None = None,
        *,
        scores: Sequence[ScoreRow] = (),
        whole: Sequence[int] = (),
        keep_hidden: bool = False,
    ) -> StepHandle:
        """Dispatch the head of a step; the results are read later with `StepHandle.result`.

        `masks` [rows, mask_words(vocab)] as `MaskBuilder` makes them. `scores` are rows to score given tokens after,
        `whole` are query rows after which the whole vocabulary's log-probabilities are wanted. `keep_hidden`: the
        hidden rows are, too.
        """
        runs, head, hidden, finite, _ = computed
        sampled = None
        if head is not None:
            packed = inputs.pack_head(runs, head.bucket, self.num_slots), *(() if masks is None else (masks,))
            self.slots, sampled = self.compiler.get(head)(self.weights.head, self.slots, hidden, *packed)
        handle = StepHandle(
            finite,
            sampled,
            self._score(hidden, scores),
            self._score_all(hidden, whole),
            hidden if keep_hidden else None,
        )
        handle.copy_to_host()
        self._dispatched[:] = [handle]
        return handle

    def run(self, runs: Runs, new_pages: Sequence[tuple[int, int, int]], *, greedy: bool = False) -> StepHandle:
        """A step without masks: `compute` and `sample`."""
        return self.sample(self.compute(runs, new_pages, greedy=greedy))

    def _propose(self, program: Program, runs: Runs, new_pages: Sequence[tuple[int, int, int]]) -> None:
        """Give the runs that want some their draft tokens."""
        if self.step.draft is None:
            packed = inputs.pack_wanted(runs, program.bucket, self.num_slots)
            self.slots = self.compiler.get(program)(self.slots, packed)
            return
        packed = inputs.pack_drafts(runs, new_pages, program.bucket, self.step.max_tokens, self.num_slots)
        self.kv, self.slots = self.compiler.get(program)(self.weights, self.kv, self.slots, packed)

    def _score(self, hidden: jax.Array, scores: Sequence[ScoreRow]) -> list[Logprobs]:
        size, parts = head.SCORE_ROWS, []
        for first in range(0, len(scores), size):
            packed = inputs.pack_score(scores[first : first + size], size)
            parts.append(self.compiler.get(self.described.score())(self.weights.head, hidden, packed))
        return parts

    def _score_all(self, hidden: jax.Array, rows: Sequence[int]) -> list[jax.Array]:
        size, parts = head.SCORE_ROWS, []
        for first in range(0, len(rows), size):
            packed = np.zeros(size, np.int32)
            some = rows[first : first + size]
            packed[: len(some)] = some
            parts.append(self.compiler.get(self.described.score_all())(self.weights.head, hidden, packed))
        return parts

    def replace_weights(self, replace: Callable[[list[Weights]], Weights]) -> None:
        """Go on with what `replace` makes of the weights; it gets the only reference, so that it can free them.

        Shapes, dtypes and shardings must stay. If it fails there are no weights, as after `close`.
        """
        held, self.weights = [self.weights], None
        self.weights = replace(held)
        if isinstance(draft := self.step.draft, EagleDefinition):
            self.weights = self.weights._replace(draft=share_head(draft, self.weights.draft, self.weights.head))

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
