"""Paged attention: one contract, several implementations.

    prepared = backend.prepare(work, page_table, token_slot, positions, num_pages=, page_size=)     once a step
    out = backend.attend(q, pages, prepared, scale=, window=)                                       once a layer

`attend` reads the pages that the step has already written its own keys and values to. `reference` is the
definition, `xla` runs on every XLA device, `native` is C++ for CPUs with a compiler.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxserve.kernels_pallas.cpu.library import Unavailable, load_native
from jaxserve.kernels_pallas.paged_attention import native, reference, xla


class AttentionBackend(NamedTuple):
    """One implementation of the contract."""

    name: str
    prepare: Callable
    attend: Callable


REFERENCE = AttentionBackend("reference", reference.prepare, reference.paged_attention_reference)
XLA = AttentionBackend("xla", xla.prepare, xla.paged_attention_xla)


def choose_attention(
    backend: str, *, head_dim: int = native.HEAD_DIM_MULTIPLE, mesh: jax.sharding.Mesh | None = None
) -> AttentionBackend:
    """The implementation behind a name of `config.ATTENTION_BACKENDS`; `auto` is `native` where it can be had.

    ValueError if `native` is asked for where it cannot.
    """
    if backend in ("reference", "xla"):
        return {"xla": XLA, "reference": REFERENCE}[backend]
    reason = None
    if mesh is not None:
        reason = "it runs on one device, not on a mesh"
    elif head_dim % native.HEAD_DIM_MULTIPLE:
        reason = f"head_dim={head_dim} is no multiple of {native.HEAD_DIM_MULTIPLE}"
    elif isinstance(library := load_native(), Unavailable):
        reason = library.reason
    else:
        return AttentionBackend("native", reference.prepare, native.NativeAttention(library.paged_attention))
    if backend == "native":
        raise ValueError(f"attention_backend='native': attention_backend must be one that works here: {reason}")
    return XLA
