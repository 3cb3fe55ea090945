"""KV blocks: which of them a tile of query rows sees, and how they come from the pages."""

from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.kernels_pallas.hopper import ROWS, Interpret, product_transposed
from jaxserve.kernels_pallas.paged_attention.mosaic.config import COLUMNS, KV_BLOCK, columns_of
from jaxserve.kernels_pallas.paged_attention.mosaic.online_softmax import Scale, mask


class Span(NamedTuple):
    """Consecutive query positions of one sequence, the first and the last, and how far back each of them sees."""

    first: Int[Array, ""]
    last: Int[Array, ""]
    window: int | None

    def blocks(self) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """The blocks [begin, end) of which any of the positions sees a key."""
        begin = jnp.int32(0)
        if self.window is not None:
            begin = lax.div(jnp.maximum(self.first - (self.window - 1), 0), jnp.int32(KV_BLOCK))
        return begin, lax.div(self.last, jnp.int32(KV_BLOCK)) + 1

    def is_edge(self, block: Int[Array, ""]) -> Array:
        """Whether some position does not see the whole block."""
        edge = (block + 1) * KV_BLOCK - 1 > self.first
        return edge if self.window is None else edge | (block * KV_BLOCK <= self.last - self.window)


def block_scores(q_s, k_s, positions, span: Span, block, scale: Scale, *, interpret: Interpret):
    """Scores of a block, capped, with -inf where a row does not see a key; only blocks on an edge are masked.

    `q_s` [1, 64, head_dim] and `k_s` [64, head_dim] are in SMEM.
    """
    # 0 either way: a compiler that knew it would keep the addresses of all columns of the queries in registers.
    again = 0 if k_s.shape[1] <= COLUMNS else lax.div(block, jnp.int32(1 << 24))
    s = scale.cap(product_transposed(q_s.at[again], k_s, interpret=interpret))
    masked = lambda s: mask(s, block * KV_BLOCK, positions, span.window)
    return lax.cond(span.is_edge(block), masked, lambda s: s, s)


class Pages(NamedTuple):
    """One layer's pages as pieces of at most a block: `pieces` [pages * 2 * kv_heads * per_page, piece, head_dim] and
    the page table [slots, max_pages], both in GMEM; the slot of a sequence and its last page that is in use.

    What the table holds behind that page is never read: the last page is copied again, and its keys are masked.
    """

    pieces: object
    table: object
    kv_heads: int
    page_size: int
    slot: Int[Array, ""]
    last_page: Int[Array, ""]

    @property
    def per_block(self) -> int:
        """Pieces of a block."""
        return max(KV_BLOCK // self.page_size, 1)

    def ids(self, block: Int[Array, ""]) -> list[Int[Array, ""]]:
        """For each piece of a block its number within keys or values of a head, times heads: see `copy`."""
        per_page = max(self.page_size // KV_BLOCK, 1)
        ids = []
        for i in range(self.per_block):
            piece = block * self.per_block + i
            page = piece if per_page == 1 else lax.div(piece, jnp.int32(per_page))
            id = self.table[self.slot, jnp.minimum(page, self.last_page)] * (2 * self.kv_heads * per_page)
            ids.append(id if per_page == 1 else id + lax.rem(piece, jnp.int32(per_page)))
        return ids

    def copy(self, ids: list[Int[Array, ""]], side: int, head, columns, block_s, ready) -> None:
        """Start to copy these columns of a block's keys (side 0) or values (side 1) of a head into SMEM; `ready` counts
        the pieces."""
        per_page = max(self.page_size // KV_BLOCK, 1)
        size = KV_BLOCK // self.per_block
        for i, id in enumerate(ids):
            piece = id + (side * self.kv_heads + head) * per_page
            target = block_s if len(ids) == 1 else block_s.at[pl.ds(i * size, size)]
            plgpu.copy_gmem_to_smem(self.pieces.at[piece, pl.ds(0, size), columns], target, ready)


class Share(NamedTuple):
    """What of the work a program takes in one turn."""

    row: Int[Array, ""]  # of the work list
    head: Int[Array, ""]  # kv head
    part: Int[Array, ""] | int  # of the columns of the values
    columns: object  # these, as a slice

    @classmethod
    def of(cls, index: Int[Array, ""], kv_heads: int, head_dim: int) -> "Share":
        """The `index`-th of `count` shares. Parts of one head follow each other: what reads its keys runs together."""
        columns = columns_of(head_dim)
        parts = head_dim // columns
        if parts > 1:
            index, part = lax.div(index, jnp.int32(parts)), lax.rem(index, jnp.int32(parts))
        else:
            part = 0
        row, head = lax.div(index, jnp.int32(kv_heads)), lax.rem(index, jnp.int32(kv_heads))
        return cls(row, head, part, pl.ds(part * columns, columns))

    @staticmethod
    def count(rows: Int[Array, ""], kv_heads: int, head_dim: int) -> Int[Array, ""]:
        return rows * (kv_heads * (head_dim // columns_of(head_dim)))


def pieces_of(pages: Float[Array, "num_pages 2 kv_heads page_size head_dim"]) -> Array:
    """The pages as `Pages.pieces`: the same memory, seen otherwise."""
    return pages.reshape(-1, min(pages.shape[3], KV_BLOCK), pages.shape[4])


def load_queries(q_g, head, first_row, q_s) -> None:
    """Bring 64 rows of `q_g` [kv_heads, rows, head_dim] from any first row on into a swizzled tile [1, 64, head_dim].

    Through registers: a bulk copy into a swizzled tile would have to start at a multiple of 8 rows.
    """
    columns = columns_of(q_s.shape[2])
    for part in range(q_s.shape[2] // columns):
        mine = pl.ds(part * columns, columns)
        rows = q_g.at[head, pl.ds(first_row, ROWS), mine]
        q_s[0, :, mine] = plgpu.load(rows, layout=plgpu.Layout.WGMMA, optimized=False)
    plgpu.commit_smem()


def rows_by_head(q: Float[Array, "tokens heads head_dim"], kv_heads: int, padding: int) -> Array:
    """[kv_heads, tokens * group + padding, head_dim]: the rows that read the same keys together."""
    tokens, heads, head_dim = q.shape
    rows = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim).swapaxes(0, 1)
    return jnp.pad(rows.reshape(kv_heads, -1, head_dim), ((0, 0), (0, padding), (0, 0)))
