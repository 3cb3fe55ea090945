"""What requests ask of their logits before the sampler: masks, biases, bad words, min_tokens, penalties.

With the results of vLLM's order. Everything is computed from the slot's tables and its token history, so there are no
counts to keep and nothing to restore after a preemption. A row's logits do not depend on the other rows, and for a row
that asks for nothing they do not change (x / 1, x * 1, x - 0 and x + 0 are exact).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jaxserve.sampling.tables import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_IDS

_CHUNK = 128  # positions of the history counted at a time


class Processing(NamedTuple):
    """Per slot; positions are in tokens. The tables are valid where the numbers say so."""

    repetition: Float32[Array, " slots"]
    presence: Float32[Array, " slots"]
    frequency: Float32[Array, " slots"]
    prompt_length: Int32[Array, " slots"]
    min_length: Int32[Array, " slots"]  # before this position no stop token is sampled
    has_bias: Bool[Array, " slots"]
    num_bad_words: Int32[Array, " slots"]
    bias: Float32[Array, "slots vocab"]
    bad_words: Int32[Array, "slots words tokens"]  # filled up with -1 in front
    stop_ids: Int32[Array, "slots ids"]  # filled up with vocab


class Processed(NamedTuple):
    """`alive`: some token is left to be sampled; where none is, the first is there for the sampler's sake."""

    logits: Float32[Array, "rows vocab"]
    alive: Bool[Array, " rows"]


def allocate(num_slots: int, vocab: int) -> Processing:
    """Slots that ask for nothing."""
    row = lambda dtype, *shape: jnp.zeros((num_slots, *shape), dtype)
    return Processing(
        repetition=jnp.ones(num_slots, jnp.float32),
        presence=row(jnp.float32),
        frequency=row(jnp.float32),
        prompt_length=row(jnp.int32),
        min_length=row(jnp.int32),
        has_bias=row(jnp.bool_),
        num_bad_words=row(jnp.int32),
        bias=row(jnp.float32, vocab),
        bad_words=row(jnp.int32, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS),
        stop_ids=row(jnp.int32, MAX_STOP_IDS),
    )


def bytes_per_slot(vocab: int) -> int:
    """Bytes of the tables."""
    return 4 * (vocab + MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS + MAX_STOP_IDS)


def set_tables(state: Processing, packed: Int32[Array, " size"]) -> Processing:
    """The tables of one slot from what `LogitsTables.pack` packed."""
    slot, vocab = packed[0], state.bias.shape[1]
    words = MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS
    bias = lax.bitcast_convert_type(packed[1 : 1 + vocab], jnp.float32)
    bad_words = packed[1 + vocab : 1 + vocab + words].reshape(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
    return state._replace(
        bias=state.bias.at[slot].set(bias),
        bad_words=state.bad_words.at[slot].set(bad_words),
        stop_ids=state.stop_ids.at[slot].set(packed[1 + vocab + words :]),
    )


def mask_words(vocab: int) -> int:
    """32-bit words of a row's mask: a bit for each token, and one more, by which the host says that the output may
    end."""
    return vocab // 32 + 1


def process(
    logits: Float32[Array, "rows vocab"],
    state: Processing,
    slots: Int32[Array, " rows"],
    history: Int32[Array, "slots max_len"],
    positions: Int32[Array, " rows"],
    masks: UInt32[Array, "rows words"] | None = None,
    *,
    branches: bool = True,
) -> Processed:
    """The logits that the sampler takes; `positions` are those of the tokens to be sampled.

    `masks` has a bit for each token that a row may yield, the first tokens in the first word's lowest bits.
    A slot out of range is padding: its row is left as it is. What no row asks for is not computed, or without
    `branches` (static) to no effect: the results are the same.
    """
    where_asked = lax.cond if branches else lambda asked, change, otherwise: change()
    real = slots < history.shape[0]
    take = lambda values: values.at[slots].get(mode="clip")
    biased = real & take(state.has_bias)
    penalties = [take(values) for values in (state.repetition, state.presence, state.frequency)]
    penalised = real & ((penalties[0] != 1) | (penalties[1] != 0) | (penalties[2] != 0))
    num_bad_words = jnp.where(real, take(state.num_bad_words), 0)
    early = real & (positions < take(state.min_length))
    prompt_length = take(state.prompt_length)

    def shifted() -> Array:
        with jax.named_scope("bias"):
            add = lambda: logits + jnp.where(biased[:, None], take(state.bias), jnp.float32(0))
            changed = where_asked(jnp.any(biased), add, lambda: logits)
        with jax.named_scope("penalties"):
            length = jnp.where(penalised, positions, 0)
            chunk = _CHUNK if branches else history.shape[1]
            count = lambda: _occurrences(history, slots, prompt_length, length, logits.shape[1], chunk)
            penalise = lambda: _penalties(changed, count(), *penalties)
            return where_asked(jnp.any(penalised), penalise, lambda: changed)

    def masked() -> tuple[Array, Array]:
        allowed = kept if masks is None else _constrain(kept, masks)
        with jax.named_scope("bad_words"):
            words = lambda: (take(state.bad_words), num_bad_words)
            banned = lambda: _bad_words(allowed, *words(), slots, history, positions, prompt_length)
            changed = where_asked(jnp.any(num_bad_words > 0), banned, lambda: allowed)
        with jax.named_scope("min_tokens"):
            ids = jnp.where(early[:, None], take(state.stop_ids), logits.shape[1])
            changed = _forbid(changed, ids)
        alive = (changed > -jnp.inf).any(1) | ~asked
        stand_in = jnp.where(alive, logits.shape[1], 0)[:, None]
        return changed.at[lax.iota(jnp.int32, len(real))[:, None], stand_in].set(0, mode="drop"), alive

    with jax.named_scope("process_logits"):
        # What is forbidden stays so under penalties, so it may come last, in place, when the counts are gone.
        kept = where_asked(jnp.any(biased | penalised), shifted, lambda: logits)
        asked = real if masks is not None else biased | (num_bad_words > 0) | early
        return Processed(*where_asked(jnp.any(asked), masked, lambda: (kept, jnp.ones_like(real))))


def _constrain(
    logits: Float32[Array, "rows vocab"], masks: UInt32[Array, "rows words"]
) -> Float32[Array, "rows vocab"]:
    """The logits with -inf where the bit is not set."""
    with jax.named_scope("constrain"):
        bits = lax.shift_right_logical(masks[:, :, None], lax.iota(jnp.uint32, 32)[None, None]) & jnp.uint32(1)
        allowed = bits.reshape(len(masks), -1)[:, : logits.shape[1]] == 1
        return jnp.where(allowed, logits, -jnp.inf)


def asked(
    state: Processing, slots: Int32[Array, " rows"], positions: Int32[Array, " rows"], num_slots: int
) -> Bool[Array, " rows"]:
    """Which rows `process` may change."""
    take = lambda values: values.at[slots].get(mode="clip")
    penalised = (take(state.repetition) != 1) | (take(state.presence) != 0) | (take(state.frequency) != 0)
    masked = take(state.has_bias) | (take(state.num_bad_words) > 0) | (positions < take(state.min_length))
    return (slots < num_slots) & (penalised | masked)


def _forbid(logits: Float32[Array, "rows vocab"], ids: Int32[Array, "rows n"]) -> Float32[Array, "rows vocab"]:
    """The logits with -inf at the ids; an id of `vocab` is none."""
    rows = lax.iota(jnp.int32, logits.shape[0])[:, None]
    return logits.at[rows, ids].set(-jnp.inf, mode="drop")


def _bad_words(logits, words, num_words, slots, history, positions, prompt_length):
    """Forbid the last token of each bad word whose other tokens end the output so far."""
    before = lax.iota(jnp.int32, MAX_BAD_WORD_TOKENS - 1) - (MAX_BAD_WORD_TOKENS - 1)
    at = positions[:, None] + before
    recent = history.at[slots[:, None], jnp.maximum(at, 0)].get(mode="clip")
    recent = jnp.where(at >= prompt_length[:, None], recent, -2)  # the prompt is no part of a bad word
    begun = ((words[:, :, :-1] == recent[:, None]) | (words[:, :, :-1] == -1)).all(2)
    exists = lax.iota(jnp.int32, MAX_BAD_WORDS) < num_words[:, None]
    return _forbid(logits, jnp.where(begun & exists, words[:, :, -1], logits.shape[1]))


def _occurrences(history, slots, prompt_length, length, vocab: int, chunk: int) -> Array:
    """Per row and token a number: positive if it stands in the prompt or the output, its half how often in the output.

    One array, of 16 bits where that suffices: it is as large as the logits."""
    rows, max_len = slots.shape[0], history.shape[1]
    row = lax.iota(jnp.int32, rows)[:, None]

    def count(number, found):
        at = jnp.broadcast_to(number * chunk + lax.iota(jnp.int32, chunk), (rows, chunk))
        ids = history.at[slots[:, None], at].get(mode="clip")
        known = at < length[:, None]
        output = at >= prompt_length[:, None]
        one = lambda value: jnp.array(value, found.dtype)
        found = found.at[row, jnp.where(known & ~output, ids, vocab)].max(one(1), mode="drop")
        return found.at[row, jnp.where(known & output, ids, vocab)].add(one(2), mode="drop")

    found = jnp.zeros((rows, vocab), jnp.uint16 if max_len < 2**15 else jnp.uint32)
    if chunk == max_len:
        return count(jnp.int32(0), found)
    chunks = lax.div(length.max() + (chunk - 1), jnp.int32(chunk))
    return lax.fori_loop(jnp.int32(0), chunks, count, found)


def _penalties(logits, found, repetition, presence, frequency):
    counts = (found >> found.dtype.type(1)).astype(jnp.float32)
    repetition = jnp.where(found > 0, repetition[:, None], jnp.float32(1))
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - frequency[:, None] * counts
    return logits - presence[:, None] * (counts > 0).astype(jnp.float32)
