"""Sampling and the verification of drafts: one contract.

    tokens = backend.sample(logits, rows, positions)                                            one token a row
    verified = backend.verify_draft(logits, draft_tokens, num_drafts, rows, positions, rule=, ...)     several

`sample` is `verify_draft` without drafts. `reference` is the definition, with the sampler in `sampler.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxserve.kernels_pallas.verify_draft import reference, sampler


class VerifyBackend(NamedTuple):
    """One implementation of the contract."""

    name: str
    sample: Callable
    verify_draft: Callable


REFERENCE = VerifyBackend("reference", sampler.sample, reference.verify_draft)
