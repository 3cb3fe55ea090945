"""The host's half of a step: one packed int32 buffer per program, sliced again inside the jit.

A NumPy argument costs microseconds and a `device_put` ten times as much, so everything goes into one buffer.
The buffer is fresh for every step: on the CPU JAX may alias it, and the step runs after `pack` has returned.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int

from jaxserve.kernels_pallas.paged_attention.work_list import WorkFormat


class Runs(NamedTuple):
    """The scheduled requests as the device sees them, int32 columns [runs]: `counts` tokens of a slot from position
    `starts` on (at the latest, while drafts are verified: the device knows); `samples` is 1 where the last of them
    yields a token, and so does each of the `drafts` behind it.

    In all: `num_rows` of the body, `num_sampled` rows of the head, `num_drafting` runs with drafts.
    """

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    drafts: np.ndarray
    num_rows: int
    num_sampled: int
    num_drafting: int

    @classmethod
    def of(cls, runs: Iterable[tuple]) -> "Runs":
        """From (slot, start, count, sample) of each run, at least one, or with the number of drafts behind them."""
        return cls.of_columns(*zip(*((*run, 0) if len(run) < 5 else run for run in runs), strict=True))

    @classmethod
    def of_columns(
        cls,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        samples: Sequence[int],
        drafts: Sequence[int],
    ) -> "Runs":
        columns = np.array((slots, starts, counts, samples, drafts), np.int32)
        num_drafts = sum(drafts)
        num_drafting = len(drafts) - drafts.count(0) if num_drafts else 0
        return cls(*columns, sum(counts) + num_drafts, sum(samples) + num_drafts, num_drafting)

    @property
    def only_decodes(self) -> bool:
        """Whether each run is one row of the body and of the head."""
        return self.num_rows == self.num_sampled == len(self.slots) and not self.num_drafting


class ScoreRow(NamedTuple):
    """Wanted: the log-probability of `token` after query row `row` of the step, and of the `top` likeliest tokens."""

    row: int
    token: int
    top: int


class BodyInputs(NamedTuple):
    """Per query row its slot, its offset in the slot's run, and for draft tokens which one it is (from 1 on; 0 for
    the others); table updates; tiles.

    Padding: slot = num_slots.
    """

    token_slot: Int[Array, " tokens"]
    token_offset: Int[Array, " tokens"]
    token_draft: Int[Array, " tokens"]
    new_page_slot: Int[Array, " tokens"]
    new_page_index: Int[Array, " tokens"]
    new_page: Int[Array, " tokens"]
    work: Any  # what the attention backend's `prepare` takes


def body_inputs_size(tokens: int, work: WorkFormat) -> int:
    return 6 * tokens + work.size(tokens)


def pack_body(
    runs: Runs, new_pages: Sequence[tuple[int, int, int]], tokens: int, num_slots: int, work: WorkFormat
) -> np.ndarray:
    """The packed body inputs [body_inputs_size(tokens, work)] of a step with at most `tokens` query rows."""
    packed = np.zeros(body_inputs_size(tokens, work), np.int32)
    columns = packed[: 6 * tokens].reshape(6, tokens)
    slot, offset, draft = columns[:3]
    slot.fill(num_slots)
    _fill_new_pages(columns[3:], new_pages, num_slots)
    slots, starts, certain, _, drafts, used, *_ = runs
    if runs.only_decodes:
        counts, firsts = certain, np.arange(used, dtype=np.int32)
        slot[:used] = slots
    else:
        counts = certain + drafts
        firsts = counts.cumsum(dtype=np.int32) - counts
        slot[:used] = slots.repeat(counts)
        offset[:used] = np.arange(used, dtype=np.int32) - firsts.repeat(counts)
        draft[:used] = np.maximum(offset[:used] - (certain - 1).repeat(counts), 0)
    packed[6 * tokens :] = work.pack(firsts, starts, counts, tokens)
    return packed


def unpack_body(packed: Int[Array, " size"], tokens: int, work: WorkFormat) -> BodyInputs:
    """What `pack_body` packed, as arrays inside a jit."""
    cuts = [tokens * part for part in range(7)]
    parts = [packed[start:end] for start, end in pairwise(cuts)]
    return BodyInputs(*parts, work=work.unpack(packed[cuts[-1] :], tokens))


def pack_head(runs: Runs, rows: int, num_slots: int) -> np.ndarray:
    """[3, rows]: query row, slot and number of the draft token (0 for none) of each row that samples.

    A run's rows follow each other. Padding is (0, num_slots, 0).
    """
    packed = np.zeros((3, rows), np.int32)
    packed[1].fill(num_slots)
    slots, _, counts, samples, drafts, _, used, num_drafting = runs
    if runs.only_decodes:
        packed[0, :used], packed[1, :used] = np.arange(used), slots
        return packed
    lengths = samples + drafts
    packed[1, :used] = slots.repeat(lengths)
    if not num_drafting:
        packed[0, :used] = counts.cumsum(dtype=np.int32)[samples.nonzero()[0]] - 1
    else:
        firsts = lengths.cumsum(dtype=np.int32) - lengths
        packed[2, :used] = np.arange(used, dtype=np.int32) - firsts.repeat(lengths)
        first = (counts + drafts).cumsum(dtype=np.int32) - drafts - 1  # the last certain row of each run
        packed[0, :used] = first.repeat(lengths) + packed[2, :used]
    return packed


class DraftInputs(NamedTuple):
    """Slots and the numbers of drafts that they want, most first; the step's table updates, which come before.

    Padding: slot = num_slots.
    """

    slots: Int[Array, " rows"]
    wanted: Int[Array, " rows"]
    new_page_slot: Int[Array, " tokens"]
    new_page_index: Int[Array, " tokens"]
    new_page: Int[Array, " tokens"]


def draft_inputs_size(rows: int, tokens: int) -> int:
    return 2 * rows + 3 * tokens


def pack_drafts(
    runs: Runs, new_pages: Sequence[tuple[int, int, int]], rows: int, tokens: int, num_slots: int
) -> np.ndarray:
    """The packed inputs [draft_inputs_size(rows, tokens)] of a draft model; `tokens` is the largest token bucket."""
    packed = np.zeros(draft_inputs_size(rows, tokens), np.int32)
    packed[: 2 * rows].reshape(2, rows)[:] = pack_wanted(runs, rows, num_slots)
    _fill_new_pages(packed[2 * rows :].reshape(3, tokens), new_pages, num_slots)
    return packed


def pack_wanted(runs: Runs, rows: int, num_slots: int) -> np.ndarray:
    """[2, rows]: the slots that want drafts, and how many, most first; padding: slot = num_slots."""
    packed = np.zeros((2, rows), np.int32)
    packed[0].fill(num_slots)
    order = (-runs.drafts).argsort(kind="stable")[: runs.num_drafting]
    packed[:, : len(order)] = runs.slots[order], runs.drafts[order]
    return packed


def unpack_drafts(packed: Int[Array, " size"], rows: int, tokens: int) -> DraftInputs:
    """What `pack_drafts` packed, as arrays inside a jit."""
    pages = packed[2 * rows :].reshape(3, tokens)
    return DraftInputs(packed[:rows], packed[rows : 2 * rows], *pages)


def _fill_new_pages(columns: np.ndarray, new_pages: Sequence[tuple[int, int, int]], num_slots: int) -> None:
    """Table updates as columns [3, tokens]: slot, index in its table, page."""
    columns[0].fill(num_slots)
    if new_pages:
        columns[:, : len(new_pages)] = np.array(new_pages, np.int32).T


def pack_score(scores: Sequence[ScoreRow], rows: int) -> np.ndarray:
    """[3, rows]: row, token and number of likeliest tokens; padding asks for nothing."""
    packed = np.zeros((3, rows), np.int32)
    packed[2] = -1
    packed[:, : len(scores)] = np.array(scores, np.int32).T
    return packed


def pack_copies(copies: Sequence[tuple[int, int]], size: int, num_pages: int) -> np.ndarray:
    """[2, size] pages to copy from and to; padding targets are out of range."""
    packed = np.full((2, size), num_pages, np.int32)
    packed[:, : len(copies)] = np.array(copies, np.int32).T
    return packed
