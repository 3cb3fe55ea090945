"""Verification in plain jnp: the definition that every implementation is compared with.

The target's logits after each token of a run, drafts included, were computed in one step. Each row yields a token, and
a draft stands while it is what the row before it yields (`drafts.reached`). Two rules say what that is:

- `agreement`: the target's own sample with that position's own noise. Whoever drafted, the tokens are those that come
  without drafts, bit for bit.
- `rejection`: modified rejection sampling (Leviathan et al. 2023, Chen et al. 2023). A draft x of probability q(x)
  is taken with probability min(1, p(x) / q(x)); in place of one that is not, a token is drawn in proportion to
  max(p - q, 0). The tokens have the target's distribution if each draft was drawn from q, by noise of the purpose
  SAMPLING at its position. A proposer that had no choice has q = 1 at its draft.

Greedy rows go by agreement under either rule, and a row without a draft behind it yields the sampler's token. Random
numbers come from (seed, position, purpose), so nothing depends on the other rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from jaxserve.config import ACCEPTANCE_RULES
from jaxserve.kernels_pallas.verify_draft import blocks, filters, noise
from jaxserve.kernels_pallas.verify_draft.drafts import DraftLogits, DraftRows, NextDraft
from jaxserve.kernels_pallas.verify_draft.sampler import Row, SamplingRows, near_tokens, sample
from jaxserve.sampling_params import COLDEST
from jaxserve.validation import require


def verify_draft(
    logits: Float32[Array, "rows vocab"],
    rows: SamplingRows,
    positions: Int32[Array, " rows"],
    drafts: DraftRows,
    *,
    rule: str = "agreement",
    draft_logits: DraftLogits | None = None,
    candidates: int = 64,
) -> Int32[Array, " rows"]:
    """The token that each row yields if it is reached; junk for the others.

    `positions` are those of the yielded tokens. `draft_logits` None says that the proposer had no choice; only
    `rejection` looks at them. `candidates` is the sampler's: it changes the cost, not the tokens (0 judges all rows at
    once, those behind a wrong draft, too).
    """
    check_rule(rule)
    with jax.named_scope("verify_draft"):
        if rule == "agreement":
            return sample(logits, rows, positions, candidates=candidates)
        behind = drafts.next()
        judged = behind.exists & (rows.temperature >= COLDEST)
        idle = rows._replace(temperature=jnp.where(judged, jnp.float32(0), rows.temperature))
        tokens = sample(logits, idle, positions, candidates=candidates)
        judge = _judge_in_turn if candidates else _judge_together
        case = Judged(logits, rows, positions, drafts.number, NextDraft(judged, behind.token), draft_logits)
        return lax.cond(jnp.any(judged), lambda: judge(case, tokens, candidates), lambda: tokens)


def check_rule(rule: str) -> None:
    """ValueError for a name that is no rule."""
    require(rule in ACCEPTANCE_RULES, "rule", rule, f"one of {ACCEPTANCE_RULES}")


class Judged(NamedTuple):
    """Rows behind some of which a sampled row's draft stands."""

    logits: Float32[Array, "rows vocab"]
    rows: SamplingRows
    positions: Int32[Array, " rows"]
    number: Int32[Array, " rows"]
    next: NextDraft
    draft_logits: DraftLogits | None


def _judge_in_turn(case: Judged, tokens: Int32[Array, " rows"], candidates: int) -> Int32[Array, " rows"]:
    """`tokens` with those of the judged rows, one row after the other up to a run's first wrong draft: what is in
    memory is the distributions of one row, and the cost goes by the drafts that are looked at."""
    q_rows = None if case.draft_logits is None else case.draft_logits.next_row()

    def turn(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        tokens, right = carry
        right |= case.number[index] == 0

        def judge() -> tuple[Array, Array]:
            own = lambda leaf: lax.dynamic_slice_in_dim(leaf, index, 1)
            q_logits = None if q_rows is None else lax.dynamic_slice_in_dim(case.draft_logits.logits, q_rows[index], 1)
            one = jax.tree.map(own, case._replace(draft_logits=None))
            token = _judge(one, q_logits, candidates)
            return lax.dynamic_update_slice(tokens, token, (index,)), right & (token == one.next.token)[0]

        return lax.cond(case.next.exists[index] & right, judge, lambda: (tokens, right))

    return lax.fori_loop(0, len(tokens), turn, (tokens, jnp.bool_(True)))[0]


def _judge_together(case: Judged, tokens: Int32[Array, " rows"], candidates: int) -> Int32[Array, " rows"]:
    """The same for all judged rows at once."""
    q_logits = None if case.draft_logits is None else case.draft_logits.logits[case.draft_logits.next_row()]
    return jnp.where(case.next.exists, _judge(case, q_logits, candidates), tokens)


def _judge(case: Judged, q_logits: Float32[Array, "rows vocab"] | None, candidates: int) -> Int32[Array, " rows"]:
    """The drafts that stand, and another token where one does not."""
    rows, vocab = case.rows, case.logits.shape[1]
    draft = jnp.clip(case.next.token, 0, vocab - 1)
    wanted = probabilities(case.logits, rows, candidates=candidates)
    if q_logits is None:
        offered = (lax.iota(jnp.int32, vocab) == draft[:, None]).astype(jnp.float32)
    else:
        offered = probabilities(q_logits, rows, candidates=candidates)
    chance = noise.uniform(noise.row_keys(rows.seed, case.positions, noise.ACCEPTANCE)[:, 0])
    stands = chance * _at(offered, draft) < _at(wanted, draft)
    keys = noise.row_keys(rows.seed, case.positions, noise.RESIDUAL)
    instead = lax.cond(stands.all(), lambda: draft, lambda: _draw(wanted - offered, wanted, keys))
    return jnp.where(stands, draft, instead)


def probabilities(
    logits: Float32[Array, "rows vocab"], rows: SamplingRows, *, candidates: int = 64
) -> Float32[Array, "rows vocab"]:
    """What `sample` draws from; for greedy rows it is of no use."""
    vocab = logits.shape[1]
    limb = filters.limb_bits(vocab)
    temperature = jnp.where(rows.temperature >= COLDEST, rows.temperature, jnp.float32(1))
    row = Row(blocks.largest(logits)[1], temperature, rows.seed)
    filtering = filters.FilterRows.of(rows.top_k, rows.top_p, rows.min_p, vocab)
    distances = row.distances(logits)

    def furthest() -> Array:
        def search() -> Array:
            nucleus = filters.Nucleus.of(distances, filtering)
            return filters.bisect(lambda at: nucleus.keeps(distances, at), len(logits))

        if not candidates:
            return search()
        near = near_tokens(logits, row, filtering, candidates)
        last = jnp.where(near.kept, near.distances, jnp.float32(0)).max(axis=1)
        sufficed = near.suffices | ~filtering.active(vocab)
        return jnp.where(near.suffices, last, lax.cond(sufficed.all(), lambda: last, search))

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


def _at(values: Float32[Array, "rows vocab"], ids: Int32[Array, " rows"]) -> Float32[Array, " rows"]:
    return jnp.take_along_axis(values, ids[:, None], axis=1, mode="promise_in_bounds")[:, 0]
