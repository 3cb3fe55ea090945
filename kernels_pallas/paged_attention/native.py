"""Paged attention for CPUs in C++ (cpu/native.cc), called through XLA's FFI.

The pages are read where they are, through the page table; rows of a prompt chunk share unpacked keys and values.
Blocks hold 64 keys counted from position 0, as in `xla`, and every product is one chain of float32 additions, so
a row's bits do not depend on its tile, its company, the page size or the threads.
"""

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxserve.kernels_pallas.paged_attention.reference import Prepared

HEAD_DIM_MULTIPLE = 8


@dataclass(frozen=True)
class NativeAttention:
    """`attend` of the contract."""

    target: str

    def __call__(
        self,
        q: Float[Array, "tokens heads head_dim"],
        pages: Float[Array, "num_pages 2 kv_heads page_size head_dim"],
        prepared: Prepared,
        *,
        scale: float,
        window: int | None = None,
    ) -> Float[Array, "tokens heads head_dim"]:
        """What `paged_attention_reference` defines, with zeros in padding rows; arithmetic is float32 throughout."""
        call = jax.ffi.ffi_call(self.target, jax.ShapeDtypeStruct(q.shape, q.dtype))
        return call(q, pages, *prepared, scale=np.float32(scale), window=np.int64(window or 0))
