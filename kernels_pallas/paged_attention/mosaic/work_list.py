"""The work list of a step for the Hopper kernels, built on the host in NumPy.

Runs of query rows become *pieces* of up to 16 tokens for the decode kernel and *tiles* for the prefill kernel; in small
steps there are pieces only. A piece is split over its context into one item for each 512 keys, while there is room for
their results, the longest first; else it is one item, which folds its splits itself. Longest work comes first.

How a run is cut and which pieces are split is a matter of speed alone: a row's bits do not depend on it. Lengths may be
upper bounds: the kernels go by what the device knows, and items that turn out to lie behind the end are void.
"""

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxserve.kernels_pallas.paged_attention.mosaic.config import WHOLE


class WorkList(NamedTuple):
    """The device's view; what is behind the counts is padding."""

    num_items: Int[Array, ""]
    num_split_rows: Int[Array, ""]
    num_tiles: Int[Array, ""]
    piece_row: Int[Array, " tokens"]
    piece_count: Int[Array, " tokens"]
    piece_place: Int[Array, " tokens"]  # first row of the results of its splits
    item_piece: Int[Array, " items"]
    item_split: Int[Array, " items"]  # WHOLE: all of the context
    split_row: Int[Array, " split_rows"]  # query rows of split pieces
    split_piece: Int[Array, " split_rows"]
    tile_row: Int[Array, " tiles"]
    tile_count: Int[Array, " tiles"]


class Piece(NamedTuple):
    """Columns over pieces or tiles."""

    row: np.ndarray
    start: np.ndarray  # position of the first token
    count: np.ndarray


@dataclass(frozen=True)
class WorkFormat:
    """Sizes of the work list by token bucket, and how it is packed.

    `item_tokens`: most query tokens of a piece; 0 leaves everything to prefill tiles of `tile_tokens`.
    `max_splits`: of the longest context. `max_places`: most rows of split results in a step.
    `split`: keys of a split."""

    item_tokens: int
    tile_tokens: int
    max_splits: int
    max_places: int
    small_bucket: int
    split: int

    def num_places(self, tokens: int) -> int:
        """Rows of split results that a bucket has room for; none where no context is split."""
        return min(tokens * self.max_splits, self.max_places) if self.max_splits > 1 and self.item_tokens else 0

    def num_items(self, tokens: int) -> int:
        return min(tokens * self.max_splits, tokens + self.num_places(tokens)) if self.item_tokens else 0

    def num_split_rows(self, tokens: int) -> int:
        return tokens if self.num_places(tokens) else 0

    def num_tiles(self, tokens: int) -> int:
        """Most tiles of a bucket: whole ones, and one of each run that is longer than a piece."""
        small = self.item_tokens and tokens <= self.small_bucket
        return 0 if small else tokens // self.tile_tokens + tokens // (self.item_tokens + 1)

    @cache  # noqa: B019 (engines are few, and so are buckets)
    def _bounds(self, tokens: int) -> list[tuple[int, int]]:
        """Where the fields of `WorkList` begin and end in the packed one."""
        items, split_rows, tiles = self.num_items(tokens), self.num_split_rows(tokens), self.num_tiles(tokens)
        sizes = [1, 1, 1, tokens, tokens, tokens, items, items, split_rows, split_rows, tiles, tiles]
        return list(pairwise(accumulate(sizes, initial=0)))

    def size(self, tokens: int) -> int:
        """int32 values of the packed work list of a bucket of `tokens` rows."""
        return self._bounds(tokens)[-1][1]

    def unpack(self, packed: Int[Array, " size"], tokens: int) -> WorkList:
        """The work list in a packed buffer, sliced inside a jit."""
        fields = [packed[start:end] for start, end in self._bounds(tokens)]
        return WorkList(*(field[0] for field in fields[:3]), *fields[3:])

    def singles(self, rows: int) -> WorkList:
        """Inside a jit: `rows` query rows, each of another sequence and with all of its context."""
        row, none = jnp.arange(rows, dtype=jnp.int32), jnp.zeros(0, jnp.int32)
        one, all_of_it, number = jnp.ones_like(row), jnp.full_like(row, WHOLE), jnp.int32(rows)
        pieces = [row, one, jnp.zeros_like(row)]
        if self.item_tokens:
            return WorkList(number, jnp.int32(0), jnp.int32(0), *pieces, row, all_of_it, none, none, none, none)
        return WorkList(jnp.int32(0), jnp.int32(0), number, *pieces, none, none, none, none, row, one)

    def pack(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, tokens: int) -> np.ndarray:
        """The packed work list [size(tokens)] of the runs (rows[i], starts[i], counts[i]), int32."""
        packed = np.zeros(self.size(tokens), np.int32)
        fields = WorkList(*(packed[start:end] for start, end in self._bounds(tokens)))
        if len(fields.tile_row) and counts.max(initial=0) > self.item_tokens:
            rows, starts, counts = self._cut_tiles(rows, starts, counts, fields)
        pieces = _longest_first(_cut(rows, starts, counts, self.item_tokens)) if self.item_tokens else None
        if pieces is not None and len(pieces.row):
            self._fill_items(pieces, fields, self.num_places(tokens))
        return packed

    def _cut_tiles(self, rows, starts, counts, fields: WorkList):
        """Fill in the tiles; returns what is left of the runs."""
        in_tiles = np.maximum(counts - self.item_tokens + (self.tile_tokens - 1), 0) // self.tile_tokens
        in_tiles = np.minimum(in_tiles * self.tile_tokens, counts)
        tiles = _longest_first(_cut(rows, starts, in_tiles, self.tile_tokens))
        fields.num_tiles[0] = len(tiles.row)
        fields.tile_row[: len(tiles.row)] = tiles.row
        fields.tile_count[: len(tiles.row)] = tiles.count
        return rows + in_tiles, starts + in_tiles, counts - in_tiles

    def _fill_items(self, pieces: Piece, fields: WorkList, places: int) -> None:
        splits = -(-(pieces.start + pieces.count) // self.split)
        needed = np.where(splits > 1, splits * pieces.count, 0)
        ends = needed.cumsum(dtype=np.int32)
        is_split = (splits > 1) & (ends <= places)
        number = len(splits)
        fields.piece_row[:number], fields.piece_count[:number] = pieces.row, pieces.count
        fields.piece_place[:number] = ends - needed

        whole, split = (~is_split).nonzero()[0], is_split.nonzero()[0]
        of_split = splits[split]
        last = of_split.cumsum(dtype=np.int32)
        total = len(whole) + (int(last[-1]) if len(last) else 0)
        fields.num_items[0] = total
        fields.item_piece[: len(whole)] = whole
        fields.item_split[: len(whole)] = WHOLE
        fields.item_piece[len(whole) : total] = split.repeat(of_split)
        within = np.arange(total - len(whole), dtype=np.int32) - (last - of_split).repeat(of_split)
        fields.item_split[len(whole) : total] = within
        if len(split):
            rows = _cut(pieces.row[split], pieces.row[split], pieces.count[split], 1)
            fields.num_split_rows[0] = len(rows.row)
            fields.split_row[: len(rows.row)] = rows.row
            fields.split_piece[: len(rows.row)] = split.repeat(pieces.count[split])


def _cut(rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, most: int) -> Piece:
    """Runs cut into pieces of at most `most` rows."""
    if counts.max(initial=0) <= most:
        real = counts > 0
        return Piece(rows, starts, counts) if real.all() else Piece(rows[real], starts[real], counts[real])
    pieces = -(-counts // most)
    ends = pieces.cumsum(dtype=np.int32)
    offsets = (np.arange(ends[-1], dtype=np.int32) - (ends - pieces).repeat(pieces)) * most
    return Piece(
        rows.repeat(pieces) + offsets,
        starts.repeat(pieces) + offsets,
        np.minimum(counts.repeat(pieces) - offsets, most),
    )


def _longest_first(pieces: Piece) -> Piece:
    """Sorted by context, and those of equal context as they came."""
    order = (-(pieces.start + pieces.count)).argsort(kind="stable")
    return Piece(*(column[order] for column in pieces))
