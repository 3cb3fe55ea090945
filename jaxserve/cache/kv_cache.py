"""The pages on the device: one donated array per layer, written in place.

    pages[num_pages, 2 (keys, values), kv_heads, page_size, head_dim]

A page of one layer is one contiguous piece, so it can be copied, swapped or sent as such, and splits over a
mesh by kv_heads. Everything in the pool is finite at all times: it starts as zeros, and `write` replaces what
is not finite, because a masked NaN still poisons a product (0 * NaN is NaN).
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

PAGES_SPEC = PartitionSpec(None, None, "model")


class LayerKV(NamedTuple):
    """One layer's pages; `scales` has its place for quantised pages and is None today."""

    pages: Float[Array, "num_pages 2 kv_heads page_size head_dim"]
    scales: Array | None = None


@dataclass(frozen=True)
class KVLayout:
    """Shape and size of the pool. `draft` is that of a draft model's layers, which lie behind, under the same pages."""

    num_layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: jnp.dtype
    draft: "KVLayout | None" = None

    def shape(self, num_pages: int) -> tuple[int, int, int, int, int]:
        return (num_pages, 2, self.kv_heads, self.page_size, self.head_dim)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page in all layers."""
        own = self.num_layers * 2 * self.kv_heads * self.page_size * self.head_dim * jnp.dtype(self.dtype).itemsize
        return own + (self.draft.bytes_per_page if self.draft is not None else 0)


KVCache = tuple[LayerKV, ...]


def abstract(layout: KVLayout, num_pages: int, mesh: jax.sharding.Mesh | None = None) -> tuple:
    """The shapes of a pool, in its trees."""
    sharding = None if mesh is None else NamedSharding(mesh, PAGES_SPEC)
    pages = jax.ShapeDtypeStruct(layout.shape(num_pages), layout.dtype, sharding=sharding)
    draft = abstract(layout.draft, num_pages, mesh) if layout.draft is not None else ()
    return tuple(LayerKV._make((pages, None)) for _ in range(layout.num_layers)) + draft


def allocate(layout: KVLayout, num_pages: int, mesh: jax.sharding.Mesh | None = None) -> KVCache:
    """A pool of zeros, split by kv_heads where a mesh is given."""
    sharding = None if mesh is None else NamedSharding(mesh, PAGES_SPEC)
    zeros = jax.jit(lambda: jnp.zeros(layout.shape(num_pages), layout.dtype), out_shardings=sharding)
    draft = allocate(layout.draft, num_pages, mesh) if layout.draft is not None else ()
    return tuple(LayerKV(zeros()) for _ in range(layout.num_layers)) + draft


def write(
    pages: Float[Array, "num_pages 2 kv_heads page_size head_dim"],
    keys: Float[Array, "tokens kv_heads head_dim"],
    values: Float[Array, "tokens kv_heads head_dim"],
    page: Int[Array, " tokens"],
    offset: Int[Array, " tokens"],
) -> tuple[Float[Array, "num_pages 2 kv_heads page_size head_dim"], Bool[Array, " tokens"]]:
    """The pages with the tokens' keys and values, and which tokens were finite. A page out of range is not written."""
    kv = jnp.stack([keys, values], axis=1).astype(pages.dtype)
    finite = jnp.isfinite(kv)
    kv = jnp.where(finite, kv, jnp.zeros((), kv.dtype))
    return pages.at[page, :, :, offset].set(kv, mode="drop"), finite.all((1, 2, 3))


def copy_pages(kv: KVCache, sources: Int[Array, " copies"], targets: Int[Array, " copies"]) -> KVCache:
    """Copy whole pages in every layer; a target out of range is dropped, sources are read before any write."""
    copied = []
    for layer in kv:
        pages = layer.pages.at[targets].set(layer.pages.at[sources].get(mode="clip"), mode="drop")
        # One layer after the other: XLA would read the sources of all layers first, and keep them.
        sources, pages = lax.optimization_barrier((sources, pages))
        copied.append(layer._replace(pages=pages))
    return tuple(copied)
