"""The host's half of a step: one packed int32 buffer per program, sliced again inside the jit.

A NumPy argument costs microseconds and a `device_put` ten times as much, so everything goes into one buffer.
The buffer is fresh for every step: on the CPU JAX may alias it, and the step runs after `pack` has returned.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int

from jaxserve.kernels_pallas.paged_attention.work_list import (
    QueryRun,
    WorkList,
    pack_work_list,
    unpack_work_list,
    work_list_size,
)


class Run(NamedTuple):
    """One scheduled request as the device sees it: `count` tokens of a slot from position `start` on."""

    slot: int
    start: int
    count: int
    sample: bool


class BodyInputs(NamedTuple):
    """Per query row its slot and its offset in the slot's run; the rows the head wants; table updates; tiles.

    Padding: slot = num_slots, row = tokens - 1 (any), page index = max_pages (dropped).
    """

    token_slot: Int[Array, " tokens"]
    token_offset: Int[Array, " tokens"]
    head_rows: Int[Array, " max_rows"]
    new_page_slot: Int[Array, " tokens"]
    new_page_index: Int[Array, " tokens"]
    new_page: Int[Array, " tokens"]
    work: WorkList


def body_inputs_size(tokens: int, max_rows: int) -> int:
    return 5 * tokens + max_rows + work_list_size(tokens)


def pack_body(
    runs: Sequence[Run], new_pages: Sequence[tuple[int, int, int]], tokens: int, max_rows: int, num_slots: int
) -> np.ndarray:
    """The packed body inputs [body_inputs_size(tokens, max_rows)] of a step with at most `tokens` query rows."""
    packed = np.zeros(body_inputs_size(tokens, max_rows), np.int32)
    cuts = np.cumsum([tokens, tokens, max_rows, tokens, tokens, tokens])
    slot, offset, head_rows, page_slot, page_index, page, work = np.split(packed, cuts)
    slot[:] = page_slot[:] = num_slots
    counts = np.array([run.count for run in runs], np.int32)
    ends = np.cumsum(counts, dtype=np.int32)
    used = int(ends[-1])
    slot[:used] = np.repeat(np.array([run.slot for run in runs], np.int32), counts)
    offset[:used] = np.arange(used, dtype=np.int32) - np.repeat(ends - counts, counts)
    sampled = [int(end) - 1 for end, run in zip(ends, runs, strict=True) if run.sample]
    head_rows[: len(sampled)] = sampled
    if new_pages:
        count = len(new_pages)
        page_slot[:count], page_index[:count], page[:count] = zip(*new_pages, strict=True)
    firsts = (ends - counts).tolist()
    work[:] = pack_work_list(
        [QueryRun(row, run.start, run.count) for row, run in zip(firsts, runs, strict=True)], tokens
    )
    return packed


def unpack_body(packed: Int[Array, " size"], tokens: int, max_rows: int) -> BodyInputs:
    """What `pack_body` packed, as arrays inside a jit."""
    cuts = [int(cut) for cut in np.cumsum([0, tokens, tokens, max_rows, tokens, tokens, tokens])]
    parts = [packed[start:end] for start, end in pairwise(cuts)]
    return BodyInputs(*parts, work=unpack_work_list(packed[cuts[-1] :], tokens))


def pack_head(slots: Sequence[int], rows: int, num_slots: int) -> np.ndarray:
    """The slots of the sampled rows, padded with `num_slots`."""
    packed = np.full(rows, num_slots, np.int32)
    packed[: len(slots)] = slots
    return packed


def pack_copies(copies: Sequence[tuple[int, int]], size: int, num_pages: int) -> np.ndarray:
    """[2, size] pages to copy from and to; padding targets are out of range."""
    packed = np.full((2, size), num_pages, np.int32)
    packed[:, : len(copies)] = np.array(copies, np.int32).T
    return packed
