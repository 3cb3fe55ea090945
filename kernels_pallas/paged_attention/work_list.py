"""The work list of one step: which query tiles exist, longest context first. Built on the host in NumPy.

A tile is a run of query rows of one sequence; the KV blocks it needs follow on the device from its rows'
positions. Two kinds: *single* tiles of one row (decode, short remainders) and *chunk* tiles of up to
`CHUNK_ROWS` rows (prefill). Tiles of a kind are sorted by context and processed in groups of neighbours, so
that a group's longest member is hardly longer than its others and the work follows the sum of the contexts.

A row's result does not depend on its tile: the split into tiles is a matter of speed alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

CHUNK_ROWS = 16  # query rows of a chunk tile
MIN_CHUNK_ROWS = 8  # fewer rows than this become single tiles
SINGLE_GROUP = 8  # single tiles processed together
CHUNK_GROUP = 4  # chunk tiles processed together


@runtime_checkable
class WorkFormat(Protocol):
    """How a backend's work list is packed on the host and unpacked on the device. Hashable: programs depend on it."""

    def size(self, tokens: int) -> int:
        """int32 values of the packed work list of a bucket of `tokens` rows."""

    def pack(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, tokens: int) -> np.ndarray:
        """The packed work list [size(tokens)] of runs: counts[i] query rows of a sequence, the first at flat row
        rows[i] and position starts[i]; int32, rows ascend and hold at most `tokens` together."""

    def unpack(self, packed: Int[Array, " size"], tokens: int) -> Any:
        """The work list in a packed buffer, sliced inside a jit: what the backend's `prepare` takes."""

    def singles(self, rows: int) -> Any:
        """Inside a jit: the work list of `rows` query rows, each of another sequence."""


class QueryRun(NamedTuple):
    """`count` consecutive query rows of one sequence, the first at flat row `row` and position `start`."""

    row: int
    start: int
    count: int


def pack_runs(work: WorkFormat, runs: Sequence[QueryRun], tokens: int) -> np.ndarray:
    """The packed work list of `runs`."""
    return work.pack(*np.array(runs, np.int32).reshape(-1, len(QueryRun._fields)).T, tokens)


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


@dataclass(frozen=True)
class GroupedTiles:
    """The `WorkFormat` of `WorkList`."""

    def size(self, tokens: int) -> int:
        return 2 + 2 * tokens + 2 * num_chunk_tiles(tokens)

    def pack(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, tokens: int) -> np.ndarray:
        chunks: list[tuple[int, int, int]] = []  # (context, first row, rows)
        if counts.max(initial=0) > 1:
            if tokens >= CHUNK_ROWS:
                rows, starts, counts = _cut_chunks(rows, starts, counts, chunks)
            # What is left: remainders of no row, one or several.
            offsets = np.arange(counts.sum(), dtype=np.int32) - (counts.cumsum(dtype=np.int32) - counts).repeat(counts)
            rows, starts = rows.repeat(counts) + offsets, starts.repeat(counts) + offsets
        singles = rows[starts.argsort(kind="stable")[::-1]]

        tiles = num_chunk_tiles(tokens)
        packed = np.zeros(self.size(tokens), np.int32)
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

    def unpack(self, packed: Int[Array, " size"], tokens: int) -> WorkList:
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

    def singles(self, rows: int) -> WorkList:
        row, none = jnp.arange(rows, dtype=jnp.int32), jnp.zeros(num_chunk_tiles(rows), jnp.int32)
        return WorkList(jnp.int32(-(-rows // SINGLE_GROUP)), jnp.int32(0), row, none, none, row)


TILES = GroupedTiles()


@dataclass(frozen=True)
class NoWorkList:
    """The `WorkFormat` of backends that go by positions alone."""

    def size(self, tokens: int) -> int:
        return 0

    def pack(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, tokens: int) -> np.ndarray:
        return np.empty(0, np.int32)

    def unpack(self, packed: Int[Array, " size"], tokens: int) -> None:
        return None

    def singles(self, rows: int) -> None:
        return None


NONE = NoWorkList()


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
