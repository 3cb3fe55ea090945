"""Programs that propose draft tokens, behind each slot's history, and the one that reads them back for the host.

Where a model or a head proposes, a look into the request's own text may come first (as suffix decoding and a trained
speculator share the work in Arctic Inference): what is found there is longer, and costs nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jaxserve.cache.kv_cache import KVCache
from jaxserve.kernels_pallas.verify_draft import blocks
from jaxserve.runner.head import logits_of, sampling_rows
from jaxserve.runner.inputs import DraftInputs, unpack_drafts
from jaxserve.runner.slots import KEPT_STATES, Slots
from jaxserve.runner.step import StepDefinition, extent, locate, new_pages, run_head_layer, run_layers
from jaxserve.runner.weights import EagleDefinition, MedusaDefinition, MedusaWeights, Weights
from jaxserve.sampling.processing import asked, process
from jaxserve.sampling_params import COLDEST
from jaxserve.speculative.ngram import NgramProposer


def put_drafts(
    step: StepDefinition,
    slots: Slots,
    logits: Float32[Array, "rows known"],
    row_slots,
    index,
    position,
    token_ids: Int32[Array, " known"] | None = None,
) -> Slots:
    """The slots with a draft token sampled from a proposer's logits, the `index`-th of each row's slot (from 0 on).

    It is sampled as the target's would be, by the request's own parameters and that position's noise, so that the two
    agree more often. `token_ids`: the tokens that the proposer knows; None is all.
    """
    rows = sampling_rows(slots, row_slots)

    def sample() -> tuple[Array, Array]:
        everything = logits
        if token_ids is not None:
            nothing = jnp.full((len(logits), step.model.config.vocab_size), -jnp.inf, jnp.float32)
            everything = nothing.at[:, token_ids].set(logits)
        processed = process(
            everything, slots.processing, row_slots, slots.history, position, branches=step.branches
        ).logits
        return step.verify.sample(processed, rows, position), processed

    if token_ids is None or step.keeps_draft_logits or not step.branches:
        return slots.with_drafts(row_slots, index, position, *sample())
    # What costs as much as the whole vocabulary's head is left out where the largest logit is all that is asked for.
    plain = (rows.temperature < COLDEST) & ~asked(slots.processing, row_slots, position, slots.num_slots)
    tokens = lax.cond(plain.all(), lambda: token_ids[blocks.largest(logits)[0]], lambda: sample()[0])
    return slots.with_drafts(row_slots, index, position, tokens, logits)


def propose_ngram(slots: Slots, packed: Int32[Array, "2 rows"], *, proposer: NgramProposer) -> Slots:
    """Up to `packed[1]` draft tokens for each of the slots `packed[0]` (padding: num_slots), put behind its history."""
    row_slots, wanted = packed
    with jax.named_scope("propose"):
        slots, found = _look_up(proposer, slots, row_slots, wanted)
        return _with_num_drafts(slots, row_slots, jnp.where(found, wanted, 0))


def _look_up(
    proposer: NgramProposer, slots: Slots, row_slots: Int32[Array, " rows"], wanted: Int32[Array, " rows"]
) -> tuple[Slots, Bool[Array, " rows"]]:
    """The slots with the drafts that are found in their own texts, and for which rows there are any."""
    length = slots.num_computed.at[row_slots].get(mode="clip") + 1  # the step that follows computes the last token
    tokens, found = proposer.propose(slots.history.at[row_slots].get(mode="clip"), length)
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    place = jnp.where(found[:, None] & (index < wanted[:, None]), length[:, None] + index, slots.history.shape[1])
    return slots._replace(history=slots.history.at[row_slots[:, None], place].set(tokens, mode="drop")), found


def _with_num_drafts(slots: Slots, row_slots: Int32[Array, " rows"], count: Int32[Array, " rows"]) -> Slots:
    none = jnp.zeros_like(slots.num_drafts)
    return slots._replace(num_drafts=none.at[row_slots].set(count, mode="drop"))


def read_drafts(slots: Slots, *, count: int) -> Int32[Array, "slots count"]:
    """The draft tokens behind each slot's history, before the body; -1 where there is none."""
    index = jnp.arange(count, dtype=jnp.int32)[None]
    row = jnp.arange(slots.num_slots, dtype=jnp.int32)[:, None]
    drafts = slots.history.at[row, slots.num_computed[:, None] + 1 + index].get(mode="clip")
    return jnp.where(index < slots.num_drafts[:, None], drafts, -1)


def propose_by_model(
    step: StepDefinition, weights: Weights, kv: KVCache, slots: Slots, packed: Int32[Array, " size"], *, rows: int
) -> tuple[KVCache, Slots]:
    """Draft tokens for at most `rows` slots, by a draft model or a head."""
    inputs = unpack_drafts(packed, rows, step.max_tokens)
    slots = new_pages(slots, inputs)
    before = None
    if slots.states is not None:
        last = (slots.num_computed.at[inputs.slots].get(mode="clip") - 1) % KEPT_STATES
        before = slots.states.at[inputs.slots, last].get(mode="clip")
    with jax.named_scope("propose"):
        found = jnp.zeros(rows, bool)
        if step.proposer is not None:
            slots, found = _look_up(step.proposer, slots, inputs.slots, inputs.wanted)
        left = inputs._replace(wanted=jnp.where(found, 0, inputs.wanted))
        if isinstance(step.draft, MedusaDefinition):
            slots, count = _guess(step, weights.draft, slots, left, before)
        else:
            kv, slots, count = _decode(step, weights, kv, slots, left, before)
    return kv, _with_num_drafts(slots, inputs.slots, jnp.where(found, inputs.wanted, count))


class Drafting(NamedTuple):
    """How many drafts each row is to have, and how probably those that it has are all right by its lights."""

    count: Int32[Array, " rows"]
    chance: Float32[Array, " rows"]

    @classmethod
    def start(cls, wanted: Int32[Array, " rows"]) -> "Drafting":
        return cls(wanted, jnp.ones(wanted.shape, jnp.float32))

    def after(self, step: StepDefinition, logits: Float32[Array, "rows known"], index: Array) -> "Drafting":
        """With the `index`-th draft, the last one of rows that are no longer sure enough."""
        if step.least_chance <= 0:
            return self
        likeliest = 1 / jnp.exp(logits - logits.max(-1, keepdims=True)).sum(-1)
        chance = self.chance * likeliest
        return Drafting(jnp.where(chance < step.least_chance, jnp.minimum(self.count, index + 1), self.count), chance)


def _decode(
    step: StepDefinition, weights: Weights, kv: KVCache, slots: Slots, inputs: DraftInputs, before: Array | None
) -> tuple[KVCache, Slots, Int32[Array, " rows"]]:
    """The slots with drafts that a draft model or an EAGLE head decodes one by one, the pages with its keys, and how
    many drafts there are."""
    row_slots = inputs.slots
    own = len(step.model.layers)
    num_pages, _, _, page_size, _ = kv[0].pages.shape
    offset = jnp.zeros_like(row_slots)

    def one(carry: tuple) -> tuple:
        index, draft_kv, now, before, drafting = carry
        token_slot = jnp.where(index < drafting.count, row_slots, slots.num_slots)
        where = locate(now, token_slot, offset + index, num_pages, page_size)
        token_ids = now.history.at[where.slot, where.position].get(mode="clip")
        work = step.attention.work.singles(len(row_slots))
        prepared = step.attention.prepare(
            work, slots.page_table[0], where.slot, where.position, num_pages=num_pages, page_size=page_size
        )
        if isinstance(step.draft, EagleDefinition):
            hidden, draft_kv = run_head_layer(step, weights, draft_kv, token_ids, before, where, prepared)
            before, known = hidden, weights.draft.token_ids
        else:
            hidden, draft_kv, _ = run_layers(step, step.draft, weights.draft, draft_kv, token_ids, where, prepared, [])
            known = None
        if step.draft.norm is not None:
            hidden = step.draft.norm.build(weights.draft.norm)(hidden, step.norm(where.count))
        head = weights.head if weights.draft.head is None else weights.draft.head
        logits = logits_of(head, hidden, step.linear(where.count))
        now = put_drafts(step, now, logits, token_slot, index, where.position + 1, known)
        return index + 1, draft_kv, now, before, drafting.after(step, logits, index)

    carry = jnp.int32(0), kv[own:], slots, before, Drafting.start(inputs.wanted)
    _, draft_kv, slots, _, drafting = lax.while_loop(lambda carry: carry[0] < carry[-1].count.max(), one, carry)
    return kv[:own] + draft_kv, slots, drafting.count


def _guess(
    step: StepDefinition, draft: MedusaWeights, slots: Slots, inputs: DraftInputs, state: Array
) -> tuple[Slots, Int32[Array, " rows"]]:
    """The slots with drafts of Medusa heads, the i-th from the i-th head, all from the state before the last token, and
    how many there are."""
    start = slots.num_computed.at[inputs.slots].get(mode="clip") + 1

    def logits_by(number: int) -> Callable[[Array, Array], Array]:
        block = step.draft.block.build(draft.blocks[number])
        head = draft.lm_heads[min(number, len(draft.lm_heads) - 1)]
        return lambda state, count: logits_of(head, block(state, step.linear(count)), step.linear(count))

    heads = [logits_by(number) for number in range(len(draft.blocks))]

    def one(carry: tuple) -> tuple:
        index, now, drafting = carry
        token_slot = jnp.where(index < drafting.count, inputs.slots, slots.num_slots)
        logits = lax.switch(index, heads, state, extent(token_slot < slots.num_slots))
        now = put_drafts(step, now, logits, token_slot, index, start + index, draft.token_ids)
        return index + 1, now, drafting.after(step, logits, index)

    carry = jnp.int32(0), slots, Drafting.start(inputs.wanted)
    if step.branches:
        carry = lax.while_loop(lambda carry: carry[0] < carry[-1].count.max(), one, carry)
    else:
        for number in range(len(heads)):  # one command buffer; `switch` of a constant is no branch
            carry = one((jnp.int32(number), *carry[1:]))
    return carry[1], carry[2].count
