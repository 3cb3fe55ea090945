"""Which drafts are accepted: those that the target itself would have sampled at their positions.

Every row of a run is sampled with its own position's noise, as it would be without speculation. A draft is accepted
if the row before it sampled just this token, so a request's tokens do not depend on what was drafted.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxserve.speculative.acceptance import NO_DRAFT, NO_TOKEN, REJECTED


class DraftRows(NamedTuple):
    """Rows of the head, those of a run behind each other: row i of a run computes draft i (0: the last certain token).

    token: the draft token that a row computes, anything where `number` is 0
    real: whether it exists; the real rows of a run come first
    """

    number: Int32[Array, " rows"]
    token: Int32[Array, " rows"]
    real: Bool[Array, " rows"]


def reached(drafts: DraftRows, sampled: Int32[Array, " rows"], alive: Bool[Array, " rows"]) -> Bool[Array, " rows"]:
    """Which rows' samples count: all before them in their run were right.

    `alive`: some token was left to sample; a later row without one is not reached, so that the request meets it as
    the first row of its next step.
    """
    agrees = drafts.real & alive & (drafts.token == jnp.roll(sampled, 1))
    later = drafts.number > 0
    wrong = jnp.cumsum((later & ~agrees).astype(jnp.int32))
    rows = jnp.arange(len(sampled), dtype=jnp.int32)
    before_run = wrong[jnp.maximum(rows - drafts.number, 0)]  # the run's first row adds nothing itself
    return drafts.real & (wrong == before_run)


def reported(
    sampled: Int32[Array, " rows"],
    alive: Bool[Array, " rows"],
    real: Bool[Array, " rows"],
    counts: Bool[Array, " rows"],
) -> Int32[Array, " rows"]:
    """What the host reads for each row: a token, or why there is none."""
    token = jnp.where(alive, sampled, jnp.int32(NO_TOKEN))
    return jnp.where(counts, token, jnp.where(real, jnp.int32(REJECTED), jnp.int32(NO_DRAFT)))
