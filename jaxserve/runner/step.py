"""One step on the device, as pure functions over donated state. Here: the body, and what the others share.

    admit(slots, packed)                                  -> slots                          slots.py
    set_tables(slots, packed)                             -> slots                          slots.py
    copy_pages(kv, sources, targets)                      -> kv                             cache/kv_cache.py
    body(weights, kv, slots, packed)                      -> kv, slots, hidden, finite      per token bucket
    head(lm_head, slots, hidden, packed)                  -> slots, Sampled                 head.py, per row bucket
    masked_head(lm_head, slots, hidden, packed, masks)    -> slots, Sampled                 head.py, per row bucket
    greedy_head(lm_head, slots, hidden, packed)           -> slots, Sampled                 head.py, per row bucket
    score(lm_head, hidden, packed)                        -> Logprobs                       head.py
    score_all(lm_head, hidden, rows)                      -> logprobs [rows, vocab]         head.py
    propose_ngram, propose_by_model, read_drafts                                            proposals.py

The body computes every layer for the scheduled tokens and hands on their hidden rows in an array as large as the
largest bucket, from which the others take the rows they need: so there are (token buckets + row buckets)
programs, not their product. Positions, KV lengths and write places come from the slots: the host only says
which slots run and how many tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Int32

from jaxserve.cache import kv_cache
from jaxserve.cache.kv_cache import PAGES_SPEC, KVCache, LayerKV
from jaxserve.kernels_pallas.cpu.linear import NativeNorm
from jaxserve.kernels_pallas.matmul import LinearKernel
from jaxserve.kernels_pallas.paged_attention import AttentionBackend
from jaxserve.kernels_pallas.verify_draft import REFERENCE, VerifyBackend
from jaxserve.models import decoder
from jaxserve.models.eagle import layer_inputs
from jaxserve.runner.inputs import BodyInputs, DraftInputs, unpack_body
from jaxserve.runner.slots import Slots, keep_states, states_before
from jaxserve.runner.weights import EagleDefinition, EagleWeights, MedusaDefinition, ModelDefinition, Weights
from jaxserve.speculative.ngram import NgramProposer


@dataclass(frozen=True)
class StepDefinition:
    """Everything static that the programs are compiled for.

    proposer: proposes draft tokens from a request's own text
    draft: the model or the head that proposes them where that has none; its layers' pages lie behind those of `model`
    least_chance: a draft of its is the last of a row if with less probability all of them are right
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
    draft: ModelDefinition | EagleDefinition | MedusaDefinition | None = None
    least_chance: float = 0.0
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
        return self.acceptance == "rejection" and self.draft is not None

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
        slots = new_pages(slots, inputs)
        if step.speculates:
            missing = inputs.token_draft > slots.num_drafts.at[inputs.token_slot].get(mode="clip")
            inputs = inputs._replace(token_slot=jnp.where(missing, slots.num_slots, inputs.token_slot))
        back = None
        if step.compacts:
            order, back = real_first(inputs.token_slot < slots.num_slots)
            inputs = inputs._replace(
                token_slot=inputs.token_slot[order],
                token_offset=inputs.token_offset[order],
                token_draft=inputs.token_draft[order],
            )
        num_pages, _, _, page_size, _ = kv[0].pages.shape
        where = locate(slots, inputs.token_slot, inputs.token_offset, num_pages, page_size)
        token_ids = slots.history.at[where.slot, where.position].get(mode="clip")
        slots = _advance(slots, inputs)
    prepared = step.attention.prepare(
        inputs.work, slots.page_table[0], where.slot, where.position, num_pages=num_pages, page_size=page_size
    )
    own = len(step.model.layers)
    between: list[Array] = []
    hidden, layers_kv, finite = run_layers(step, step.model, weights, kv[:own], token_ids, where, prepared, between)
    with jax.named_scope("final_norm"):
        finite &= jnp.isfinite(hidden).all(-1)
        hidden = step.model.norm.build(weights.norm)(hidden, step.norm(where.count))
    # What proposes sees every token when the target does: its pages are always as far as the target's.
    if isinstance(step.draft, EagleDefinition):
        with jax.named_scope("draft_head"):
            states = _states(step, weights.draft, hidden, between, where)
            before = states_before(slots, states, where.slot, where.position)
            layers_kv += run_head_layer(step, weights, kv[own:], token_ids, before, where, prepared)[1]
            slots = keep_states(slots, states, where.slot, where.position)
    elif isinstance(step.draft, MedusaDefinition):
        with jax.named_scope("draft_head"):
            slots = keep_states(slots, hidden, where.slot, where.position)
    elif step.draft is not None:
        with jax.named_scope("draft_model"):
            layers_kv += run_layers(step, step.draft, weights.draft, kv[own:], token_ids, where, prepared, [])[1]
    with jax.named_scope("rows"):
        if back is not None:
            hidden, finite = hidden[back], finite[back]
        hidden = jnp.pad(hidden, ((0, step.max_tokens - tokens), (0, 0)))
    return layers_kv, slots, hidden, finite


def run_layers(
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
    tables = decoder.rope_tables(model.config, where.position)
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


def _states(step: StepDefinition, head: EagleWeights, hidden: Array, between: list[Array], where: Tokens) -> Array:
    """What an EAGLE head continues: the model's last hidden rows (EAGLE-1), or a mixture of several (EAGLE-3)."""
    if head.fc is None:
        return hidden
    chosen = jnp.concatenate([between[index] for index in step.draft.config.aux_layers], axis=-1)
    return step.linear(where.count)(chosen, head.fc)


def run_head_layer(
    step: StepDefinition, weights: Weights, kv: KVCache, token_ids, before: Array, where: Tokens, prepared
) -> tuple[Float[Array, "tokens hidden"], KVCache]:
    """An EAGLE head's layer over some tokens and the states before them. Returns the next states and its pages."""
    draft, head = step.draft, weights.draft
    embed = weights.embed if head.embed is None else head.embed
    embedded = jnp.take(embed, token_ids, axis=0, mode="clip")
    inputs = layer_inputs(embedded, before, where.position == 0)
    tables = decoder.rope_tables(draft.config.layer, where.position)
    states, layer_kv, _ = layer_step(draft.layer, step, head.layer, inputs, tables, kv[0], where, prepared)
    return states, (layer_kv,)


def extent(real: Bool[Array, " rows"]) -> Int32[Array, ""]:
    """How many rows there are up to the last real one."""
    return jnp.where(real, jnp.arange(1, len(real) + 1, dtype=jnp.int32), 0).max()


def real_first(real: Bool[Array, " rows"]) -> tuple[Int32[Array, " rows"], Int32[Array, " rows"]]:
    """An order of rows in which the real ones come first, as they were, and where each row stands in it."""
    order = jnp.argsort(~real, stable=True).astype(jnp.int32)
    return order, jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=jnp.int32))


def new_pages(slots: Slots, inputs: BodyInputs | DraftInputs) -> Slots:
    place = slots.page_table.at[0, inputs.new_page_slot, inputs.new_page_index]
    return slots._replace(page_table=place.set(inputs.new_page, mode="drop"))


def locate(slots: Slots, token_slot, token_offset, num_pages: int, page_size: int) -> Tokens:
    padding = token_slot >= slots.num_slots
    computed = slots.num_computed.at[token_slot].get(mode="clip")
    position = jnp.where(padding, -1, computed + token_offset)
    page = slots.page_table.at[0, token_slot, lax.div(position, jnp.int32(page_size))].get(mode="clip")
    shared = position < slots.write_start.at[token_slot].get(mode="clip")
    return Tokens(
        extent(~padding),
        token_slot,
        position,
        jnp.where(padding | shared, num_pages, page),
        lax.rem(position, jnp.int32(page_size)),
    )


def _advance(slots: Slots, inputs: BodyInputs) -> Slots:
    certain = (inputs.token_draft == 0).astype(jnp.int32)
    return slots._replace(num_computed=slots.num_computed.at[inputs.token_slot].add(certain, mode="drop"))


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
