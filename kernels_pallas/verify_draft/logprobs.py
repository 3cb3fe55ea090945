"""Log-probabilities of the raw distribution: before temperature and filters, as vLLM reports them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from jaxserve.kernels_pallas.verify_draft import blocks, filters


class Logprobs(NamedTuple):
    """Zeros for the rows that want none; the top lists hold at least as many entries as their row wants."""

    token_logprob: Float32[Array, " rows"]
    rank: Int32[Array, " rows"]  # 1 + the number of tokens with a larger logit
    top_ids: Int32[Array, "rows k"]
    top_logprobs: Float32[Array, "rows k"]  # descending; ties by ascending id


def logprobs(
    logits: Float32[Array, "rows vocab"],
    tokens: Int32[Array, " rows"],
    max_logprobs: int,
    wanted: Int32[Array, " rows"],
    *,
    branches: bool = True,
) -> Logprobs:
    """The log-probabilities of `tokens` and of the `max_logprobs` (static) most likely tokens.

    `wanted` is SamplingRows.wants_logprobs; nothing is computed where all of it is -1, except without `branches`
    (static): what is wanted is the same. A vocabulary smaller than `max_logprobs` gives shorter lists.
    """
    where_asked = lax.cond if branches else lambda asked, compute, otherwise: compute()
    vocab = logits.shape[1]
    rows, width = logits.shape[0], min(max_logprobs, vocab)

    def nothing() -> Logprobs:
        zeros = jnp.zeros(rows, jnp.float32), jnp.zeros(rows, jnp.int32)
        return Logprobs(*zeros, jnp.zeros((rows, width), jnp.int32), jnp.zeros((rows, width), jnp.float32))

    def something() -> Logprobs:
        maximum, log_total = _normaliser(logits)
        token = jnp.take_along_axis(logits, tokens[:, None], axis=1, mode="promise_in_bounds")
        rank = 1 + (logits > token).sum(axis=1, dtype=jnp.int32)
        top = where_asked(jnp.any(wanted > 0), top_list, lambda: (nothing().top_ids, nothing().top_logprobs))
        top_logprobs = top[1] - maximum[:, None] - log_total[:, None]
        found = Logprobs(token[:, 0] - maximum - log_total, rank, top[0], top_logprobs)
        return jax.tree.map(
            lambda value: jnp.where(
                (wanted >= 0).reshape((-1,) + (1,) * (value.ndim - 1)), value, jnp.zeros_like(value)
            ),
            found,
        )

    def top_list() -> tuple[Array, Array]:
        top = blocks.top_logits(logits, width)
        return top.ids, top.logits

    with jax.named_scope("logprobs"):
        return where_asked(jnp.any(wanted >= 0), something, nothing)


def whole_logprobs(logits: Float32[Array, "rows vocab"]) -> Float32[Array, "rows vocab"]:
    """The log-probabilities of all tokens, with the bits that `logprobs` gives them."""
    maximum, log_total = _normaliser(logits)
    return logits - maximum[:, None] - log_total[:, None]


def _normaliser(logits: Float32[Array, "rows vocab"]) -> tuple[Float32[Array, " rows"], Float32[Array, " rows"]]:
    """Each row's largest logit, and the logarithm of the sum of the weights relative to its own."""
    _, maximum = blocks.largest(logits)
    limb = filters.limb_bits(logits.shape[1])
    distances = maximum[:, None] - logits
    total = filters.mass(filters.weights(distances, limb), distances < jnp.inf, limb)
    return maximum, jnp.log(filters.to_float(total, limb))
