"""One step on the device, as pure functions over donated state.

    admit(slots, packed)                                  -> slots                          runner/slots.py
    set_tables(slots, packed)                             -> slots                          runner/slots.py
    copy_pages(kv, sources, targets)                      -> kv                             cache/kv_cache.py
    body(weights, kv, slots, packed)                      -> kv, slots, hidden, finite      per token bucket
    head(weights, slots, hidden, packed)                  -> slots, Sampled                 per row bucket
    greedy_head(weights, slots, hidden, packed)           -> slots, Sampled                 per row bucket
    score(weights, hidden, packed)                        -> Logprobs                       SCORE_ROWS at a time
    score_all(weights, hidden, rows)                      -> logprobs [rows, vocab]         SCORE_ROWS at a time

The body computes every layer for the scheduled tokens and hands on their hidden rows in an array as large as the
largest bucket, from which the others take the rows they need: so there are (token buckets + row buckets)
programs, not their product. Positions, KV lengths and write places come from the slots: the host only says
which slots run and how many tokens. A step in which no row asks for more than the largest logit takes the greedy
head; the tokens are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from jaxserve.cache import kv_cache
from jaxserve.cache.kv_cache import PAGES_SPEC, KVCache, LayerKV
from jaxserve.kernels_pallas.cpu.linear import NativeNorm
from jaxserve.kernels_pallas.matmul import LinearKernel
from jaxserve.kernels_pallas.paged_attention import AttentionBackend
from jaxserve.models import decoder, rope
from jaxserve.runner.inputs import BodyInputs, unpack_body
from jaxserve.runner.slots import Slots
from jaxserve.runner.weights import ModelDefinition, Weights
from jaxserve.sampling import blocks
from jaxserve.sampling.logprobs import Logprobs, logprobs, whole_logprobs
from jaxserve.sampling.processing import process
from jaxserve.sampling.sampler import sample

SCORE_ROWS = 64  # rows of logits that scoring holds at once


@dataclass(frozen=True)
class StepDefinition:
    """Everything static that the programs are compiled for."""

    model: ModelDefinition
    attention: AttentionBackend
    max_tokens: int  # the largest token bucket
    max_logprobs: int
    mesh: jax.sharding.Mesh | None = None
    linear_kernel: LinearKernel | None = None
    native_norm: NativeNorm | None = None

    def linear(self, count: Int[Array, ""]) -> Callable:
        """The product `linear(x, weight, out_dtype=None)` of a program whose first `count` rows are no padding."""
        return decoder.linear if self.linear_kernel is None else partial(self.linear_kernel, count=count)

    def norm(self, count: Int[Array, ""]) -> Callable:
        """The norm `norm(x, scale, eps)` of such a program."""
        return decoder.rms_norm if self.native_norm is None else partial(self.native_norm, count=count)


class Sampled(NamedTuple):
    """The head's results per row; rows beyond the scheduled ones are junk. A token of -1: none was left."""

    tokens: Int32[Array, " rows"]
    logprobs: Logprobs | None  # None from the greedy head


class Tokens(NamedTuple):
    """Where each query row stands: `position` is -1 and `page` out of range for padding, the rows from `count` on."""

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
        num_pages, _, _, page_size, _ = kv[0].pages.shape
        where = _locate(slots, inputs, num_pages, page_size)
        token_ids = slots.history.at[where.slot, where.position].get(mode="clip")
        slots = _advance(slots, inputs)
    hidden = jnp.take(weights.embed, token_ids, axis=0, mode="clip")
    config = step.model.config
    frequencies = rope.inverse_frequencies(config.rope_theta, config.head_dim, config.rope_scaling)
    tables = rope.rope_tables(where.position, frequencies, config.rope_scaling.attention_factor)
    finite = jnp.ones(tokens, bool)
    prepared = step.attention.prepare(
        inputs.work, slots.page_table[0], where.slot, where.position, num_pages=num_pages, page_size=page_size
    )
    layers_kv = []
    for definition, leaves, layer_kv in zip(step.model.layers, weights.layers, kv, strict=True):
        with jax.named_scope("layer"):
            hidden, layer_kv, wrote_finite = layer_step(
                definition, step, leaves, hidden, tables, layer_kv, where, prepared
            )
        layers_kv.append(layer_kv)
        finite &= wrote_finite
    with jax.named_scope("final_norm"):
        finite &= jnp.isfinite(hidden).all(-1)
        hidden = step.model.norm.build(weights.norm)(hidden, step.norm(where.count))
        hidden = jnp.pad(hidden, ((0, step.max_tokens - tokens), (0, 0)))
    return tuple(layers_kv), slots, hidden, finite


def head(
    step: StepDefinition,
    weights: Weights,
    slots: Slots,
    hidden: Float[Array, "max_tokens hidden"],
    packed: Int32[Array, "2 rows"],
    *,
    greedy: bool,
) -> tuple[Slots, Sampled]:
    """Sample the next token of each row's slot and append it to the slot's history; `packed` is (row, slot).

    `greedy` (static): every row wants the largest logit's token and nothing else.
    """
    from_rows, row_slots = packed
    with jax.named_scope("head"):
        linear = step.linear((row_slots < slots.num_slots).sum(dtype=jnp.int32))
        logits = logits_of(weights.head, hidden[from_rows], linear)
    position = slots.num_computed.at[row_slots].get(mode="clip")
    if greedy:
        tokens, chosen = blocks.largest(logits)[0], None
    else:
        tokens, chosen = _sample(step, slots, logits, row_slots, position)
    history = slots.history.at[row_slots, position].set(tokens, mode="drop")
    return slots._replace(history=history), Sampled(tokens, chosen)


def _sample(step: StepDefinition, slots: Slots, logits, row_slots, position) -> tuple[Int32[Array, " rows"], Logprobs]:
    rows = slots.sampling_rows(row_slots)
    padding = row_slots >= slots.num_slots
    rows = rows._replace(
        temperature=jnp.where(padding, 0.0, rows.temperature),
        wants_logprobs=jnp.where(padding, -1, rows.wants_logprobs),
    )
    processed = process(logits, slots.processing, row_slots, slots.history, position)
    tokens = sample(processed.logits, rows, position)
    chosen = logprobs(logits, tokens, step.max_logprobs, rows.wants_logprobs)
    return jnp.where(processed.alive, tokens, -1), chosen


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
        return logprobs(logits, tokens, step.max_logprobs, wanted)


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


def _new_pages(slots: Slots, inputs: BodyInputs) -> Slots:
    place = slots.page_table.at[0, inputs.new_page_slot, inputs.new_page_index]
    return slots._replace(page_table=place.set(inputs.new_page, mode="drop"))


def _locate(slots: Slots, inputs: BodyInputs, num_pages: int, page_size: int) -> Tokens:
    padding = inputs.token_slot >= slots.num_slots
    computed = slots.num_computed.at[inputs.token_slot].get(mode="clip")
    position = jnp.where(padding, -1, computed + inputs.token_offset)
    page = slots.page_table.at[0, inputs.token_slot, lax.div(position, jnp.int32(page_size))].get(mode="clip")
    shared = position < slots.write_start.at[inputs.token_slot].get(mode="clip")
    return Tokens(
        (~padding).sum(dtype=jnp.int32),
        inputs.token_slot,
        position,
        jnp.where(padding | shared, num_pages, page),
        lax.rem(position, jnp.int32(page_size)),
    )


def _advance(slots: Slots, inputs: BodyInputs) -> Slots:
    return slots._replace(num_computed=slots.num_computed.at[inputs.token_slot].add(1, mode="drop"))


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
