"""Paged attention: one contract, several implementations.

    attention(q, pages, page_table, token_slot, positions, work, *, scale, window) -> like q

`reference` is the definition, `xla` runs on CPUs and every other XLA device. Both read the pages that the step
has already written its own keys and values to.
"""

from collections.abc import Callable

from jaxtyping import Array

from jaxserve.kernels_pallas.paged_attention.reference import paged_attention_reference
from jaxserve.kernels_pallas.paged_attention.xla import paged_attention_xla




def _reference(q, pages, page_table, token_slot, positions, work, *, scale, window) -> Array:
    return paged_attention_reference(q, pages, page_table, token_slot, positions, scale=scale, window=window)


def choose_attention(backend: str) -> Callable[..., Array]:
    """The implementation behind a name of `BACKENDS`; `auto` is `xla`."""
    return {"auto": paged_attention_xla, "xla": paged_attention_xla, "reference": _reference}[backend]
