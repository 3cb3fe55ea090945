"""Programs over the body's hidden rows: the heads, which sample and verify, and log-probabilities.

A step in which no row asks for more than the largest logit takes the greedy head; the tokens are the same. A step in
which some row may yield only certain tokens takes the masked head, which alone waits for the host to say which.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from jaxserve.kernels_pallas.verify_draft import DraftRows, Verdict, blocks, reached
from jaxserve.kernels_pallas.verify_draft.logprobs import Logprobs, logprobs, whole_logprobs
from jaxserve.kernels_pallas.verify_draft.sampler import SamplingRows
from jaxserve.runner.slots import Slots
from jaxserve.runner.step import StepDefinition, extent, real_first
from jaxserve.sampling.processing import process
from jaxserve.speculative.acceptance import NO_DRAFT, NO_TOKEN, REJECTED

SCORE_ROWS = 64  # rows of logits that scoring holds at once

# All that these programs are given of the weights, so that models of one width and vocabulary share them.
LmHead = Float[Array, "hidden vocab"]


class Sampled(NamedTuple):
    """The head's results per row; rows beyond the scheduled ones are junk.

    Negative tokens are those of `speculative.acceptance`.
    """

    tokens: Int32[Array, " rows"]
    logprobs: Logprobs | None  # None from the greedy head


def head(
    step: StepDefinition,
    lm_head: LmHead,
    slots: Slots,
    hidden: Float[Array, "max_tokens hidden"],
    packed: Int32[Array, "3 rows"],
    masks: UInt32[Array, "rows words"] | None = None,
    *,
    greedy: bool,
) -> tuple[Slots, Sampled]:
    """Sample the next token of each row's slot, verify the drafts, and append what counts to the slot's history.

    `packed` is (row, slot, number of the draft that the row computes); `masks` as `process` takes them. `greedy`
    (static): every row wants the largest logit's token and nothing else.
    """
    from_rows, row_slots, number = packed
    real, back = row_slots < slots.num_slots, None
    if step.speculates:
        real &= number <= slots.num_drafts.at[row_slots].get(mode="clip")
    if step.compacts:
        order, back = real_first(real)
        from_rows, row_slots, number, real = (values[order] for values in (from_rows, row_slots, number, real))
        masks = None if masks is None else masks[order]
    row_slots = jnp.where(real, row_slots, slots.num_slots)
    with jax.named_scope("head"):
        logits = logits_of(lm_head, hidden[from_rows], step.linear(extent(real)))
    position = slots.num_computed.at[row_slots].get(mode="clip") + number
    drafts = None
    if step.speculates:
        drafts = DraftRows(number, slots.history.at[row_slots, position - 1].get(mode="clip"), real)
    if greedy:
        tokens, chosen, alive = blocks.largest(logits)[0], None, jnp.ones_like(real)
        counts = real if drafts is None else reached(drafts, tokens, alive)
    else:
        (tokens, counts, chosen), alive = _sample(step, slots, logits, row_slots, position, drafts, masks)
        counts &= real
    num_computed = slots.num_computed
    if drafts is not None:
        num_computed = num_computed.at[row_slots].add((counts & (number > 0)).astype(jnp.int32), mode="drop")
    kept = jnp.where(alive, tokens, jnp.int32(NO_TOKEN))
    history = slots.history.at[jnp.where(counts, row_slots, slots.num_slots), position].set(kept, mode="drop")
    sampled = Sampled(reported(tokens, alive, real, counts), chosen)
    if back is not None:
        sampled = jax.tree.map(lambda values: values[back], sampled)
    return slots._replace(history=history, num_computed=num_computed), sampled


def reported(
    sampled: Int32[Array, " rows"],
    alive: Bool[Array, " rows"],
    real: Bool[Array, " rows"],
    counts: Bool[Array, " rows"],
) -> Int32[Array, " rows"]:
    """What the host reads for each row: a token, or why there is none."""
    token = jnp.where(alive, sampled, jnp.int32(NO_TOKEN))
    return jnp.where(counts, token, jnp.where(real, jnp.int32(REJECTED), jnp.int32(NO_DRAFT)))


def _sample(
    step: StepDefinition, slots: Slots, logits, row_slots, position, drafts: DraftRows | None, masks
) -> tuple[Verdict, Bool[Array, " rows"]]:
    """What each row yields, and whether there was a token to take."""
    rows = sampling_rows(slots, row_slots)
    padding = row_slots >= slots.num_slots
    rows = rows._replace(wants_logprobs=jnp.where(padding, -1, rows.wants_logprobs))
    processed = process(logits, slots.processing, row_slots, slots.history, position, masks, branches=step.branches)
    how = {}
    if drafts is not None:
        how = {"rule": step.acceptance, "draft_logits": slots.logits_of_drafts(row_slots, drafts.number)}
    reports = {"raw": logits, "max_logprobs": step.max_logprobs, "branches": step.branches}
    verdict = step.verify.judge(processed.logits, rows, position, drafts, processed.alive, **reports, **how)
    return verdict, processed.alive


def sampling_rows(slots: Slots, row_slots: Int32[Array, " rows"]) -> SamplingRows:
    """The parameters of these slots; padding is greedy, which costs nothing."""
    rows = slots.sampling_rows(row_slots)
    return rows._replace(temperature=jnp.where(row_slots >= slots.num_slots, 0.0, rows.temperature))


def score(
    step: StepDefinition,
    lm_head: LmHead,
    hidden: Float[Array, "max_tokens hidden"],
    packed: Int32[Array, "3 rows"],
) -> Logprobs:
    """Log-probabilities of given tokens after given rows; `packed` is (row, token, number of likeliest tokens)."""
    rows, tokens, wanted = packed
    with jax.named_scope("score"):
        logits = logits_of(lm_head, hidden[rows], step.linear(jnp.int32(len(rows))))
        return logprobs(logits, tokens, step.max_logprobs, wanted, branches=step.branches)


def score_all(
    step: StepDefinition, lm_head: LmHead, hidden: Float[Array, "max_tokens hidden"], rows: Int32[Array, " rows"]
) -> Float32[Array, "rows vocab"]:
    """The log-probabilities of the whole vocabulary after given rows."""
    with jax.named_scope("score_all"):
        return whole_logprobs(logits_of(lm_head, hidden[rows], step.linear(jnp.int32(len(rows)))))


def logits_of(lm_head: LmHead, hidden: Float[Array, "rows hidden"], linear: Callable) -> Float32[Array, "rows vocab"]:
    return linear(hidden, lm_head, out_dtype=jnp.float32)
