"""Verification in plain jnp: the definition that every implementation is compared with.

A row has `width` positions of logits: the target's own, computed in one step from the tokens before each drafted
token and, last, from all of them. Two rules say how many of the drafts stand (`RULES`):

- `agreement`: the target is sampled at every position with that position's own noise, and drafts stand while they
  are what was sampled. Whoever drafted, the tokens are those that come without drafts, bit for bit.
- `rejection`: modified rejection sampling (Leviathan et al. 2023, Chen et al. 2023). A draft x of probability q(x)
  stands with probability min(1, p(x) / q(x)); in place of the first that does not, a token is drawn in proportion
  to max(p - q, 0). The tokens have the target's distribution if each draft was drawn from q with noise of its own.

Greedy rows go by agreement under either rule. Behind the last draft, and where there are none, the token is the
sampler's own. Random numbers come from (seed, position, purpose), so nothing depends on the other rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from jaxserve.kernels_pallas.verify_draft import blocks, filters, noise
from jaxserve.kernels_pallas.verify_draft.logprobs import Logprobs, logprobs
from jaxserve.kernels_pallas.verify_draft.sampler import Row, SamplingRows, sample
from jaxserve.sampling_params import COLDEST
from jaxserve.validation import require

RULES = ("agreement", "rejection")


class Verified(NamedTuple):
    """`tokens` are the accepted drafts and the token that follows them, then -1."""

    num_accepted: Int32[Array, " rows"]
    next_token: Int32[Array, " rows"]
    tokens: Int32[Array, "rows width"]
    logprobs: Logprobs | None  # of `tokens`: leaves [rows, width, ...], zeros where there is no token


def verify_draft(
    logits: Float32[Array, "rows width vocab"],
    draft_tokens: Int32[Array, "rows width-1"],
    num_drafts: Int32[Array, " rows"],
    rows: SamplingRows,
    positions: Int32[Array, " rows"],
    *,
    rule: str = "agreement",
    draft_logits: Float32[Array, "rows width-1 vocab"] | None = None,
    raw_logits: Float32[Array, "rows width vocab"] | None = None,
    max_logprobs: int | None = None,
    candidates: int = 64,
) -> Verified:
    """How many of each row's first `num_drafts` drafts are accepted, and the token that follows.

    `positions` are those of each row's first token (the one sampled from `logits[:, 0]`). `draft_logits` are what the
    drafts were sampled from by the row's own parameters (-inf for tokens the proposer does not know); None says that
    the proposer had no choice, so q is 1 at its draft. Only `rejection` looks at them. With `max_logprobs` (static)
    the tokens' log-probabilities under `raw_logits` are given (`logits` without), as by `logprobs`.
    """
    check_rule(rule)
    sampled = _agree if rule == "agreement" else _reject
    with jax.named_scope("verify_draft"):
        tokens = sampled(logits, draft_tokens, num_drafts, rows, positions, draft_logits, candidates)
        raw_logits = logits if raw_logits is None else raw_logits
        return conclude(tokens, draft_tokens, num_drafts, raw_logits, rows.wants_logprobs, max_logprobs)


def check_rule(rule: str) -> None:
    """ValueError for a name that is no rule."""
    require(rule in RULES, "rule", rule, f"one of {RULES}")


def conclude(
    tokens: Int32[Array, "rows width"],
    draft_tokens: Int32[Array, "rows width-1"],
    num_drafts: Int32[Array, " rows"],
    raw_logits: Float32[Array, "rows width vocab"],
    wanted: Int32[Array, " rows"],
    max_logprobs: int | None,
) -> Verified:
    """From the token that each position would give, if all drafts before it are accepted, to the result."""
    drafts = draft_tokens.shape[1]
    stands = (tokens[:, :-1] == draft_tokens) & (_steps(draft_tokens) < num_drafts[:, None])
    num_accepted = jnp.where(stands, jnp.int32(drafts), _steps(stands)).min(axis=1, initial=drafts)
    next_token = jnp.take_along_axis(tokens, num_accepted[:, None], axis=1, mode="promise_in_bounds")[:, 0]
    tokens = jnp.where(_steps(tokens) <= num_accepted[:, None], tokens, jnp.int32(-1))
    found = None if max_logprobs is None else _logprobs(raw_logits, tokens, wanted, max_logprobs)
    return Verified(num_accepted, next_token, tokens, found)


def _agree(logits, draft_tokens, num_drafts, rows: SamplingRows, positions, draft_logits, candidates: int):
    """The target's own samples."""
    count, width, vocab = logits.shape
    every, at = each(rows, positions, width)
    idle = (_steps(logits) > num_drafts[:, None]).reshape(-1)
    every = every._replace(temperature=jnp.where(idle, jnp.float32(0), every.temperature))
    return sample(logits.reshape(-1, vocab), every, at, candidates=candidates).reshape(count, width)


def _reject(logits, draft_tokens, num_drafts, rows: SamplingRows, positions, draft_logits, candidates: int):
    """The drafts that stand, another token where one does not, and the sampler's behind the last."""
    count, width, vocab = logits.shape
    last = jnp.take_along_axis(logits, num_drafts[:, None, None], axis=1, mode="promise_in_bounds")[:, 0]
    following = sample(last, rows, positions + num_drafts, candidates=candidates)
    if width == 1:
        return following[:, None]
    every, at = each(rows, positions, width - 1)
    target = logits[:, :-1].reshape(-1, vocab)
    drafts = jnp.clip(draft_tokens.reshape(-1), 0, vocab - 1)
    if draft_logits is None:
        offered = (lax.iota(jnp.int32, vocab) == drafts[:, None]).astype(jnp.float32)
    else:
        offered = probabilities(draft_logits.reshape(-1, vocab), every)
    wanted = probabilities(target, every)
    chance = noise.uniform(noise.row_keys(every.seed, at, noise.ACCEPTANCE)[:, 0])
    stands = chance * _at(offered, drafts) < _at(wanted, drafts)
    instead = _draw(wanted - offered, wanted, noise.row_keys(every.seed, at, noise.RESIDUAL))
    tokens = jnp.where(stands, drafts, instead)
    tokens = jnp.where(every.temperature < COLDEST, blocks.largest(target)[0], tokens).reshape(count, width - 1)
    tokens = jnp.concatenate([tokens, following[:, None]], axis=1)
    return jnp.where(_steps(tokens) == num_drafts[:, None], following[:, None], tokens)


def probabilities(logits: Float32[Array, "rows vocab"], rows: SamplingRows) -> Float32[Array, "rows vocab"]:
    """What `sample` draws from; for greedy rows it is of no use."""
    vocab = logits.shape[1]
    limb = filters.limb_bits(vocab)
    temperature = jnp.where(rows.temperature >= COLDEST, rows.temperature, jnp.float32(1))
    distances = Row(blocks.largest(logits)[1], temperature, rows.seed).distances(logits)
    filtering = filters.FilterRows.of(rows.top_k, rows.top_p, rows.min_p, vocab)

    def furthest() -> Array:
        nucleus = filters.Nucleus.of(distances, filtering)
        return filters.bisect(lambda at: nucleus.keeps(distances, at), len(logits))

    everything = jnp.full(len(logits), jnp.inf, jnp.float32)
    limit = lax.cond(jnp.any(filtering.active(vocab)), furthest, lambda: everything)
    kept = distances <= limit[:, None]
    total = filters.to_float(filters.mass(filters.weights(distances, limb), kept, limb), limb)
    return jnp.where(kept, jnp.exp(-distances), jnp.float32(0)) / total[:, None]


def _draw(excess: Float32[Array, "rows vocab"], otherwise: Float32[Array, "rows vocab"], keys) -> Int32[Array, " rows"]:
    """A token in proportion to the positive part of `excess`; of `otherwise` where there is none (p = q but for
    rounding)."""
    some = (excess > 0).any(axis=1, keepdims=True)
    weight = jnp.where(some, excess, otherwise)
    ids = lax.iota(jnp.int32, excess.shape[1])[None]
    race = jnp.where(weight > 0, noise.negative_gumbel(keys, ids) - jnp.log(weight), jnp.float32(jnp.inf))
    return lax.argmin(race, 1, jnp.int32)


def _logprobs(logits: Float32[Array, "rows width vocab"], tokens: Int32[Array, "rows width"], wanted, width: int):
    count, positions, vocab = logits.shape
    wanted = jnp.where(tokens >= 0, wanted[:, None], jnp.int32(-1)).reshape(-1)
    found = logprobs(logits.reshape(-1, vocab), jnp.maximum(tokens, 0).reshape(-1), width, wanted)
    return jax.tree.map(lambda leaf: leaf.reshape(count, positions, *leaf.shape[1:]), found)


def each(rows: SamplingRows, positions: Int32[Array, " rows"], width: int) -> tuple[SamplingRows, Array]:
    """The parameters and the position of each of a row's tokens, row after row."""
    at = positions[:, None] + lax.iota(jnp.int32, width)
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, width, axis=0), rows), at.reshape(-1)


def _steps(like: Array) -> Int32[Array, "1 n"]:
    """The numbers of the columns."""
    return lax.iota(jnp.int32, like.shape[1])[None]


def _at(values: Float32[Array, "rows vocab"], ids: Int32[Array, " rows"]) -> Float32[Array, " rows"]:
    return jnp.take_along_axis(values, ids[:, None], axis=1, mode="promise_in_bounds")[:, 0]
