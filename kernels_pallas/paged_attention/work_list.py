"""The work list of one step: which query tiles exist, longest context first. Built on the host in NumPy.

A tile is a run of query rows of one sequence; the KV blocks it needs follow on the device from its rows'
positions. Two kinds: *single* tiles of one row (decode, short remainders) and *chunk* tiles of up to
`CHUNK_ROWS` rows (prefill). Tiles of a kind are sorted by context and processed in groups of neighbours, so
that a group's longest member is hardly longer than its others and the work follows the sum of the contexts.

A row's result does not depend on its tile: the split into tiles is a matter of speed alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

CHUNK_ROWS = 16  # query rows of a chunk tile
MIN_CHUNK_ROWS = 8  # fewer rows than this become single tiles
SINGLE_GROUP = 8  # single tiles processed together
CHUNK_GROUP = 4  # chunk tiles processed together


class QueryRun(NamedTuple):
    """`count` consecutive query rows of one sequence, the first at flat row `row` and position `start`."""

    row: int
    start: int
    count: int


class WorkList(NamedTuple):
    """The device's view. Rows are flat query rows; `tokens` marks padding.

    `place[row]` says where a row's result stands: singles first (in the order of `single_rows`), then the
    chunk tiles with `CHUNK_ROWS` places each.
    """

    single_groups: Int[Array, ""]
    chunk_groups: Int[Array, ""]
    single_rows: Int[Array, " tokens"]
    chunk_first: Int[Array, " chunk_tiles"]
    chunk_count: Int[Array, " chunk_tiles"]
    place: Int[Array, " tokens"]


def num_chunk_tiles(tokens: int) -> int:
    """The most chunk tiles that a bucket of `tokens` rows can hold, in whole groups; none in the smallest."""
    return 0 if tokens < CHUNK_ROWS else -(-(tokens // MIN_CHUNK_ROWS) // CHUNK_GROUP) * CHUNK_GROUP


def work_list_size(tokens: int) -> int:
    """int32 values of the packed work list of a bucket of `tokens` rows."""
    return 2 + 2 * tokens + 2 * num_chunk_tiles(tokens)


def pack_work_list(runs: Sequence[QueryRun], tokens: int) -> np.ndarray:
    """The packed work list [work_list_size(tokens)] of `runs`, which hold at most `tokens` rows together."""
    columns = np.array(runs, np.int32).reshape(-1, len(QueryRun._fields)).T
    return pack_tiles(*columns, tokens=tokens)


def pack_tiles(rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, tokens: int) -> np.ndarray:
    """`pack_work_list` of the runs (rows[i], starts[i], counts[i]), int32; rows ascend."""
    chunks: list[tuple[int, int, int]] = []  # (context, first row, rows)
    if tokens >= CHUNK_ROWS and (counts >= MIN_CHUNK_ROWS).any():
        rows, starts, counts = _cut_chunks(rows, starts, counts, chunks)
    if counts.max(initial=0) > 1:  # remainders of several rows
        offsets = np.arange(counts.sum(), dtype=np.int32) - (counts.cumsum(dtype=np.int32) - counts).repeat(counts)
        rows, starts = rows.repeat(counts) + offsets, starts.repeat(counts) + offsets
    elif counts.min(initial=1) < 1:
        rows, starts = rows[counts > 0], starts[counts > 0]
    singles = rows[starts.argsort(kind="stable")[::-1]]

    tiles = num_chunk_tiles(tokens)
    packed = np.zeros(work_list_size(tokens), np.int32)
    packed[0] = -(-len(singles) // SINGLE_GROUP)
    packed[1] = -(-len(chunks) // CHUNK_GROUP)
    packed[2 : 2 + len(singles)] = singles
    packed[2 + len(singles) : 2 + tokens] = tokens
    place = packed[2 + tokens + 2 * tiles :]
    place[singles] = np.arange(len(singles), dtype=np.int32)
    for tile, (_, first, count) in enumerate(chunks):
        packed[2 + tokens + tile], packed[2 + tokens + tiles + tile] = first, count
        place[first : first + count] = np.arange(count, dtype=np.int32) + (tokens + tile * CHUNK_ROWS)
    return packed


def single_tiles(rows: int) -> WorkList:
    """Inside a jit: the work list of `rows` rows of one token each, in the order that they have."""
    row, none = jnp.arange(rows, dtype=jnp.int32), jnp.zeros(num_chunk_tiles(rows), jnp.int32)
    return WorkList(jnp.int32(-(-rows // SINGLE_GROUP)), jnp.int32(0), row, none, none, row)


def _cut_chunks(
    rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, chunks: list[tuple[int, int, int]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Move whole chunk tiles from the runs to `chunks`, longest context first; returns what is left of the runs."""
    rows, starts, counts = rows.copy(), starts.copy(), counts.copy()
    for run in (counts >= MIN_CHUNK_ROWS).nonzero()[0]:
        row, start, count = int(rows[run]), int(starts[run]), int(counts[run])
        done = 0
        while count - done >= MIN_CHUNK_ROWS:
            size = min(CHUNK_ROWS, count - done)
            chunks.append((start + done + size, row + done, size))
            done += size
        rows[run], starts[run], counts[run] = row + done, start + done, count - done
    chunks.sort(reverse=True)
    return rows, starts, counts


def unpack_work_list(packed: Int[Array, " size"], tokens: int) -> WorkList:
    """The work list in a packed buffer, sliced inside a jit."""
    tiles = num_chunk_tiles(tokens)
    single_rows, chunk_first, chunk_count, place = np.cumsum([2, tokens, tiles, tiles])
    return WorkList(
        single_groups=packed[0],
        chunk_groups=packed[1],
        single_rows=packed[single_rows:chunk_first],
        chunk_first=packed[chunk_first:chunk_count],
        chunk_count=packed[chunk_count:place],
        place=packed[place : place + tokens],
    )
