"""One step on the device, as pure functions over donated state.

    admit(slots, packed)                                  -> slots                          runner/slots.py
    set_tables(slots, packed)                             -> slots                          runner/slots.py
    copy_pages(kv, sources, targets)                      -> kv                             cache/kv_cache.py
    body(weights, kv, slots, packed)                      -> kv, slots, hidden, finite      per token bucket
    head(weights, slots, hidden, packed)                  -> slots, Sampled                 per row bucket
    masked_head(weights, slots, hidden, packed, masks)    -> slots, Sampled                 per row bucket
    greedy_head(weights, slots, hidden, packed)           -> slots, Sampled                 per row bucket
    score(weights, hidden, packed)                        -> Logprobs                       SCORE_ROWS at a time
    score_all(weights, hidden, rows)                      -> logprobs [rows, vocab]         SCORE_ROWS at a time

The body computes every layer for the scheduled tokens and hands on their hidden rows in an array as large as the
largest bucket, from which the others take the rows they need: so there are (token buckets + row buckets)
programs, not their product. Positions, KV lengths and write places come from the slots: the host only says
which slots run and how many tokens. A step in which no row asks for more than the largest logit takes the greedy
head; the tokens are the same. A step in which some row may yield only certain tokens takes the masked head, which
alone waits for the host to say which: `read_drafts` tells it of the draft tokens that are on the device only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt32

from jaxserve.cache import kv_cache
from jaxserve.cache.kv_cache import PAGES_SPEC, KVCache, LayerKV
from jaxserve.kernels_pallas.cpu.linear import NativeNorm
from jaxserve.kernels_pallas.matmul import LinearKernel
from jaxserve.kernels_pallas.paged_attention import AttentionBackend
from jaxserve.kernels_pallas.verify_draft import REFERENCE, DraftRows, VerifyBackend, blocks, reached
from jaxserve.kernels_pallas.verify_draft.logprobs import Logprobs, logprobs, whole_logprobs
from jaxserve.kernels_pallas.verify_draft.sampler import SamplingRows
from jaxserve.models import decoder, rope
from jaxserve.models.config import ModelConfig
from jaxserve.models.draft_head import layer_inputs
from jaxserve.runner.inputs import BodyInputs, DraftInputs, unpack_body, unpack_drafts
from jaxserve.runner.slots import KEPT_STATES, Slots, keep_states, states_before
from jaxserve.runner.weights import HeadDefinition, HeadWeights, ModelDefinition, Weights
from jaxserve.sampling.processing import asked, process
from jaxserve.sampling_params import COLDEST
from jaxserve.speculative.acceptance import NO_TOKEN
from jaxserve.speculative.ngram import NgramProposer
from jaxserve.speculative.verification import reported

SCORE_ROWS = 64  # rows of logits that scoring holds at once


@dataclass(frozen=True)
class StepDefinition:
    """Everything static that the programs are compiled for.

    proposer: proposes draft tokens from a request's own text
    draft: the model or the head that proposes them instead; its layers' pages lie behind those of `model`
    acceptance: the rule by which drafts are accepted, of `config.ACCEPTANCE_RULES`
    """

    model: ModelDefinition
    attention: AttentionBackend
    max_tokens: int  # the largest token bucket
    max_logprobs: int
    mesh: jax.sharding.Mesh | None = None
    linear_kernel: LinearKernel | None = None
    native_norm: NativeNorm | None = None
    verify: VerifyBackend = REFERENCE
    proposer: NgramProposer | None = None
    draft: ModelDefinition | HeadDefinition | None = None
    acceptance: str = "agreement"
    constrains: bool = False  # whether rows may bring masks

    @property
    def speculates(self) -> bool:
        """Whether runs may have draft tokens."""
        return self.proposer is not None or self.draft is not None

    @property
    def branches(self) -> bool:
        """Whether programs branch around what no row asks for. On a GPU a branch ends the command buffer and the host
        waits for what decides it, so there it is computed, to no effect where no row asks."""
        return self.verify.name != "mosaic"

    @property
    def keeps_draft_logits(self) -> bool:
        """Whether slots remember what drafts were sampled from: the text of a request leaves no choice."""
        return self.acceptance == "rejection" and self.speculates and self.proposer is None

    @property
    def compacts(self) -> bool:
        """Whether rows of drafts that do not exist are moved behind all others: native functions leave them out."""
        return self.speculates and self.attention.name == "native"

    def linear(self, count: Int[Array, ""]) -> Callable:
        """The product `linear(x, weight, out_dtype=None)` of a program whose first `count` rows are no padding."""
        return decoder.linear if self.linear_kernel is None else partial(self.linear_kernel, count=count)

    def norm(self, count: Int[Array, ""]) -> Callable:
        """The norm `norm(x, scale, eps)` of such a program."""
        return decoder.rms_norm if self.native_norm is None else partial(self.native_norm, count=count)


class Sampled(NamedTuple):
    """The head's results per row; rows beyond the scheduled ones are junk.

    Negative tokens are those of `speculative.acceptance`.
    """

    tokens: Int32[Array, " rows"]
    logprobs: Logprobs | None  # None from the greedy head


class Tokens(NamedTuple):
    """Where each query row stands: `position` is -1 and `page` out of range for rows that do not exist, which all rows
    from `count` on are: padding and, before them, drafts that were not proposed."""

    count: Int[Array, ""]
    slot: Int[Array, " tokens"]
    position: Int[Array, " tokens"]
    page: Int[Array, " tokens"]
    offset: Int[Array, " tokens"]


def body(
    step: StepDefinition,
    weights: Weights,
    kv: KVCache,
    slots: Slots,
    packed: Int32[Array, " size"],
    *,
    tokens: int,
) -> tuple[KVCache, Slots, Float[Array, "max_tokens hidden"], Bool[Array, " tokens"]]:
    """Compute the scheduled tokens. Returns their hidden rows for the head and which rows stayed finite."""
    inputs = unpack_body(packed, tokens, step.attention.work)
    with jax.named_scope("tables"):
        slots = _new_pages(slots, inputs)
        if step.speculates:
            missing = inputs.token_draft > slots.num_drafts.at[inputs.token_slot].get(mode="clip")
            inputs = inputs._replace(token_slot=jnp.where(missing, slots.num_slots, inputs.token_slot))
        back = None
        if step.compacts:
            order, back = _real_first(inputs.token_slot < slots.num_slots)
            inputs = inputs._replace(
                token_slot=inputs.token_slot[order],
                token_offset=inputs.token_offset[order],
                token_draft=inputs.token_draft[order],
            )
        num_pages, _, _, page_size, _ = kv[0].pages.shape
        where = _locate(slots, inputs.token_slot, inputs.token_offset, num_pages, page_size)
        token_ids = slots.history.at[where.slot, where.position].get(mode="clip")
        slots = _advance(slots, inputs)
    prepared = step.attention.prepare(
        inputs.work, slots.page_table[0], where.slot, where.position, num_pages=num_pages, page_size=page_size
    )
    own = len(step.model.layers)
    between: list[Array] = []
    hidden, layers_kv, finite = _layers(step, step.model, weights, kv[:own], token_ids, where, prepared, between)
    with jax.named_scope("final_norm"):
        finite &= jnp.isfinite(hidden).all(-1)
        hidden = step.model.norm.build(weights.norm)(hidden, step.norm(where.count))
    # What proposes sees every token when the target does: its pages are always as far as the target's.
    if isinstance(step.draft, HeadDefinition):
        with jax.named_scope("draft_head"):
            states = _states(step, weights.draft, hidden, between, where)
            before = states_before(slots, states, where.slot, where.position)
            layers_kv += _head_layer(step, weights, kv[own:], token_ids, before, where, prepared)[1]
            slots = keep_states(slots, states, where.slot, where.position)
    elif step.draft is not None:
        with jax.named_scope("draft_model"):
            layers_kv += _layers(step, step.draft, weights.draft, kv[own:], token_ids, where, prepared, [])[1]
    with jax.named_scope("rows"):
        if back is not None:
            hidden, finite = hidden[back], finite[back]
        hidden = jnp.pad(hidden, ((0, step.max_tokens - tokens), (0, 0)))
    return layers_kv, slots, hidden, finite


def _layers(
    step: StepDefinition,
    model: ModelDefinition,
    weights: Weights,
    kv: KVCache,
    token_ids,
    where: Tokens,
    prepared,
    between: list[Array],
) -> tuple[Float[Array, "tokens hidden"], KVCache, Bool[Array, " tokens"]]:
    """All layers of a model over some tokens. Returns hidden rows, pages, and whose keys and values were finite;
    `between` gets the hidden rows in front of each layer and behind the last."""
    hidden = jnp.take(weights.embed, token_ids, axis=0, mode="clip")
    tables = _rope_tables(model.config, where)
    finite = jnp.ones(token_ids.shape, bool)
    layers_kv = []
    for definition, leaves, layer_kv in zip(model.layers, weights.layers, kv, strict=True):
        between.append(hidden)
        with jax.named_scope("layer"):
            hidden, layer_kv, wrote_finite = layer_step(
                definition, step, leaves, hidden, tables, layer_kv, where, prepared
            )
        layers_kv.append(layer_kv)
        finite &= wrote_finite
    between.append(hidden)
    return hidden, tuple(layers_kv), finite


def _rope_tables(config: ModelConfig, where: Tokens) -> decoder.RopeTables:
    frequencies = rope.inverse_frequencies(config.rope_theta, config.head_dim, config.rope_scaling)
    return rope.rope_tables(where.position, frequencies, config.rope_scaling.attention_factor)


def _states(step: StepDefinition, head: HeadWeights, hidden: Array, between: list[Array], where: Tokens) -> Array:
    """What a draft head continues: the model's last hidden rows (EAGLE-1), or a mixture of several (EAGLE-3)."""
    if head.fc is None:
        return hidden
    chosen = jnp.concatenate([between[index] for index in step.draft.config.aux_layers], axis=-1)
    return step.linear(where.count)(chosen, head.fc)


def _head_layer(
    step: StepDefinition, weights: Weights, kv: KVCache, token_ids, before: Array, where: Tokens, prepared
) -> tuple[Float[Array, "tokens hidden"], KVCache]:
    """A draft head's layer over some tokens and the states before them. Returns the next states and its pages."""
    draft, head = step.draft, weights.draft
    embed = weights.embed if head.embed is None else head.embed
    embedded = jnp.take(embed, token_ids, axis=0, mode="clip")
    inputs = layer_inputs(embedded, before, where.position == 0)
    tables = _rope_tables(draft.config.layer, where)
    states, layer_kv, _ = layer_step(draft.layer, step, head.layer, inputs, tables, kv[0], where, prepared)
    return states, (layer_kv,)


def head(
    step: StepDefinition,
    weights: Weights,
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
        order, back = _real_first(real)
        from_rows, row_slots, number, real = (values[order] for values in (from_rows, row_slots, number, real))
        masks = None if masks is None else masks[order]
    row_slots = jnp.where(real, row_slots, slots.num_slots)
    with jax.named_scope("head"):
        logits = logits_of(weights.head, hidden[from_rows], step.linear(_extent(real)))
    position = slots.num_computed.at[row_slots].get(mode="clip") + number
    drafts = None
    if step.speculates:
        drafts = DraftRows(number, slots.history.at[row_slots, position - 1].get(mode="clip"), real)
    if greedy:
        tokens, chosen, alive = blocks.largest(logits)[0], None, jnp.ones_like(real)
    else:
        tokens, chosen, alive = _sample(step, slots, logits, row_slots, position, drafts, masks)
    counts, num_computed = real, slots.num_computed
    if drafts is not None:
        with jax.named_scope("verify"):
            counts = reached(drafts, tokens, alive)
            num_computed = num_computed.at[row_slots].add((counts & (number > 0)).astype(jnp.int32), mode="drop")
    kept = jnp.where(alive, tokens, jnp.int32(NO_TOKEN))
    history = slots.history.at[jnp.where(counts, row_slots, slots.num_slots), position].set(kept, mode="drop")
    sampled = Sampled(reported(tokens, alive, real, counts), chosen)
    if back is not None:
        sampled = jax.tree.map(lambda values: values[back], sampled)
    return slots._replace(history=history, num_computed=num_computed), sampled


def _extent(real: Bool[Array, " rows"]) -> Int32[Array, ""]:
    """How many rows there are up to the last real one."""
    return jnp.where(real, jnp.arange(1, len(real) + 1, dtype=jnp.int32), 0).max()


def _real_first(real: Bool[Array, " rows"]) -> tuple[Int32[Array, " rows"], Int32[Array, " rows"]]:
    """An order of rows in which the real ones come first, as they were, and where each row stands in it."""
    order = jnp.argsort(~real, stable=True).astype(jnp.int32)
    return order, jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=jnp.int32))


def _sample(
    step: StepDefinition, slots: Slots, logits, row_slots, position, drafts: DraftRows | None, masks
) -> tuple[Array, Logprobs, Array]:
    """The token that each row yields, its log-probabilities, and whether there was one to take."""
    rows = _sampling_rows(slots, row_slots)
    padding = row_slots >= slots.num_slots
    rows = rows._replace(wants_logprobs=jnp.where(padding, -1, rows.wants_logprobs))
    processed = process(logits, slots.processing, row_slots, slots.history, position, masks, branches=step.branches)
    if drafts is None:
        tokens = step.verify.sample(processed.logits, rows, position)
    else:
        extras = {"rule": step.acceptance, "draft_logits": slots.logits_of_drafts(row_slots, drafts.number)}
        tokens = step.verify.verify_draft(processed.logits, rows, position, drafts, **extras)
    chosen = logprobs(logits, tokens, step.max_logprobs, rows.wants_logprobs, branches=step.branches)
    return tokens, chosen, processed.alive


def _sampling_rows(slots: Slots, row_slots: Int32[Array, " rows"]) -> SamplingRows:
    """The parameters of these slots; padding is greedy, which costs nothing."""
    rows = slots.sampling_rows(row_slots)
    return rows._replace(temperature=jnp.where(row_slots >= slots.num_slots, 0.0, rows.temperature))


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
    rows = _sampling_rows(slots, row_slots)

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


def score(
    step: StepDefinition,
    weights: Weights,
    hidden: Float[Array, "max_tokens hidden"],
    packed: Int32[Array, "3 rows"],
) -> Logprobs:
    """Log-probabilities of given tokens after given rows; `packed` is (row, token, number of likeliest tokens)."""
    rows, tokens, wanted = packed
    with jax.named_scope("score"):
        logits = logits_of(weights.head, hidden[rows], step.linear(jnp.int32(len(rows))))
        return logprobs(logits, tokens, step.max_logprobs, wanted, branches=step.branches)


def score_all(
    step: StepDefinition, weights: Weights, hidden: Float[Array, "max_tokens hidden"], rows: Int32[Array, " rows"]
) -> Float32[Array, "rows vocab"]:
    """The log-probabilities of the whole vocabulary after given rows."""
    with jax.named_scope("score_all"):
        return whole_logprobs(logits_of(weights.head, hidden[rows], step.linear(jnp.int32(len(rows)))))


def logits_of(
    head: Float[Array, "hidden vocab"], hidden: Float[Array, "rows hidden"], linear: Callable
) -> Float32[Array, "rows vocab"]:
    return linear(hidden, head, out_dtype=jnp.float32)


def _new_pages(slots: Slots, inputs: BodyInputs | DraftInputs) -> Slots:
    place = slots.page_table.at[0, inputs.new_page_slot, inputs.new_page_index]
    return slots._replace(page_table=place.set(inputs.new_page, mode="drop"))


def _locate(slots: Slots, token_slot, token_offset, num_pages: int, page_size: int) -> Tokens:
    padding = token_slot >= slots.num_slots
    computed = slots.num_computed.at[token_slot].get(mode="clip")
    position = jnp.where(padding, -1, computed + token_offset)
    page = slots.page_table.at[0, token_slot, lax.div(position, jnp.int32(page_size))].get(mode="clip")
    shared = position < slots.write_start.at[token_slot].get(mode="clip")
    return Tokens(
        _extent(~padding),
        token_slot,
        position,
        jnp.where(padding | shared, num_pages, page),
        lax.rem(position, jnp.int32(page_size)),
    )


def _advance(slots: Slots, inputs: BodyInputs) -> Slots:
    certain = (inputs.token_draft == 0).astype(jnp.int32)
    return slots._replace(num_computed=slots.num_computed.at[inputs.token_slot].add(certain, mode="drop"))


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
    """Draft tokens for at most `rows` slots. The draft model or head decodes them one by one."""
    inputs = unpack_drafts(packed, rows, step.max_tokens)
    slots = _new_pages(slots, inputs)
    row_slots, wanted = inputs.slots, inputs.wanted
    own = len(step.model.layers)
    num_pages, _, _, page_size, _ = kv[0].pages.shape
    offset = jnp.zeros_like(row_slots)

    before = None
    if slots.states is not None:
        last = (slots.num_computed.at[row_slots].get(mode="clip") - 1) % KEPT_STATES
        before = slots.states.at[row_slots, last].get(mode="clip")

    def one(index: Array, carry: tuple) -> tuple:
        draft_kv, now, before = carry
        token_slot = jnp.where(index < wanted, row_slots, slots.num_slots)
        where = _locate(now, token_slot, offset + index, num_pages, page_size)
        token_ids = now.history.at[where.slot, where.position].get(mode="clip")
        work = step.attention.work.singles(len(row_slots))
        prepared = step.attention.prepare(
            work, slots.page_table[0], where.slot, where.position, num_pages=num_pages, page_size=page_size
        )
        if isinstance(step.draft, HeadDefinition):
            hidden, draft_kv = _head_layer(step, weights, draft_kv, token_ids, before, where, prepared)
            before, known = hidden, weights.draft.token_ids
        else:
            hidden, draft_kv, _ = _layers(step, step.draft, weights.draft, draft_kv, token_ids, where, prepared, [])
            known = None
        if step.draft.norm is not None:
            hidden = step.draft.norm.build(weights.draft.norm)(hidden, step.norm(where.count))
        head = weights.head if weights.draft.head is None else weights.draft.head
        logits = logits_of(head, hidden, step.linear(where.count))
        return draft_kv, put_drafts(step, now, logits, token_slot, index, where.position + 1, known), before

    with jax.named_scope("propose"):
        draft_kv, slots, _ = lax.fori_loop(0, wanted.max(), one, (kv[own:], slots, before))
    num_drafts = jnp.zeros_like(slots.num_drafts).at[row_slots].set(wanted, mode="drop")
    return kv[:own] + draft_kv, slots._replace(num_drafts=num_drafts)


@partial(jax.jit, static_argnums=(0, 1))
def layer_step(definition, step: StepDefinition, leaves, hidden, tables, kv: LayerKV, where: Tokens, prepared):
    """One layer; an inner jit, so that layers of one structure are traced and lowered once."""
    pages, finite = kv.pages, None

    def attend(q, k, v, *, scale: float, window: int | None):
        nonlocal pages, finite
        paged = partial(_paged, step.attention, scale=scale, window=window)
        if step.mesh is not None:
            heads = P(None, "model", None)
            paged = jax.shard_map(
                paged,
                mesh=step.mesh,
                in_specs=(heads, heads, heads, PAGES_SPEC, P(), P()),
                out_specs=(heads, PAGES_SPEC, P(None, "model")),
                check_vma=False,
            )
        out, pages, head_finite = paged(q, k, v, pages, where, prepared)
        finite = head_finite.all(1)
        return out

    hidden = definition.build(leaves)(hidden, tables, attend, step.linear(where.count), step.norm(where.count))
    return hidden, kv._replace(pages=pages), finite


def _paged(attention, q, k, v, pages, where: Tokens, prepared, *, scale, window):
    with jax.named_scope("write_kv"):
        pages, finite = kv_cache.write(pages, k, v, where.page, where.offset)
    with jax.named_scope("paged_attention"):
        out = attention.attend(q, pages, prepared, scale=scale, window=window)
    return out, pages, finite[:, None]
