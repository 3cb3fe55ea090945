"""Draft tokens among the rows of logits that a step samples.

The rows of a run stand behind each other: the one of its last certain token, then those of its drafts. Row i of a run
computes draft i (0: the certain token) and yields the token behind it, which says whether draft i + 1 was right.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32


class DraftRows(NamedTuple):
    """`token` is the draft token that a row computes, anything where `number` is 0; `real` says whether it exists. The
    real rows of a run come first."""

    number: Int32[Array, " rows"]
    token: Int32[Array, " rows"]
    real: Bool[Array, " rows"]

    def next(self) -> "NextDraft":
        """The draft that stands behind each row."""
        exists = jnp.roll(self.real & (self.number > 0), -1).at[-1].set(False)
        return NextDraft(exists, jnp.roll(self.token, -1))


class NextDraft(NamedTuple):
    """The draft that each row decides about; `token` is anything where none exists."""

    exists: Bool[Array, " rows"]
    token: Int32[Array, " rows"]


class DraftLogits(NamedTuple):
    """What drafts were sampled from by their rows' own parameters, -inf for tokens that the proposer does not know.

    `row` says where in `logits` that of each row's own draft stands: anything where there is no draft.
    """

    logits: Float32[Array, "drafts vocab"]
    row: Int32[Array, " rows"]

    def next_row(self) -> Int32[Array, " rows"]:
        """The row of the draft that stands behind each row, in range wherever there is none."""
        return jnp.clip(jnp.roll(self.row, -1), 0, len(self.logits) - 1)


def reached(drafts: DraftRows, tokens: Int32[Array, " rows"], alive: Bool[Array, " rows"]) -> Bool[Array, " rows"]:
    """Which rows count, under either rule: those behind drafts that are all what the row before them yields.

    `alive`: some token was left to sample; a later row without one is not reached, so that the request meets it as
    the first row of its next step.
    """
    agrees = drafts.real & alive & (drafts.token == jnp.roll(tokens, 1))
    later = drafts.number > 0
    wrong = jnp.cumsum((later & ~agrees).astype(jnp.int32))
    rows = jnp.arange(len(tokens), dtype=jnp.int32)
    before_run = wrong[jnp.maximum(rows - drafts.number, 0)]  # the run's first row adds nothing itself
    return drafts.real & (wrong == before_run)
