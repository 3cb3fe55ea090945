"""Every program of an engine, described by shapes alone: what to compile, without an array."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxserve.cache import kv_cache
from jaxserve.cache.kv_cache import KVCache
from jaxserve.config import MAX_DRAFT_TOKENS
from jaxserve.runner import head, inputs, proposals, slots, step
from jaxserve.runner.compilation import Program
from jaxserve.runner.slots import Slots
from jaxserve.runner.step import StepDefinition
from jaxserve.runner.weights import Weights
from jaxserve.sampling.processing import mask_words
from jaxserve.sampling.tables import packed_tables_size
from jaxserve.scheduler.buckets import Buckets

COPIES = 8  # page copies in one call; more take several calls


@dataclass(frozen=True)
class Programs:
    """The programs over `weights`, `kv` and `slots`, trees of `jax.ShapeDtypeStruct`."""

    step: StepDefinition
    weights: Weights
    kv: KVCache
    slots: Slots
    buckets: Buckets

    def all(self) -> list[Program]:
        """Every program that the engine can ever run, the largest first."""
        bodies = [self.body(tokens) for tokens in reversed(self.buckets.tokens)]
        heads = [self.head(rows, *kind) for rows in reversed(self.buckets.rows) for kind in self.head_kinds]
        small = [self.score(), self.score_all(), self.admit(), self.set_tables(), self.copy_pages()]
        drafts = [self.read_drafts()] if self.step.constrains and self.step.speculates else []
        return [*bodies, *heads, *small, *drafts, *self.proposals().values()]

    @property
    def head_kinds(self) -> list[tuple[bool, bool]]:
        """`greedy` and `masked` of the heads that there are."""
        return [(True, False), (False, False), *([(False, True)] if self.step.constrains else [])]

    def proposals(self) -> dict[int, Program]:
        """By row bucket the program that gives so many slots their drafts; empty where nobody speculates."""
        if not self.step.speculates:
            return {}
        most = self.buckets.row_bucket(self.slots.num_computed.shape[0])
        buckets = [rows for rows in self.buckets.rows if rows <= most]
        propose = self.propose_ngram if self.step.draft is None else self.propose_by_model
        return {rows: propose(rows) for rows in buckets}

    def body(self, tokens: int) -> Program:
        size = inputs.body_inputs_size(tokens, self.step.attention.work)
        packed = jax.ShapeDtypeStruct((size,), jnp.int32)
        function = partial(step.body, self.step, tokens=tokens)
        return Program("body", tokens, function, (self.weights, self.kv, self.slots, packed), donate=(1, 2))

    def head(self, rows: int, greedy: bool, masked: bool = False) -> Program:
        packed = jax.ShapeDtypeStruct((3, rows), jnp.int32)
        function = partial(head.head, self.step, greedy=greedy)
        arguments = self.weights.head, self.slots, self._hidden(), packed
        if masked:
            words = mask_words(self.step.model.config.vocab_size)
            arguments += (jax.ShapeDtypeStruct((rows, words), jnp.uint32),)
        return Program(head_name(greedy, masked), rows, function, arguments, donate=(1,))

    def read_drafts(self) -> Program:
        function = partial(proposals.read_drafts, count=MAX_DRAFT_TOKENS)
        return Program("read_drafts", MAX_DRAFT_TOKENS, function, (self.slots,), donate=())

    def propose_ngram(self, rows: int) -> Program:
        function = partial(proposals.propose_ngram, proposer=self.step.proposer)
        packed = jax.ShapeDtypeStruct((2, rows), jnp.int32)
        return Program("propose_ngram", rows, function, (self.slots, packed), donate=(0,))

    def propose_by_model(self, rows: int) -> Program:
        packed = jax.ShapeDtypeStruct((inputs.draft_inputs_size(rows, self.step.max_tokens),), jnp.int32)
        arguments = self.weights, self.kv, self.slots, packed
        function = partial(proposals.propose_by_model, self.step, rows=rows)
        return Program("propose_by_model", rows, function, arguments, donate=(1, 2))

    def score(self) -> Program:
        packed = jax.ShapeDtypeStruct((3, head.SCORE_ROWS), jnp.int32)
        arguments = self.weights.head, self._hidden(), packed
        return Program("score", head.SCORE_ROWS, partial(head.score, self.step), arguments, donate=())

    def score_all(self) -> Program:
        rows = jax.ShapeDtypeStruct((head.SCORE_ROWS,), jnp.int32)
        arguments = self.weights.head, self._hidden(), rows
        return Program("score_all", head.SCORE_ROWS, partial(head.score_all, self.step), arguments, donate=())

    def set_tables(self) -> Program:
        packed = jax.ShapeDtypeStruct((packed_tables_size(self.step.model.config.vocab_size),), jnp.int32)
        return Program("set_tables", 1, slots.set_tables, (self.slots, packed), donate=(0,))

    def admit(self) -> Program:
        size = slots.packed_admission_size(self.slots.history.shape[1], self.slots.page_table.shape[2])
        packed = jax.ShapeDtypeStruct((size,), jnp.int32)
        return Program("admit", 1, slots.admit, (self.slots, packed), donate=(0,))

    def copy_pages(self) -> Program:
        pages = jax.ShapeDtypeStruct((COPIES,), jnp.int32)
        return Program("copy_pages", COPIES, kv_cache.copy_pages, (self.kv, pages, pages), donate=(0,))

    def _hidden(self) -> jax.ShapeDtypeStruct:
        shape = self.step.max_tokens, self.step.model.config.hidden_size
        return jax.ShapeDtypeStruct(shape, self.weights.embed.dtype)


def head_name(greedy: bool, masked: bool = False) -> str:
    """The name of the head program."""
    return "masked_head" if masked else "greedy_head" if greedy else "head"
