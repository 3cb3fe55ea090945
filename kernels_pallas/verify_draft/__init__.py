"""Sampling and the verification of drafts: one contract, a token for each row of logits.

    tokens, counts, logprobs = backend.judge(logits, rows, positions, drafts, alive, raw=, max_logprobs=)     all of it
    tokens = backend.sample(logits, rows, positions)
    tokens = backend.verify_draft(logits, rows, positions, drafts, rule=, draft_logits=)
    counts = reached(drafts, tokens, alive)                                                     whose tokens count

By the rule `agreement` the two give the same tokens, so a step that speculates gives those of steps that do not.
`reference` is the definition (with the sampler in `sampler.py`) and runs everywhere; `mosaic` is for Hopper.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jaxserve.kernels_pallas.capability import why_no_hopper
from jaxserve.kernels_pallas.verify_draft import reference, sampler
from jaxserve.kernels_pallas.verify_draft.drafts import DraftLogits, DraftRows, reached
from jaxserve.kernels_pallas.verify_draft.logprobs import Logprobs, logprobs
from jaxserve.kernels_pallas.verify_draft.sampler import SamplingRows

__all__ = ["BACKENDS", "REFERENCE", "DraftLogits", "DraftRows", "Verdict", "VerifyBackend", "choose_verify", "reached"]


class Verdict(NamedTuple):
    """The token that each row yields, and its log-probabilities. `counts`: the row's token stands; in a run as many as
    drafts were accepted, and one more, the token that follows them."""

    tokens: Int32[Array, " rows"]
    counts: Bool[Array, " rows"]
    logprobs: Logprobs


class VerifyBackend(NamedTuple):
    """One implementation of the contract."""

    name: str
    sample: Callable
    verify_draft: Callable

    def judge(
        self,
        logits: Float32[Array, "rows vocab"],
        rows: SamplingRows,
        positions: Int32[Array, " rows"],
        drafts: DraftRows | None,
        alive: Bool[Array, " rows"],
        *,
        raw: Float32[Array, "rows vocab"],
        max_logprobs: int,
        branches: bool = True,
        **how: Any,
    ) -> Verdict:
        """Sample or verify, by `how` (see `verify_draft`), say what stands, and report log-probabilities of `raw`.

        `alive`: some token of a row's `logits` was left to sample. Without drafts every row stands.
        """
        if drafts is None:
            tokens, counts = self.sample(logits, rows, positions), jnp.ones_like(alive)
        else:
            tokens = self.verify_draft(logits, rows, positions, drafts, **how)
            counts = reached(drafts, tokens, alive)
        return Verdict(tokens, counts, logprobs(raw, tokens, max_logprobs, rows.wants_logprobs, branches=branches))


REFERENCE = VerifyBackend("reference", sampler.sample, reference.verify_draft)
BACKENDS = ("auto", "reference", "mosaic")


def mosaic_backend() -> VerifyBackend:
    """The kernels, wherever they are compiled for."""
    from jaxserve.kernels_pallas.verify_draft import mosaic  # a second of imports

    return VerifyBackend("mosaic", mosaic.sample, mosaic.verify_draft)


def choose_verify(backend: str = "auto", *, device: Any = None, mesh: jax.sharding.Mesh | None = None) -> VerifyBackend:
    """The implementation behind a name of `BACKENDS`; `auto` is `mosaic` where it runs.

    ValueError if `mosaic` is asked for where it cannot run.
    """
    if backend == "reference":
        return REFERENCE
    on_mesh = None if mesh is None else "it runs on one device, not on a mesh"
    reason = on_mesh or why_no_hopper(device or jax.local_devices()[0])
    if reason is None:
        return mosaic_backend()
    if backend == "mosaic":
        raise ValueError(f"verify_backend='mosaic': verify_backend must be one that works here: {reason}")
    return REFERENCE
