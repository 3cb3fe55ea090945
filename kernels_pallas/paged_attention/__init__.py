"""Paged attention: one contract, several implementations.

    prepared = backend.prepare(work, page_table, token_slot, positions, num_pages=, page_size=)     once a step
    out = backend.attend(q, pages, prepared, scale=, window=)                                       once a layer

`attend` reads the pages that the step has already written its own keys and values to. `reference` is the
definition, `xla` runs on CPUs and every other XLA device.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxserve.kernels_pallas.paged_attention import reference, xla


class AttentionBackend(NamedTuple):
    """One implementation of the contract."""

    name: str
    prepare: Callable
    attend: Callable


REFERENCE = AttentionBackend("reference", reference.prepare, reference.paged_attention_reference)
XLA = AttentionBackend("xla", xla.prepare, xla.paged_attention_xla)


def choose_attention(backend: str) -> AttentionBackend:
    """The implementation behind a name of `config.ATTENTION_BACKENDS`; `auto` is `xla`."""
    return {"auto": XLA, "xla": XLA, "reference": REFERENCE}[backend]
