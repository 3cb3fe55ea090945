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
    `starts` on; `samples` is 1 where the last of them yields a token."""

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int, int, bool]]) -> "Runs":
        """From (slot, start, count, sample) of each run, at least one."""
        return cls.of_columns(zip(*runs, strict=True))

    @classmethod
    def of_columns(cls, columns: Iterable[Sequence[int]]) -> "Runs":
        return cls(*(np.array(column, np.int32) for column in columns))


class ScoreRow(NamedTuple):
    """Wanted: the log-probability of `token` after query row `row` of the step, and of the `top` likeliest tokens."""

    row: int
    token: int
    top: int


class BodyInputs(NamedTuple):
    """Per query row its slot and its offset in the slot's run; table updates; tiles.

    Padding: slot = num_slots.
    """

    token_slot: Int[Array, " tokens"]
    token_offset: Int[Array, " tokens"]
    new_page_slot: Int[Array, " tokens"]
    new_page_index: Int[Array, " tokens"]
    new_page: Int[Array, " tokens"]
    work: Any  # what the attention backend's `prepare` takes


def body_inputs_size(tokens: int, work: WorkFormat) -> int:
    return 5 * tokens + work.size(tokens)


def pack_body(
    runs: Runs, new_pages: Sequence[tuple[int, int, int]], tokens: int, num_slots: int, work: WorkFormat
) -> np.ndarray:
    """The packed body inputs [body_inputs_size(tokens, work)] of a step with at most `tokens` query rows."""
    packed = np.zeros(body_inputs_size(tokens, work), np.int32)
    slot, offset, page_slot, page_index, page = packed[: 5 * tokens].reshape(5, tokens)
    slot.fill(num_slots)
    page_slot.fill(num_slots)
    slots, starts, counts, _ = runs
    ends = counts.cumsum(dtype=np.int32)
    firsts = ends - counts
    used = int(ends[-1])
    slot[:used] = slots.repeat(counts)
    offset[:used] = np.arange(used, dtype=np.int32) - firsts.repeat(counts)
    if new_pages:
        count = len(new_pages)
        page_slot[:count], page_index[:count], page[:count] = zip(*new_pages, strict=True)
    packed[5 * tokens :] = work.pack(firsts, starts, counts, tokens)
    return packed


def unpack_body(packed: Int[Array, " size"], tokens: int, work: WorkFormat) -> BodyInputs:
    """What `pack_body` packed, as arrays inside a jit."""
    cuts = [tokens * part for part in range(6)]
    parts = [packed[start:end] for start, end in pairwise(cuts)]
    return BodyInputs(*parts, work=work.unpack(packed[cuts[-1] :], tokens))


def pack_head(runs: Runs, rows: int, num_slots: int) -> np.ndarray:
    """[2, rows]: query row and slot of each run that samples, padded with (0, num_slots)."""
    packed = np.zeros((2, rows), np.int32)
    packed[1].fill(num_slots)
    sampled = runs.samples.nonzero()[0]
    packed[0, : len(sampled)] = runs.counts.cumsum(dtype=np.int32)[sampled] - 1
    packed[1, : len(sampled)] = runs.slots[sampled]
    return packed


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
