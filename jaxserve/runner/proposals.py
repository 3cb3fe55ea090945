"""Programs that propose draft tokens, behind each slot's history, and the one that reads them back for the host."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

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


def propose_ngram(slots: Slots, wanted: Int32[Array, " slots"], *, proposer: NgramProposer) -> Slots:
    """Up to `wanted` draft tokens for each slot, put behind its history."""
    with jax.named_scope("propose"):
        length = slots.num_computed + 1  # the last certain token is to be computed by the step that follows
        tokens, found = proposer.propose(slots.history, length)
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        place = jnp.where(index < wanted[:, None], length[:, None] + index, slots.history.shape[1])
        row = jnp.arange(slots.num_slots, dtype=jnp.int32)[:, None]
        history = slots.history.at[row, place].set(tokens, mode="drop")
        return slots._replace(history=history, num_drafts=jnp.where(found, wanted, 0))


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
    num_drafts = jnp.zeros_like(slots.num_drafts).at[inputs.slots].set(inputs.wanted, mode="drop")
    with jax.named_scope("propose"):
        if isinstance(step.draft, MedusaDefinition):
            slots = _guess(step, weights.draft, slots, inputs, before)
        else:
            kv, slots = _decode(step, weights, kv, slots, inputs, before)
    return kv, slots._replace(num_drafts=num_drafts)


def _decode(
    step: StepDefinition, weights: Weights, kv: KVCache, slots: Slots, inputs: DraftInputs, before: Array | None
) -> tuple[KVCache, Slots]:
    """The slots with drafts that a draft model or an EAGLE head decodes one by one, and the pages with its keys."""
    row_slots, wanted = inputs.slots, inputs.wanted
    own = len(step.model.layers)
    num_pages, _, _, page_size, _ = kv[0].pages.shape
    offset = jnp.zeros_like(row_slots)

    def one(index: Array, carry: tuple) -> tuple:
        draft_kv, now, before = carry
        token_slot = jnp.where(index < wanted, row_slots, slots.num_slots)
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
        return draft_kv, put_drafts(step, now, logits, token_slot, index, where.position + 1, known), before

    draft_kv, slots, _ = lax.fori_loop(0, wanted.max(), one, (kv[own:], slots, before))
    return kv[:own] + draft_kv, slots


def _guess(step: StepDefinition, draft: MedusaWeights, slots: Slots, inputs: DraftInputs, state: Array) -> Slots:
    """The slots with drafts of Medusa heads, the i-th from the i-th head, all from the state before the last token."""
    start = slots.num_computed.at[inputs.slots].get(mode="clip") + 1

    def logits_by(number: int) -> Callable[[Array, Array], Array]:
        block = step.draft.block.build(draft.blocks[number])
        head = draft.lm_heads[min(number, len(draft.lm_heads) - 1)]
        return lambda state, count: logits_of(head, block(state, step.linear(count)), step.linear(count))

    heads = [logits_by(number) for number in range(len(draft.blocks))]

    def one(index: Array, now: Slots) -> Slots:
        token_slot = jnp.where(index < inputs.wanted, inputs.slots, slots.num_slots)
        logits = lax.switch(index, heads, state, extent(token_slot < slots.num_slots))
        return put_drafts(step, now, logits, token_slot, index, start + index, draft.token_ids)

    if step.branches:
        return lax.fori_loop(0, inputs.wanted.max(), one, slots)
    for number in range(len(heads)):  # one command buffer; `switch` of a constant is no branch
        slots = one(jnp.int32(number), slots)
    return slots
