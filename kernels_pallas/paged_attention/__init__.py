"""Paged attention: one contract, several implementations.

    work = backend.work.unpack(backend.work.pack(rows, starts, counts, tokens), tokens)             once a step
    prepared = backend.prepare(work, page_table, token_slot, positions, num_pages=, page_size=)     once a step
    out = backend.attend(q, pages, prepared, scale=, window=)                                       once a layer

`attend` reads the pages that the step has already written its own keys and values to. `reference` is the
definition, `xla` runs on every XLA device, `native` is C++ for CPUs with a compiler, `mosaic` is for Hopper GPUs.
All but `native` also take `logit_soft_cap`.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.kernels_pallas.capability import why_no_hopper
from jaxserve.kernels_pallas.cpu.library import Unavailable, load_native
from jaxserve.kernels_pallas.paged_attention import native, reference, xla
from jaxserve.kernels_pallas.paged_attention.work_list import NONE, TILES, WorkFormat

_log = logging.getLogger("jaxserve")
_ON_ONE_DEVICE = "it runs on one device, not on a mesh"


class AttentionBackend(NamedTuple):
    """One implementation of the contract. `page_size` is what suits it where nothing else is asked for."""

    name: str
    prepare: Callable
    attend: Callable
    work: WorkFormat
    page_size: int = 16


REFERENCE = AttentionBackend("reference", reference.prepare, reference.paged_attention_reference, NONE)
XLA = AttentionBackend("xla", xla.prepare, xla.paged_attention_xla, TILES)


def choose_attention(
    backend: str,
    *,
    head_dim: int = native.HEAD_DIM_MULTIPLE,
    group: int = 1,
    dtype: jnp.dtype = jnp.dtype("bfloat16"),  # noqa: B008
    max_model_len: int = 1,
    mesh: jax.sharding.Mesh | None = None,
    device: Any = None,
) -> AttentionBackend:
    """The implementation behind a name of `config.ATTENTION_BACKENDS`, for a model with `group` query heads a KV head
    and contexts of at most `max_model_len`, on `device` (the first unless given); `auto` is `mosaic` on Hopper,
    `native` where it can be had, else `xla`.

    What the kernels of `mosaic` do not take goes to `xla`, which is logged. ValueError if `mosaic` or `native` is
    asked for where it cannot run.
    """
    if backend in ("reference", "xla"):
        return {"xla": XLA, "reference": REFERENCE}[backend]
    if backend in ("auto", "mosaic"):
        reason = why_no_hopper(device or jax.local_devices()[0]) if mesh is None else _ON_ONE_DEVICE
        if reason is None:
            return _mosaic_or_xla(head_dim, group, jnp.dtype(dtype), max_model_len)
        if backend == "mosaic":
            raise ValueError(f"attention_backend='mosaic': attention_backend must be one that works here: {reason}")
    return _native_or_xla(backend, head_dim, mesh)


def _mosaic_or_xla(head_dim: int, group: int, dtype: jnp.dtype, max_model_len: int) -> AttentionBackend:
    from jaxserve.kernels_pallas.paged_attention import mosaic

    reason = mosaic.not_taken(head_dim=head_dim, group=group, dtype=dtype)
    if reason is not None:
        _log.warning("attention_backend: 'xla' instead of 'mosaic', because %s", reason)
        return XLA
    return mosaic_backend(mosaic.mosaic_attention(head_dim=head_dim, group=group, max_model_len=max_model_len))


def mosaic_backend(attention) -> AttentionBackend:
    """The backend of a `mosaic.MosaicAttention`, wherever it runs (tests interpret it on the CPU)."""
    from jaxserve.kernels_pallas.paged_attention import mosaic

    return AttentionBackend("mosaic", mosaic.prepare, attention, attention.work, mosaic.DEFAULT_PAGE_SIZE)


def _native_or_xla(backend: str, head_dim: int, mesh: jax.sharding.Mesh | None) -> AttentionBackend:
    reason = None
    if mesh is not None:
        reason = _ON_ONE_DEVICE
    elif head_dim % native.HEAD_DIM_MULTIPLE:
        reason = f"head_dim={head_dim} is no multiple of {native.HEAD_DIM_MULTIPLE}"
    elif isinstance(library := load_native(), Unavailable):
        reason = library.reason
    else:
        return AttentionBackend("native", reference.prepare, native.NativeAttention(library.paged_attention), NONE)
    if backend == "native":
        raise ValueError(f"attention_backend='native': attention_backend must be one that works here: {reason}")
    return XLA
